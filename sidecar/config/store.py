"""The section `store`: the object store, how it is reached, what is written to it, and its limits.

What a provider or a client supports is in `tiers/store/access.py`, which checks a configuration
when it is read.

Invariant: no credential is in a `repr`, or in the output of `kvlake config show`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import Field, PlainSerializer, field_validator, model_validator

from sidecar.config.types import (
    Count,
    Duration,
    FilePath,
    Flag,
    HttpUrl,
    Ratio,
    ReadMode,
    SecretText,
    Section,
    Size,
    Text,
    WriteMode,
)
from sidecar.config.units import format_duration
from sidecar.redaction import mask_url, masked
from tiers.store.access import (
    CONNECT_SECONDS_DEFAULT,
    READ_SECONDS_DEFAULT,
    Access,
    AccessError,
    Credentials,
    Encryption,
    Folder,
    Tls,
    check,
    chosen_backend,
)

if TYPE_CHECKING:
    from pathlib import Path

BEYOND_SHARE: Final = 0.5
"""Share of a limit that may be written beyond it, until older chunks are deleted."""

Price = Annotated[Ratio, Field(ge=0, le=1_000_000)]

_URL: Final = re.compile(r"^[a-z][a-z0-9+.-]*://.*", re.DOTALL)


class CredentialsSettings(Section):
    """The identity of this sidecar at the store."""

    kind: Literal["auto", "static", "profile", "role", "anonymous"] = "auto"
    """`auto`: as the provider's own tools find them (environment, files, the machine's role)."""
    access_key: SecretText = None
    """S3, static: the access key's id."""
    secret_key: SecretText = None
    """S3, static: the secret."""
    session_token: SecretText = None
    """S3, static: the token of temporary keys."""
    profile: Text | None = None
    """S3, profile: its name in ~/.aws; for a role, the profile that assumes it."""
    role_arn: Text | None = None
    """S3, role: the role to assume."""
    role_session_name: Text | None = None
    """S3, role: name of the session in AWS's logs; default: kvlake."""
    external_id: SecretText = None
    """S3, role: the external id that its trust policy requires."""
    web_identity_token_file: Text | None = None
    """S3 or Azure, role: the file of a token that is exchanged for credentials (Kubernetes)."""
    key_file: Text | None = None
    """GCS, static: the JSON file of a service account's key."""
    token: SecretText = None
    """GCS, static: a bearer token, which is not renewed."""
    account_key: SecretText = None
    """Azure, static: a key of the storage account."""
    sas_token: SecretText = None
    """Azure, static: a shared access signature, without the question mark."""
    tenant_id: Text | None = None
    """Azure: the directory of client_id."""
    client_id: Text | None = None
    """Azure, static: a service principal; role: a managed or federated identity."""
    client_secret: SecretText = None
    """Azure, static: the service principal's secret."""


class TlsSettings(Section):
    """Verification of the store's certificate."""

    ca_file: FilePath | None = None
    """Certificate authorities (PEM) of the store."""
    verify: Flag = True
    """If disabled, traffic can be read and modified in transit: for tests only."""

    @field_validator("ca_file")
    @classmethod
    def _exists(cls, value: Path | None) -> Path | None:
        if value is not None and not value.is_file():
            raise ValueError(f"{value} is no file; give the PEM file of the certificate authority")
        return value


class EncryptionSettings(Section):
    """Server-side encryption of written objects (S3)."""

    algorithm: Literal["AES256", "aws:kms", "aws:kms:dsse"] | None = None
    """Default: that of the bucket."""
    kms_key: Text | None = None
    """Id, alias or ARN of the KMS key; default: AWS's own for S3."""


class FolderSettings(Section):
    """How a file:// folder is written and read."""

    direct: Flag = True
    """Bypass the page cache (O_DIRECT), for a fraction of the processor time."""
    fsync: Flag = False
    """Flush to disk before a write counts as done; if off, a power cut may lose the last ones."""
    shared: Flag = False
    """For sidecars of several users: modes by the umask, not 0600 and 0700."""


class BreakerSettings(Section):
    """When requests to a failing store are suspended, for reads and writes separately."""

    failures_max: Count = Field(default=5, ge=1, le=1_000_000)
    """Requests that fail in a row, retries included, before requests are suspended."""
    pause: Duration = Field(default=1.0, ge=0.01)
    """How long, before one request probes whether the store works again."""
    pause_max: Duration = Field(default=30.0, ge=0.01)
    """The pause doubles with each probe that fails, up to this."""


class CollectionSettings(Section):
    """Compaction of the catalog, and deletion by `ttl`, `size_max` and `objects_max`."""

    enabled: Flag = True
    """Take part in it. One sidecar at a time does it: the holder of the store's lease."""
    every: Duration = Field(default=600.0, ge=1.0)
    """How often the sidecar checks whether there is anything to do."""
    grace: Duration = Field(default=300.0, ge=0.1)
    """From withdrawing a chunk to deleting it; longer than a refresh and a read together."""
    quarantine_keep: Duration | None = Field(default=7 * 86_400.0, ge=1.0)
    """How long damaged objects stay in `quarantine/`, for inspection; null: for ever."""


class PriceSettings(Section):
    """What the store charges, for an estimate of the monthly bill. Requests are per 1000."""

    currency: str = Field(default="USD", min_length=1, max_length=8)
    """Currency of the prices; only shown."""
    list: Price = 0.0
    """1000 requests that list."""
    get: Price = 0.0
    """1000 requests that read."""
    put: Price = 0.0
    """1000 requests that write or copy."""
    delete: Price = 0.0
    """1000 requests that delete."""
    head: Price = 0.0
    """1000 requests for an object's metadata; the sidecar sends none."""
    gb_month: Price = 0.0
    """One GB (10^9 bytes) kept for a month."""
    gb_read: Price = 0.0
    """One GB read."""
    gb_written: Price = 0.0
    """One GB written."""


class StoreSettings(Section):
    """The object store tier, shared by every sidecar with the same place."""

    url: Annotated[str, Field(repr=False), PlainSerializer(mask_url, when_used="json")]
    """Where chunks go: s3://bucket, gs://bucket, az://container, file:///directory."""
    backend: Literal["auto", "fsspec", "obstore"] = "auto"
    """Client: obstore if possible (s3://, gs://, az:// without storage_options), else fsspec."""
    endpoint: HttpUrl | None = Field(default=None, repr=False)
    """Address of the store, such as https://minio.example.com:9000; default: the provider's."""
    addressing: Literal["auto", "path", "virtual"] = "auto"
    """S3: the bucket in the path or in the host; auto: the path if `endpoint` is given."""
    region: Text | None = None
    """S3: the bucket's region; default: that of the environment or profile."""
    account: Text | None = None
    """Azure: the storage account."""
    credentials: CredentialsSettings = Field(default_factory=CredentialsSettings)
    tls: TlsSettings = Field(default_factory=TlsSettings)
    proxy: HttpUrl | None = Field(default=None, repr=False)
    """An HTTP proxy; default: that of the environment (HTTPS_PROXY)."""
    connect_timeout: Duration = Field(default=CONNECT_SECONDS_DEFAULT, ge=0.01, le=600)
    """Longest time to connect."""
    read_timeout: Duration = Field(default=READ_SECONDS_DEFAULT, ge=0.01, le=3600)
    """Longest silence of a connection while a response is due."""
    encryption: EncryptionSettings = Field(default_factory=EncryptionSettings)
    storage_class: Text | None = None
    """Class (S3, GCS) or access tier (Azure) of written objects; default: the bucket's."""
    folder: FolderSettings = Field(default_factory=FolderSettings)

    storage_options: Annotated[dict[str, Any], PlainSerializer(masked, when_used="json")] = Field(
        default_factory=dict, repr=False
    )
    """Passed to the fsspec client unchanged, for options that have no setting here."""
    prefix: str = ""
    """Path under `url` below which everything is kept."""
    write: WriteMode = "through"
    """Which chunks are written, in the background. `through`: all, at once. `on_reuse`: those that
    are requested again. `on_evict`: those that host memory will evict next. `off`: none."""
    read: ReadMode = "on"
    """`on`: chunks that only the store holds are served. `off`: they are not."""
    refresh_seconds: Duration = Field(default=5.0, ge=0.05)
    """How often the catalog is read for chunks of other sidecars."""
    catalog_flush: Duration = Field(default=1.0, ge=0.01, le=3600)
    """Longest until a written chunk is announced to others. A crash loses unannounced ones."""
    catalog_rows_max: Count = Field(default=10_000, ge=1, le=100_000)
    """Unannounced chunks; at this number, they are announced at once."""
    reconcile_every: Duration = Field(default=86_400.0, ge=1.0)
    """Period in which all objects are compared with the catalog, in the background, in slices."""
    ttl: Duration | None = Field(default=None, ge=1.0)
    """Age since it was written at which a chunk is deleted, such as "30d"."""
    size_max: Size | None = Field(default=None, ge=1)
    """Bytes of a namespace (a model); beyond them, the oldest chunks are deleted."""
    objects_max: Count | None = Field(default=None, ge=1)
    """Objects of a namespace; beyond them, the oldest chunks are deleted."""
    gc: CollectionSettings = Field(default_factory=CollectionSettings)
    prices: PriceSettings | None = None
    writes_inflight_max: Count = Field(default=4, ge=1, le=1024)
    """Objects written at the same time."""
    reads_inflight_max: Count = Field(default=16, ge=1, le=1024)
    """Objects read at the same time."""
    requests_per_second_max: Count | None = Field(default=None, ge=1, le=1_000_000)
    """Requests per second, retries included, evenly spread; null: no limit."""
    write_queue_max: Size = Field(default="4GiB", ge=1, validate_default=True)
    """Bytes queued for writing, in host memory; beyond them the oldest is not written."""
    breaker: BreakerSettings = Field(default_factory=BreakerSettings)
    recompute: Literal["when_sooner", "never"] = "when_sooner"
    """`when_sooner`: a prompt waits only while reading is expected to be faster than computing.
    `never`: it waits as long as `limits.lookup_wait` allows, to spare the GPU."""
    regret_max: Ratio = Field(default=0.04, ge=0, le=1)
    """Share of the time to compute prompts that may be lost by waiting for the store in vain."""
    deadline_seconds_max: Duration = Field(default=30.0, ge=0.01)
    """Longest that one request to the store may take, retries included."""
    retries_max: Count = Field(default=3, ge=0, le=100)
    """How often a request is retried after a transient error."""

    @field_validator("url")
    @classmethod
    def _is_url(cls, value: str) -> str:
        if not _URL.match(value):
            remedy = f"file://{value}" if value.startswith("/") else f"s3://{value or 'bucket'}"
            raise ValueError(
                f"{mask_url(value)!r} has no scheme; write a URL such as {mask_url(remedy)}"
            )
        return value

    @field_validator("endpoint", "region", "account", "proxy", "storage_class", mode="before")
    @classmethod
    def _left_out(cls, value: object) -> object:
        # So that `endpoint: ${KVLAKE_S3_ENDPOINT:-}` works with and without one.
        return None if value == "" else value

    @field_validator("prefix")
    @classmethod
    def _relative(cls, value: str) -> str:
        trimmed = value.strip("/")
        if any(part in ("", ".", "..") for part in trimmed.split("/") if trimmed):
            raise ValueError(f"{value!r} must be a plain relative path such as team-a/kv")
        return trimmed

    @model_validator(mode="after")
    def _consistent(self) -> StoreSettings:
        least = self.refresh_seconds + self.deadline_seconds_max
        if self.gc.grace <= least:
            raise ValueError(
                f"gc.grace={format_duration(self.gc.grace)}: a chunk may still be read "
                f"{format_duration(least)} after it was withdrawn (refresh_seconds and "
                "deadline_seconds_max together); raise gc.grace"
            )
        try:
            backend = chosen_backend(self.url, self.access, self.storage_options)
            check(self.url, self.access, backend)
        except AccessError as error:
            raise ValueError(str(error)) from error
        return self

    def secrets(self) -> set[str]:
        """Every value that must not be shown."""
        found = {str(value) for value in self.access.credentials.secrets().values()}
        masked([self.url, self.endpoint, self.proxy, self.storage_options], found)
        return found

    @property
    def access(self) -> Access:
        """How the store is reached, in the form of the tiers."""
        return Access(
            backend=self.backend,
            endpoint=self.endpoint,
            addressing=self.addressing,
            region=self.region,
            account=self.account,
            credentials=Credentials(**self.credentials.model_dump()),
            tls=Tls(str(self.tls.ca_file or "") or None, self.tls.verify),
            proxy=self.proxy,
            connect_seconds_max=self.connect_timeout,
            read_seconds_max=self.read_timeout,
            encryption=Encryption(**self.encryption.model_dump()),
            storage_class=self.storage_class,
            folder=Folder(**self.folder.model_dump()),
        )

    @property
    def capped(self) -> bool:
        """Whether namespaces have a limit."""
        return self.size_max is not None or self.objects_max is not None

    def has_room(self, num_bytes: int, objects: int) -> bool:
        """Whether a namespace may reach this size until the next collection."""
        beyond = 1 + BEYOND_SHARE
        if self.size_max is not None and num_bytes > beyond * self.size_max:
            return False
        return self.objects_max is None or objects <= beyond * self.objects_max

"""The settings by which a site reaches its object store, as sections of the configuration file.

Owns what people write below `store`: credentials, TLS, encryption, a local folder. Does not own
what a provider or a client can follow: that is `tiers/store/access.py`, which is asked when a file
is checked, so that nobody learns it from a running sidecar.

Invariant: no value of a credential is in a `repr`, or in what `kvlake config show` prints.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import AfterValidator, Field, WithJsonSchema, field_validator

from sidecar.config.section import Section
from sidecar.config.types import Directory, Duration, Flag
from sidecar.config.yaml_file import MASK, mask_url, secrets_of_url
from tiers.store import access

if TYPE_CHECKING:
    from pathlib import Path

Text = Annotated[str, Field(min_length=1)]
_HTTP_PATTERN: Final = r"^https?://[^/]"


def _with_scheme(value: str) -> str:
    if not re.match(_HTTP_PATTERN, value):
        # What is before an @ may be a password.
        _, _, place = value.rpartition("@")
        raise ValueError(f"{place!r} has no scheme; write http://HOST:PORT or https://HOST")
    return value


HttpUrl = Annotated[
    str, AfterValidator(_with_scheme), WithJsonSchema({"type": "string", "pattern": _HTTP_PATTERN})
]


class CredentialsSettings(Section):
    """Who this sidecar is to the store."""

    kind: Literal["auto", "static", "profile", "role", "anonymous"] = "auto"
    """`auto`: what the provider's own tools would find (environment, files, the machine's role)."""
    access_key: Text | None = Field(default=None, repr=False)
    """S3, static: the access key's id."""
    secret_key: Text | None = Field(default=None, repr=False)
    """S3, static: the secret."""
    session_token: Text | None = Field(default=None, repr=False)
    """S3, static: the token of temporary keys."""
    profile: Text | None = None
    """S3, profile: its name in ~/.aws; for a role, whose credentials assume it."""
    role_arn: Text | None = None
    """S3, role: what is assumed."""
    role_session_name: Text | None = None
    """S3, role: how the session is called in AWS's logs; kvlake if left out."""
    external_id: Text | None = Field(default=None, repr=False)
    """S3, role: what the role's trust policy asks for."""
    web_identity_token_file: Text | None = None
    """S3 or Azure, role: the file of a token that is exchanged for credentials (Kubernetes)."""
    key_file: Text | None = None
    """GCS, static: the JSON file of a service account's key."""
    token: Text | None = Field(default=None, repr=False)
    """GCS, static: a bearer token, which is not renewed."""
    account_key: Text | None = Field(default=None, repr=False)
    """Azure, static: a key of the storage account."""
    sas_token: Text | None = Field(default=None, repr=False)
    """Azure, static: a shared access signature, without the question mark."""
    tenant_id: Text | None = None
    """Azure: the directory of client_id."""
    client_id: Text | None = None
    """Azure, static: a service principal; role: a managed or federated identity."""
    client_secret: Text | None = Field(default=None, repr=False)
    """Azure, static: the service principal's secret."""


class TlsSettings(Section):
    """Whom to trust."""

    ca_file: Directory | None = None
    """Authorities (PEM) of the store's certificate."""
    verify: Flag = True
    """Off, anybody on the way can read and change what is sent: for tests only."""

    @field_validator("ca_file")
    @classmethod
    def _is_there(cls, value: Path | None) -> Path | None:
        if value is not None and not value.is_file():
            raise ValueError(f"{value} is no file; give the PEM file of the certificate authority")
        return value


class EncryptionSettings(Section):
    """Server-side encryption of what is written (S3)."""

    algorithm: Literal["AES256", "aws:kms", "aws:kms:dsse"] | None = None
    """Left out, the bucket's own default holds."""
    kms_key: Text | None = None
    """Id, alias or ARN of the KMS key; left out, AWS's own for S3."""


class FolderSettings(Section):
    """How a file:// folder is written and read."""

    direct: Flag = True
    """Past the page cache (O_DIRECT), for a fraction of the processor time."""
    fsync: Flag = False
    """On the disk before a write counts as done; off, a power cut may lose the last ones."""
    shared: Flag = False
    """Sidecars of several users share it: modes by the umask, not 0600 and 0700."""


class AccessSettings(Section):
    """The fields of `store` that say where it is, and how it is reached."""

    url: str
    """Where chunks go: s3://bucket, gs://bucket, az://container, file:///directory."""
    backend: Literal["auto", "fsspec", "obstore"] = "auto"
    """Client: obstore where it can (s3://, gs://, az:// without storage_options), else fsspec."""
    endpoint: HttpUrl | None = Field(default=None, repr=False)
    """Where the store answers, such as https://minio.example.com:9000, if not at the provider."""
    addressing: Literal["auto", "path", "virtual"] = "auto"
    """S3: the bucket in the path or in the host; auto: the path with an endpoint of your own."""
    region: Text | None = None
    """S3: the bucket's region; left out, that of the environment or profile."""
    account: Text | None = None
    """Azure: the storage account."""
    credentials: CredentialsSettings = Field(default_factory=CredentialsSettings)
    tls: TlsSettings = Field(default_factory=TlsSettings)
    proxy: HttpUrl | None = Field(default=None, repr=False)
    """An HTTP proxy on the way; left out, that of the environment (HTTPS_PROXY)."""
    connect_timeout: Duration = Field(default=access.CONNECT_SECONDS_DEFAULT, ge=0.01, le=600)
    """Longest that a connection may take."""
    read_timeout: Duration = Field(default=access.READ_SECONDS_DEFAULT, ge=0.01, le=3600)
    """Longest that a connection may stay silent while an answer is due."""
    encryption: EncryptionSettings = Field(default_factory=EncryptionSettings)
    storage_class: Text | None = None
    """Class (S3, GCS) or access tier (Azure) of what is written; left out, the bucket's own."""
    folder: FolderSettings = Field(default_factory=FolderSettings)

    @field_validator("endpoint", "region", "account", "proxy", "storage_class", mode="before")
    @classmethod
    def _left_out(cls, value: object) -> object:
        # So that `endpoint: ${KVLAKE_S3_ENDPOINT:-}` serves sites with and without one.
        return None if value == "" else value

    def shown_access(self) -> dict[str, object]:
        """Those of the fields that hold secrets, as they may be shown."""
        fields = type(self.credentials).model_fields
        shown = {
            name: value if fields[name].repr or value is None else MASK
            for name, value in self.credentials.model_dump().items()
        }
        return {
            "credentials": shown,
            "endpoint": self.endpoint and mask_url(self.endpoint),
            "proxy": self.proxy and mask_url(self.proxy),
        }

    def secrets(self) -> set[str]:
        """Every value that must not be shown."""
        found = {str(value) for value in self.access.credentials.secrets().values()}
        for url in (self.endpoint, self.proxy):
            found |= secrets_of_url(url or "")
        return found

    @property
    def access(self) -> access.Access:
        """The same for the tiers."""
        return access.Access(
            backend=self.backend,
            endpoint=self.endpoint,
            addressing=self.addressing,
            region=self.region,
            account=self.account,
            credentials=access.Credentials(**self.credentials.model_dump()),
            tls=access.Tls(
                ca_file=None if self.tls.ca_file is None else str(self.tls.ca_file),
                verify=self.tls.verify,
            ),
            proxy=self.proxy,
            connect_seconds_max=self.connect_timeout,
            read_seconds_max=self.read_timeout,
            encryption=access.Encryption(**self.encryption.model_dump()),
            storage_class=self.storage_class,
            folder=access.Folder(**self.folder.model_dump()),
        )

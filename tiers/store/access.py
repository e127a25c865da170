"""How a site reaches its object store: the settings that mean the same on every client.

Owns `Access` and its parts, which the section `store` of the configuration extends, which client
serves which URL (`chosen_backend`), and which settings a provider and a client can follow
(`check`). Does not own the translation for a client.

Invariants: an `Access` that passed `check` is followed in full by the backend that was chosen for
it, or the store does not open; no credential is in a `repr`, a message or the JSON form; every
message names the setting as the configuration file spells it, and the remedy.
"""

import importlib.util
import logging
import os
import re
from pathlib import Path
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

from pydantic import Field, PlainSerializer, ValidationError, field_validator

from tiers.errors import TierUnavailable
from tiers.redaction import masked
from tiers.settings import Duration, FilePath, Flag, HttpUrl, SecretText, Section, Text

Provider = Literal["s3", "gcs", "azure", "folder", "other"]
CLOUDS: Final[tuple[Provider, ...]] = ("s3", "gcs", "azure")
Backend = Literal["obstore", "fsspec"]
BackendChoice = Literal["auto", "fsspec", "obstore"]

_PROVIDERS: Final[dict[str, Provider]] = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gcs",
    "gcs": "gcs",
    "az": "azure",
    "abfs": "azure",
    "abfss": "azure",
    "file": "folder",
    "local": "folder",
}
_FSSPEC_PACKAGE: Final = {"s3": "s3fs", "gcs": "gcsfs", "azure": "adlfs"}
_WORDS: Final = {
    "s3": "S3",
    "gcs": "GCS",
    "azure": "Azure",
    "folder": "a folder",
    "other": "this kind of URL",
}

_log = logging.getLogger("kvlake.store")

_ENDPOINT_VARIABLES: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_OBSTORE_VARIABLES: Final = (*_ENDPOINT_VARIABLES, "AWS_ENDPOINT")
_AWS_S3: Final = re.compile(r"(^|\.)s3([.-].+)?\.amazonaws\.com(\.cn)?$")
"""Not the hosts of machines and load balancers there, which may serve anything."""
_OFFLINE_CLASSES: Final = ("GLACIER", "DEEP_ARCHIVE")
_AZURE_TIERS: Final = ("Hot", "Cool", "Cold")

_CREDENTIALS: Final[dict[tuple[Provider, str], tuple[str, tuple[str, ...]]]] = {
    ("s3", "static"): (
        "access_key and secret_key",
        ("access_key secret_key [session_token]",),
    ),
    ("s3", "profile"): ("profile", ("profile",)),
    ("s3", "role"): (
        "role_arn",
        ("role_arn [web_identity_token_file] [role_session_name] [external_id] [profile]",),
    ),
    ("gcs", "static"): ("either key_file or token", ("key_file", "token")),
    ("azure", "static"): (
        "account_key, or sas_token, or tenant_id with client_id and client_secret",
        ("account_key", "sas_token", "tenant_id client_id client_secret"),
    ),
    ("azure", "role"): (
        (
            "nothing or client_id (managed identity), or tenant_id, client_id and "
            "web_identity_token_file (workload identity)"
        ),
        ("[client_id]", "tenant_id client_id web_identity_token_file"),
    ),
}
"""By kind of credentials: what it needs, in words and as alternatives, whose optional fields are in
brackets. `auto` and `anonymous` take no fields."""

_OF_CLOUDS: Final = ("endpoint", "credentials", "tls", "proxy", "connect_timeout", "read_timeout")
_SETTINGS: Final[dict[str, tuple[tuple[Provider, ...], str]]] = {
    **dict.fromkeys((*_OF_CLOUDS, "storage_class"), (CLOUDS, "it is for s3://, gs:// and az://")),
    "addressing": (("s3",), "only S3 has two ways to name a bucket"),
    "region": (("s3",), "only S3 clients need to know it"),
    "encryption": (
        ("s3",),
        "only S3 takes it with each object; set a default key on the bucket or container",
    ),
    "account": (("azure",), "only Azure has accounts"),
}
"""The providers that have a setting, and why others do not."""


class Credentials(Section):
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

    def given(self) -> list[str]:
        """Names of the fields that have a value."""
        return list(self.model_dump(exclude_none=True, exclude={"kind"}))


class Tls(Section):
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


class Encryption(Section):
    """Server-side encryption of written objects (S3)."""

    algorithm: Literal["AES256", "aws:kms", "aws:kms:dsse"] | None = None
    """Default: that of the bucket."""
    kms_key: Text | None = None
    """Id, alias or ARN of the KMS key; default: AWS's own for S3."""


class Folder(Section):
    """How a file:// folder is written and read."""

    direct: Flag = True
    """Bypass the page cache (O_DIRECT), for a fraction of the processor time."""
    fsync: Flag = False
    """Flush to disk before a write counts as done; if off, a power cut may lose the last ones."""
    shared: Flag = False
    """For sidecars of several users: modes by the umask, not 0600 and 0700."""


class Access(Section):
    """All settings of how a store is reached, except its URL."""

    backend: BackendChoice = "auto"
    """Client: obstore if possible (s3://, gs://, az:// without storage_options), else fsspec."""
    endpoint: HttpUrl | None = Field(default=None, repr=False)
    """Address of the store, such as https://minio.example.com:9000; default: that of the
    environment (S3: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL), else the provider's."""
    addressing: Literal["auto", "path", "virtual"] = "auto"
    """S3: the bucket in the path or in the host; auto: the path if there is an `endpoint`."""
    region: Text | None = None
    """S3: the bucket's region; default: that of the environment or profile."""
    account: Text | None = None
    """Azure: the storage account."""
    credentials: Credentials = Field(default_factory=Credentials)
    tls: Tls = Field(default_factory=Tls)
    proxy: HttpUrl | None = Field(default=None, repr=False)
    """An HTTP proxy; default: that of the environment (HTTPS_PROXY)."""
    connect_timeout: Duration = Field(default=5.0, ge=0.01, le=600)
    """Longest time to connect."""
    read_timeout: Duration = Field(default=20.0, ge=0.01, le=3600)
    """Longest silence of a connection while a response is due. With obstore, it also limits the
    whole of an upload."""
    encryption: Encryption = Field(default_factory=Encryption)
    storage_class: Text | None = None
    """Class (S3, GCS) or access tier (Azure) of written objects; default: the bucket's."""
    folder: Folder = Field(default_factory=Folder)
    storage_options: Annotated[dict[str, Any], PlainSerializer(masked, when_used="json")] = Field(
        default_factory=dict, repr=False
    )
    """Passed to the fsspec client unchanged, for options that have no setting here."""

    @field_validator("endpoint", "region", "account", "proxy", "storage_class", mode="before")
    @classmethod
    def _left_out(cls, value: object) -> object:
        # So that `endpoint: ${KVLAKE_S3_ENDPOINT:-}` works with and without one.
        return None if value == "" else value

    def virtual_hosted(self, bucket: str) -> bool:
        """Whether the host names an S3 bucket, rather than the first part of the path.

        `auto` is the host on AWS, and the path with a custom endpoint or for a bucket with a dot,
        which no certificate of AWS covers.
        """
        if self.addressing != "auto":
            return self.addressing == "virtual"
        return self.endpoint is None and "." not in bucket

    @property
    def at_aws(self) -> bool:
        """Whether an S3 endpoint is one of AWS's own, which know the deletion of many objects."""
        host = urlsplit(self.endpoint or "").hostname
        return host is None or _AWS_S3.search(host) is not None

    def secrets(self) -> set[str]:
        """Every value that must not be shown."""
        found: set[str] = set()
        masked([self.endpoint, self.proxy, self.storage_options], found)
        fields = Credentials.model_fields.items()
        hidden = (getattr(self.credentials, name) for name, field in fields if not field.repr)
        return found | {value for value in hidden if value is not None}


class AccessError(TierUnavailable):
    """Settings that contradict each other, or that no client can follow."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=False)


def provider_of(url: str) -> Provider:
    """The provider whose API serves `url`. A path without a scheme is a folder."""
    scheme = url.split("://", 1)[0].lower() if "://" in url else "file"
    return _PROVIDERS.get(scheme, "other")


def with_endpoint(url: str, access: Access) -> Access:
    """The access to use: an S3 endpoint of the environment counts as if it were set.

    Clients read the environment themselves, but whether there is an endpoint also decides where the
    bucket goes, and what the server is expected to know. Raises `AccessError` if it is no HTTP URL.
    """
    options = access.storage_options
    named = any("endpoint_url" in one for one in (options, options.get("client_kwargs") or ()))
    ignored = os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true"
    if provider_of(url) != "s3" or access.endpoint is not None or named or ignored:
        return access
    obstore = chosen_backend(url, access) == "obstore"
    for name in _OBSTORE_VARIABLES if obstore else _ENDPOINT_VARIABLES:
        if endpoint := os.environ.get(name):
            try:
                found = Access(endpoint=endpoint).endpoint
            except ValidationError as error:
                why = error.errors()[0]["msg"].removeprefix("Value error, ")
                raise AccessError(f"{name}: {why}, or set store.endpoint") from None
            _log.info("the S3 endpoint is that of %s, as if it were store.endpoint", name)
            return access.model_copy(update={"endpoint": found})
    return access


def installed(package: str) -> bool:
    """Whether a package can be imported. Imports nothing."""
    return importlib.util.find_spec(package) is not None


def install(extra: str) -> str:
    """How to install the packages of an extra; each provider has one."""
    return f"in a clone of kvlake: pip install '.[{extra}]'"


def present(**options: Any) -> dict[str, Any]:
    """The options that have a value: clients take no None for a default."""
    return {name: value for name, value in options.items() if value is not None}


def names_per_removal(url: str, access: Access) -> int:
    """How many objects one request removes, by the client that serves `url`."""
    backend, provider = chosen_backend(url, access), provider_of(url)
    if backend == "obstore" and provider == "azure":
        return 256
    return 1000 if backend == "obstore" and provider == "s3" and access.at_aws else 1


def chosen_backend(url: str, access: Access) -> Backend:
    """The client that serves `url`. Raises `AccessError` if the requested one cannot.

    `auto` takes obstore if it is installed and nothing is set that only fsspec understands:
    `storage_options`, or a kind of store that obstore has no client for.
    """
    provider, problem = provider_of(url), ""
    if provider not in CLOUDS:
        problem = (
            "store.backend=obstore: obstore serves s3://, gs:// and az:// here; write "
            "store.backend: fsspec (or auto)"
        )
    elif access.storage_options:
        problem = (
            "store.storage_options: store.backend=obstore takes none; write store.backend: "
            "fsspec, or use the settings of store (endpoint, credentials, tls and others)"
        )
    elif not installed("obstore"):
        problem = f"store.backend=obstore: obstore is not installed; {install(provider)}"
    if not problem and access.backend != "fsspec":
        return "obstore"
    if access.backend == "obstore":
        raise AccessError(problem)
    package = _FSSPEC_PACKAGE.get(provider)
    if package is not None and not installed(package):
        raise AccessError(
            f"store.backend={access.backend}: {package} is not installed; {install(provider)}"
        )
    return "fsspec"


def check(url: str, access: Access, backend: Backend) -> None:
    """Raise `AccessError` if a setting means nothing to this provider or client."""
    provider, plain = provider_of(url), Access()
    if provider in CLOUDS:
        _check_credentials(provider, access.credentials)
    for name, (providers, why) in _SETTINGS.items():
        if provider not in providers and getattr(access, name) != getattr(plain, name):
            elsewhere = ", or set it in store.storage_options" if provider == "other" else ""
            raise AccessError(
                f"store.{name}: {why}; leave it out for {_WORDS[provider]}{elsewhere}"
            )
    if provider == "azure" and not (access.account or azure_account(url)):
        raise AccessError(
            "store.account: Azure needs the storage account's name; give it here, or write "
            "store.url as abfs://CONTAINER@ACCOUNT.dfs.core.windows.net"
        )
    if access.tls.ca_file is not None and not access.tls.verify:
        raise AccessError(
            "store.tls: ca_file is of no use while verify is false; leave one of the two out"
        )
    if access.encryption.kms_key is not None and access.encryption.algorithm in (None, "AES256"):
        raise AccessError(
            "store.encryption.kms_key: needs store.encryption.algorithm to be aws:kms or "
            "aws:kms:dsse"
        )
    if access.storage_class is not None:
        _check_storage_class(provider, access.storage_class, backend)


def azure_account(url: str) -> str | None:
    """The account in `abfs://container@account.dfs.core.windows.net`, or None."""
    host = urlsplit(url).netloc
    return host.split("@", 1)[1].split(".", 1)[0] if "@" in host else None


def _check_storage_class(provider: Provider, name: str, backend: Backend) -> None:
    if provider == "gcs" and backend == "fsspec":
        raise AccessError(
            "store.storage_class: gcsfs cannot set it; write store.backend: obstore, or set a "
            "default storage class on the bucket"
        )
    if name in _OFFLINE_CLASSES or (name.lower() == "archive" and provider == "azure"):
        raise AccessError(
            f"store.storage_class={name}: its objects must be restored for hours before they can "
            "be read; choose a class that is read at once"
        )
    if provider == "azure" and name not in _AZURE_TIERS:
        raise AccessError(
            f"store.storage_class={name}: Azure's access tiers are {', '.join(_AZURE_TIERS)}"
        )


def _check_credentials(provider: Provider, credentials: Credentials) -> None:
    kind, given = credentials.kind, set(credentials.given())
    needs, alternatives = _CREDENTIALS.get((provider, kind), ("", ("",)))
    if not needs and kind in ("static", "profile", "role"):
        kinds = [one for who, one in _CREDENTIALS if who == provider]
        raise AccessError(
            f"store.credentials.kind={kind}: {_WORDS[provider]} has no such kind; write one of "
            f"auto, {', '.join(kinds)} or anonymous"
        )
    allowed = sorted({word.strip("[]") for one in alternatives for word in one.split()})
    for name in credentials.given():
        if name not in allowed:
            takes = f"takes {', '.join(allowed)}" if allowed else "takes no further field"
            raise AccessError(
                f"store.credentials.{name}: kind={kind} of {_WORDS[provider]} {takes}; change "
                "kind, or leave it out"
            )
    if not any(_fits(given, one.split()) for one in alternatives):
        raise AccessError(f"store.credentials: kind={kind} of {_WORDS[provider]} needs {needs}")
    if kind in ("profile", "role") and provider == "s3" and not installed("botocore"):
        raise AccessError(
            f"store.credentials.kind={kind}: it needs botocore, which is not installed; "
            f"{install('s3')}"
        )


def _fits(given: set[str], fields: list[str]) -> bool:
    required = {field for field in fields if not field.startswith("[")}
    return required <= given <= {field.strip("[]") for field in fields}

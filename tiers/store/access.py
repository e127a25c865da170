"""How a site reaches its object store: the settings that mean the same on every client.

Owns `Access` and its parts, which client serves which URL (`chosen_backend`), and which settings a
provider and a client can follow (`check`). Does not own the translation for a client. Does no I/O.

Invariants: an `Access` that passed `check` is followed in full by the backend that was chosen for
it, or the store does not open; no message contains a credential; every message names the setting as
the configuration file spells it, and the remedy.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import urlsplit

from tiers.errors import TierUnavailable

if TYPE_CHECKING:
    from collections.abc import Mapping

Provider = Literal["s3", "gcs", "azure", "folder", "other"]
CLOUDS: Final[tuple[Provider, ...]] = ("s3", "gcs", "azure")
Backend = Literal["obstore", "fsspec"]
BackendChoice = Literal["auto", "obstore", "fsspec"]
CredentialsKind = Literal["auto", "static", "profile", "role", "anonymous"]

CONNECT_SECONDS_DEFAULT: Final = 5.0
READ_SECONDS_DEFAULT: Final = 20.0
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
_WORDS: Final = {"s3": "S3", "gcs": "GCS", "azure": "Azure", "folder": "a folder"}

_OFFLINE_CLASSES: Final = ("GLACIER", "DEEP_ARCHIVE")
_AZURE_TIERS: Final = ("Hot", "Cool", "Cold")

_CREDENTIALS: Final[dict[tuple[Provider, CredentialsKind], tuple[str, tuple[str, ...]]]] = {
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

_CLOUD_ONLY: Final = "it is for s3://, gs:// and az://"
_SETTINGS: Final[dict[str, tuple[str, tuple[Provider, ...], str]]] = {
    "endpoint": ("endpoint", CLOUDS, _CLOUD_ONLY),
    "credentials": ("credentials", CLOUDS, _CLOUD_ONLY),
    "tls": ("tls", CLOUDS, _CLOUD_ONLY),
    "proxy": ("proxy", CLOUDS, _CLOUD_ONLY),
    "connect_seconds_max": ("connect_timeout", CLOUDS, _CLOUD_ONLY),
    "read_seconds_max": ("read_timeout", CLOUDS, _CLOUD_ONLY),
    "storage_class": ("storage_class", CLOUDS, _CLOUD_ONLY),
    "addressing": ("addressing", ("s3",), "only S3 has two ways to name a bucket"),
    "region": ("region", ("s3",), "only S3 clients need to know it"),
    "encryption": (
        "encryption",
        ("s3",),
        "only S3 takes it with each object; set a default key on the bucket or container",
    ),
    "account": ("account", ("azure",), "only Azure has accounts"),
}
"""By attribute of `Access`: its name in the file, the providers that have it, and why others do
not."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """Who this sidecar is to the store. Fields without a repr are secret."""

    kind: CredentialsKind = "auto"
    access_key: str | None = field(default=None, repr=False)
    secret_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    profile: str | None = None
    role_arn: str | None = None
    role_session_name: str | None = None
    external_id: str | None = field(default=None, repr=False)
    web_identity_token_file: str | None = None
    key_file: str | None = None
    token: str | None = field(default=None, repr=False)
    account_key: str | None = field(default=None, repr=False)
    sas_token: str | None = field(default=None, repr=False)
    tenant_id: str | None = None
    client_id: str | None = None
    client_secret: str | None = field(default=None, repr=False)

    def given(self) -> list[str]:
        """Names of the fields that have a value."""
        names = [one.name for one in dataclasses.fields(self) if one.name != "kind"]
        return [name for name in names if getattr(self, name) is not None]

    def secrets(self) -> dict[str, object]:
        """Values that must not be shown, by name."""
        hidden = [one.name for one in dataclasses.fields(self) if not one.repr]
        return {f"secret {name}": getattr(self, name) for name in hidden if getattr(self, name)}


@dataclass(frozen=True, slots=True)
class Tls:
    """Whom to trust."""

    ca_file: str | None = None
    verify: bool = True


@dataclass(frozen=True, slots=True)
class Encryption:
    """Server-side encryption of what is written."""

    algorithm: Literal["AES256", "aws:kms", "aws:kms:dsse"] | None = None
    kms_key: str | None = None


@dataclass(frozen=True, slots=True)
class Folder:
    """How a local folder is written and read."""

    direct: bool = True
    fsync: bool = False
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Access:
    """All settings of how a store is reached, except its URL."""

    backend: BackendChoice = "auto"
    endpoint: str | None = None
    addressing: Literal["auto", "path", "virtual"] = "auto"
    region: str | None = None
    account: str | None = None
    credentials: Credentials = Credentials()
    tls: Tls = Tls()
    proxy: str | None = None
    connect_seconds_max: float = CONNECT_SECONDS_DEFAULT
    read_seconds_max: float = READ_SECONDS_DEFAULT
    encryption: Encryption = Encryption()
    storage_class: str | None = None
    folder: Folder = Folder()

    def virtual_hosted(self, bucket: str) -> bool:
        """Whether the host names an S3 bucket, rather than the first part of the path.

        `auto` is the host on AWS, and the path with a custom endpoint or for a bucket with a dot,
        which no certificate of AWS covers.
        """
        if self.addressing != "auto":
            return self.addressing == "virtual"
        return self.endpoint is None and "." not in bucket


class AccessError(TierUnavailable):
    """Settings that contradict each other, or that no client can follow."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=False)


def provider_of(url: str) -> Provider:
    """The provider whose API serves `url`. A path without a scheme is a folder."""
    scheme = url.split("://", 1)[0].lower() if "://" in url else "file"
    return _PROVIDERS.get(scheme, "other")


def installed(package: str) -> bool:
    """Whether a package can be imported. Imports nothing."""
    return importlib.util.find_spec(package) is not None


def install(extra: str) -> str:
    """How to install the packages of an extra; each provider has one."""
    return f"in a clone of kvlake: pip install '.[{extra}]'"


def present(**options: Any) -> dict[str, Any]:
    """The options that have a value: clients take no None for a default."""
    return {name: value for name, value in options.items() if value is not None}


def names_per_removal(url: str, access: Access, storage_options: Mapping[str, object]) -> int:
    """How many objects one request removes, by the client that serves `url`."""
    backend, provider = chosen_backend(url, access, storage_options), provider_of(url)
    if backend == "obstore" and provider == "azure":
        return 256
    return 1000 if backend == "obstore" and provider == "s3" and access.endpoint is None else 1


def chosen_backend(url: str, access: Access, storage_options: Mapping[str, object]) -> Backend:
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
    elif storage_options:
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
    for attribute, (name, providers, why) in _SETTINGS.items():
        given = getattr(access, attribute) != getattr(plain, attribute)
        if given and provider not in providers:
            elsewhere = ", or set it in store.storage_options" if provider == "other" else ""
            raise AccessError(
                f"store.{name}: {why}; leave it out for {_words(provider)}{elsewhere}"
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
            f"store.credentials.kind={kind}: {_words(provider)} has no such kind; write one of "
            f"auto, {', '.join(kinds)} or anonymous"
        )
    allowed = sorted({word.strip("[]") for one in alternatives for word in one.split()})
    for name in credentials.given():
        if name not in allowed:
            takes = f"takes {', '.join(allowed)}" if allowed else "takes no further field"
            raise AccessError(
                f"store.credentials.{name}: kind={kind} of {_words(provider)} {takes}; change "
                "kind, or leave it out"
            )
    if not any(_fits(given, one.split()) for one in alternatives):
        raise AccessError(f"store.credentials: kind={kind} of {_words(provider)} needs {needs}")
    if kind in ("profile", "role") and provider == "s3" and not installed("botocore"):
        raise AccessError(
            f"store.credentials.kind={kind}: it needs botocore, which is not installed; "
            f"{install('s3')}"
        )


def _fits(given: set[str], fields: list[str]) -> bool:
    required = {field for field in fields if not field.startswith("[")}
    return required <= given <= {field.strip("[]") for field in fields}


def _words(provider: Provider) -> str:
    return _WORDS.get(provider, "this kind of URL")

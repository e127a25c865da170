"""`Access` as s3fs, gcsfs and adlfs spell it.

Owns the translation, and nothing that runs later. `storage_options` of the operator win over what
is derived here: they are the way to say what `Access` has no word for.

Invariants: no client retries by itself, because `wrap.Retrying` does, with the operator's limits,
and layers of it would multiply; nothing is sent from here.
"""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Any, Final

from tiers.store import aws_credentials as aws
from tiers.store.access import azure_account

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tiers.store.access import Access

CONNECTIONS_MAX: Final = 64
SINGLE_REQUEST_BYTES_MAX: Final = 4 << 30
"""Azure's client cuts bodies beyond its own limits into blocks; an image goes in one piece."""
GCS_SCOPE: Final = "https://www.googleapis.com/auth/devstorage.read_write"
AZURE_HOST: Final = "blob.core.windows.net"
_OWN_IDENTITY: Final = frozenset(("key", "secret", "token", "session", "profile", "anon"))
"""Of s3fs's arguments: who asks."""


def s3_options(bucket: str, access: Access, given: Mapping[str, object]) -> dict[str, object]:
    """Arguments of `s3fs.S3FileSystem`."""
    credentials = access.credentials
    config: dict[str, object] = {
        **aws.client_config(access),
        "retries": {"total_max_attempts": 1},
        "max_pool_connections": CONNECTIONS_MAX,
        # The image carries its own checksum from the GPU on; a second one on each way costs CPU,
        # and several S3 servers refuse the trailer that it comes in.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
    }
    # Said outright: botocore's own "auto" differs from release to release, and from obstore's.
    style = "virtual" if access.virtual_hosted(bucket) else "path"
    config["s3"] = {"addressing_style": style}
    client: dict[str, object] = {}
    if access.region is not None:
        client["region_name"] = access.region
    if aws.verify(access) is not None:
        client["verify"] = aws.verify(access)
    extra: dict[str, object] = {}
    if access.encryption.algorithm is not None:
        extra["ServerSideEncryption"] = access.encryption.algorithm
    if access.encryption.kms_key is not None:
        extra["SSEKMSKeyId"] = access.encryption.kms_key
    if access.storage_class is not None:
        extra["StorageClass"] = access.storage_class
    options: dict[str, object] = {}
    if access.endpoint is not None:
        options["endpoint_url"] = access.endpoint
    match credentials.kind:
        case "static":
            options["key"] = credentials.access_key
            options["secret"] = credentials.secret_key
            options["token"] = credentials.session_token
        case "anonymous":
            options["anon"] = True
        case "profile" | "role":
            options["session"] = aws.session_for(access)
        case "auto" if _OWN_IDENTITY.isdisjoint(given):
            # s3fs's own session would look for credentials in files once.
            options["session"] = aws.session_for(access)
        case "auto":
            pass
    own = {"config_kwargs": config, "client_kwargs": client, "s3_additional_kwargs": extra}
    return {**options, **given, **{name: _merged(own[name], given.get(name)) for name in own}}


def _merged(own: dict[str, object], given: object) -> dict[str, object]:
    return {**own, **given} if isinstance(given, dict) else own  # pyright: ignore[reportUnknownVariableType]


def gcs_options(access: Access, given: Mapping[str, object]) -> dict[str, object]:
    """Arguments of `gcsfs.GCSFileSystem`."""
    credentials = access.credentials
    options: dict[str, object] = {}
    if access.endpoint is not None:
        options["endpoint_url"] = access.endpoint
    match credentials.kind:
        case "anonymous":
            options["token"] = "anon"  # noqa: S105 (gcsfs's word for none)
        case "static":
            options["token"] = credentials.key_file or _bearer(credentials.token)
        case _:
            options["token"] = "google_default"  # noqa: S105 (gcsfs's word for the chain)
    if "token" in given:
        del options["token"]
    return {**options, **given}


def _bearer(token: str | None) -> Any:
    from google.oauth2 import credentials

    kind: Any = credentials.Credentials
    return kind(token)


def gcs_session(access: Access) -> Any:
    """The HTTP session of gcsfs. On the event loop that will use it."""
    import aiohttp

    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=_ssl(access), limit=CONNECTIONS_MAX),
        proxy=access.proxy,
        trust_env=access.proxy is None,
    )


def gcs_timeout(access: Access) -> Any:
    """What gcsfs hands to its session with every request, which then has none of its own."""
    import aiohttp

    return aiohttp.ClientTimeout(
        total=None,
        sock_connect=access.connect_seconds_max,
        sock_read=access.read_seconds_max,
    )


def _ssl(access: Access) -> ssl.SSLContext | bool:
    if not access.tls.verify:
        return False
    if access.tls.ca_file is None:
        return True
    return ssl.create_default_context(cafile=access.tls.ca_file)


def azure_options(url: str, access: Access, given: Mapping[str, object]) -> dict[str, object]:
    """Arguments of `adlfs.AzureBlobFileSystem`, whose client `azure_client` makes."""
    # `anon` keeps it from looking for credentials of its own.
    return {"account_name": azure_account(url) or access.account, "anon": True, **given}


def azure_client(url: str, access: Access, given: Mapping[str, Any]) -> Any:
    """The `BlobServiceClient` that follows `access`, and what adlfs calls its credentials."""
    from azure.storage.blob.aio import BlobServiceClient

    account = given.get("account_name") or azure_account(url) or access.account
    options: dict[str, Any] = {
        "retry_total": 0,
        "connection_timeout": access.connect_seconds_max,
        "read_timeout": access.read_seconds_max,
        "max_single_put_size": SINGLE_REQUEST_BYTES_MAX,
        "max_single_get_size": SINGLE_REQUEST_BYTES_MAX,
    }
    if not access.tls.verify:
        options["connection_verify"] = False
    elif access.tls.ca_file is not None:
        options["connection_verify"] = access.tls.ca_file
    if access.proxy is not None:
        options["proxies"] = {"http": access.proxy, "https": access.proxy}
    if "connection_string" in given:
        return BlobServiceClient.from_connection_string(given["connection_string"], **options)
    host = given.get("account_host") or f"{account}.{AZURE_HOST}"
    return BlobServiceClient(
        access.endpoint or f"https://{host}",
        credential=_given_credential(given, account) or _azure_credential(access, account),
        **options,
    )


def _given_credential(given: Mapping[str, Any], account: str | None) -> Any:
    """A credential in `storage_options`; None where there is none."""
    if "account_key" in given:
        return {"account_name": account, "account_key": given["account_key"]}
    if "client_secret" in given:
        from azure.identity import aio

        names = ("tenant_id", "client_id", "client_secret")
        return aio.ClientSecretCredential(*(given.get(name, "") for name in names))
    return given.get("sas_token") or given.get("credential")


def _azure_credential(access: Access, account: str | None) -> Any:
    credentials = access.credentials
    match credentials.kind:
        case "anonymous":
            return None
        case "static" if credentials.account_key is not None:
            return {"account_name": account, "account_key": credentials.account_key}
        case "static" if credentials.sas_token is not None:
            return credentials.sas_token
        case _:
            return _azure_identity(access)


def _azure_identity(access: Access) -> Any:
    from azure.identity import aio

    credentials = access.credentials
    if credentials.kind == "static":
        return aio.ClientSecretCredential(
            credentials.tenant_id or "",
            credentials.client_id or "",
            credentials.client_secret or "",
        )
    if credentials.kind == "role" and credentials.web_identity_token_file is not None:
        return aio.WorkloadIdentityCredential(
            tenant_id=credentials.tenant_id,
            client_id=credentials.client_id,
            token_file_path=credentials.web_identity_token_file,
        )
    if credentials.kind == "role":
        return aio.ManagedIdentityCredential(client_id=credentials.client_id)
    return aio.DefaultAzureCredential()

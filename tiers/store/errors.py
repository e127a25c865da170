"""Turns what an object store's client raised into one of the tier's errors, in plain words.

Owns the tables from codes of S3, GCS and Azure, HTTP statuses, errno and exception types to what
the caller can do (miss, retry, stop and ask a person), and the removal of secrets from every
message.

Does not own retrying (`middleware.py`) or any I/O.

Invariants: every exception gets a `TierError`; one that nobody knows is retryable, because the
number of retries is bounded and a wrong "stop" would turn the store off; a server's 404 is a miss
only with the error code that says so; no value that `storage_options` or the URL hands over as a
secret appears in a message.
"""

from __future__ import annotations

import enum
import errno
import re
import socket
import ssl
from typing import TYPE_CHECKING, Final, NamedTuple

from tiers.errors import (
    ChunkMissing,
    ImageTruncated,
    ObjectExists,
    TierError,
    TierFull,
    TierUnavailable,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

DETAIL_CHARACTERS_MAX: Final = 240
CHAIN_LENGTH_MAX: Final = 16
_SECRET_NAME = re.compile(
    r"key|secret|token|pass|cred|sas|private|session|auth|connection_string", re.IGNORECASE
)
_USER_INFO = re.compile(r"(?<=://)[^/@\s]+@")
_QUERY = re.compile(r"(?<=://)([^\s?]+)\?[^\s)\"']+")
"""A query of an Azure URL may be a signature."""
_SECRET_CHARACTERS_MIN: Final = 4
# obstore tells what happened in its text only.
_OBSTORE_STATUS = re.compile(r"status code: (\d{3})")
_OBSTORE_CODE = re.compile(r"<Code>(\w+)</Code>")
_OBSTORE_DETAIL = "\n\nDebug source"


class ErrorKind(enum.Enum):
    """What a condition means to the caller."""

    MISSING = "missing"
    EMPTY = "empty"
    EXISTS = "exists"
    FULL = "full"
    LATER = "later"
    STOP = "stop"


class ErrorClass(NamedTuple):
    """One condition: its kind, what happened, the remedy, and what it is counted as."""

    kind: ErrorKind
    what: str
    remedy: str
    cause: str = "other"


_MISSING = ErrorClass(
    ErrorKind.MISSING, "no such object", "nothing to do: what is missing is computed"
)
_EMPTY = ErrorClass(ErrorKind.EMPTY, "the object is empty", "it will be written again")
_EXISTS = ErrorClass(ErrorKind.EXISTS, "the name is taken", "another writer was first")
_FULL = ErrorClass(ErrorKind.FULL, "no space is left", "free space or raise the quota of the store")
_CREDENTIALS = ErrorClass(
    ErrorKind.STOP,
    "the credentials were refused",
    "check store.credentials (or, with kind auto, those of the environment)",
    "credentials",
)
_FORBIDDEN = ErrorClass(
    ErrorKind.STOP,
    "access was denied",
    "check the credentials, and allow them to get, put, delete and list objects under the URL",
    "forbidden",
)
_NO_CREDENTIALS = ErrorClass(
    ErrorKind.STOP,
    "no credentials were found",
    "set store.credentials, or give the environment some",
    "no_credentials",
)
_NO_BUCKET = ErrorClass(
    ErrorKind.STOP,
    "the bucket does not exist",
    "create it, or correct the bucket in store.url",
    "no_bucket",
)
_REGION = ErrorClass(
    ErrorKind.STOP,
    "the bucket is served by another region or endpoint",
    "set store.region and store.endpoint",
    "region",
)
_CLOCK = ErrorClass(
    ErrorKind.STOP, "the clocks differ too much", "synchronise this machine's clock", "clock"
)
_BUSY = ErrorClass(
    ErrorKind.LATER, "the store is busy or failing", "retried with growing pauses", "busy"
)
_NOT_THE_STORE = ErrorClass(
    ErrorKind.LATER,
    "a 404 came without the store's own word for a missing object",
    "check what answers at store.endpoint: an ingress or proxy before the store, or another server",
    "not_found",
)
_GARBLED = ErrorClass(
    ErrorKind.LATER, "the upload arrived damaged", "retried with growing pauses", "garbled"
)
_REFUSED_REQUEST = ErrorClass(
    ErrorKind.STOP,
    "the store refused the request",
    "check store.url, store.endpoint and the other settings of store",
    "request",
)
_OPTIONS = ErrorClass(
    ErrorKind.STOP,
    "an option is not understood",
    "check the names in store.storage_options",
    "options",
)
_UNTRUSTED = ErrorClass(
    ErrorKind.STOP,
    "the server's TLS certificate is not trusted",
    "give its authority's PEM file as store.tls.ca_file",
    "untrusted",
)
_NOT_TLS = ErrorClass(
    ErrorKind.STOP,
    "the endpoint does not speak TLS as asked",
    "check whether store.endpoint should start with http:// rather than https://",
    "not_tls",
)
_PACKAGE = ErrorClass(
    ErrorKind.STOP, "a Python package is missing", "install the one that is named", "package"
)
_REFUSED = ErrorClass(
    ErrorKind.LATER,
    "the connection was refused",
    "check that the store is running and that store.endpoint has its host and port",
    "refused",
)
_UNKNOWN_HOST = ErrorClass(
    ErrorKind.LATER,
    "the host name is not known",
    "check store.endpoint and this machine's DNS",
    "unknown_host",
)
_CONNECTION = ErrorClass(
    ErrorKind.LATER,
    "the connection failed",
    "check store.endpoint, store.proxy and the network to the store",
    "connection",
)
_SLOW = ErrorClass(
    ErrorKind.LATER,
    "there was no answer in time",
    "check the network to the store and its load",
    "slow",
)
_READ_ONLY = ErrorClass(
    ErrorKind.STOP,
    "the folder cannot be written or read by this user",
    "change its owner or mode, mount it writable, or choose another store.url",
    "read_only",
)
_NOT_A_FOLDER = ErrorClass(
    ErrorKind.STOP,
    "a file stands where a folder is needed",
    "move it, or choose another store.url",
    "not_a_folder",
)
_UNSUPPORTED = ErrorClass(
    ErrorKind.STOP,
    "the store cannot do that",
    "choose another store, or see the detail",
    "unsupported",
)
_UNKNOWN = ErrorClass(
    ErrorKind.LATER, "the store failed", "see the detail; retried with growing pauses"
)

# S3 error codes: https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html; quota codes
# of MinIO and others are not in it.
_BY_CODE: Final[dict[str, ErrorClass]] = {
    **dict.fromkeys(("NoSuchKey", "NoSuchVersion", "BlobNotFound"), _MISSING),
    **dict.fromkeys(
        (
            "NoSuchBucket",
            "InvalidBucketName",
            "ContainerNotFound",
            "ContainerDisabled",
            "InvalidResourceName",
        ),
        _NO_BUCKET,
    ),
    **dict.fromkeys(
        (
            "InvalidAccessKeyId",
            "SignatureDoesNotMatch",
            "InvalidToken",
            "ExpiredToken",
            "InvalidSecurity",
            "NotSignedUp",
            "AuthenticationFailed",
            "InvalidAuthenticationInfo",
            "NoAuthenticationInformation",
            "AccountProblem",
        ),
        _CREDENTIALS,
    ),
    **dict.fromkeys(
        (
            "AccessDenied",
            "AllAccessDisabled",
            "AuthorizationFailure",
            "AuthorizationPermissionMismatch",
            "InsufficientAccountPermissions",
            "PublicAccessNotPermitted",
        ),
        _FORBIDDEN,
    ),
    **dict.fromkeys(
        (
            "PermanentRedirect",
            "TemporaryRedirect",
            "Redirect",
            "AuthorizationHeaderMalformed",
            "IllegalLocationConstraintException",
        ),
        _REGION,
    ),
    "RequestTimeTooSkewed": _CLOCK,
    "InvalidRange": _EMPTY,
    **dict.fromkeys(("PreconditionFailed", "BlobAlreadyExists", "ConditionNotMet"), _EXISTS),
    "ConditionalRequestConflict": _BUSY,
    **dict.fromkeys(
        ("QuotaExceeded", "XMinioStorageFull", "InsufficientStorage", "StorageQuotaExceeded"),
        _FULL,
    ),
    **dict.fromkeys(
        (
            "SlowDown",
            "ServiceUnavailable",
            "InternalError",
            "RequestTimeout",
            "OperationAborted",
            "OperationTimedOut",
            "ServerBusy",
            "ContainerBeingDeleted",
            "Throttling",
            "ThrottlingException",
        ),
        _BUSY,
    ),
    # S3's own answer to a header that a server does not know, If-None-Match say.
    "NotImplemented": _UNSUPPORTED,
    **dict.fromkeys(("BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch"), _GARBLED),
}
_BY_STATUS: Final[dict[int, ErrorClass]] = {
    301: _REGION,
    307: _REGION,
    308: _REGION,
    401: _CREDENTIALS,
    403: _FORBIDDEN,
    # What stands before a store says it too, of objects that are there: only a code says "gone".
    404: _NOT_THE_STORE,
    408: _BUSY,
    409: _BUSY,
    412: _EXISTS,
    416: _EMPTY,
    425: _BUSY,
    429: _BUSY,
    501: _UNSUPPORTED,
    507: _FULL,
}
_BY_ERRNO: Final[dict[int, ErrorClass]] = {
    errno.ENOENT: _MISSING,
    errno.EEXIST: _EXISTS,
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), _READ_ONLY),
    **dict.fromkeys((errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP), _NOT_A_FOLDER),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), _FULL),
    # No hard links, on some mounts: a name that must not replace another is made with one.
    **dict.fromkeys((errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK), _UNSUPPORTED),
    errno.ECONNREFUSED: _REFUSED,
    errno.ETIMEDOUT: _SLOW,
    **dict.fromkeys(
        (errno.ECONNRESET, errno.EPIPE, errno.EHOSTUNREACH, errno.ENETUNREACH), _CONNECTION
    ),
}
# By name, so that no client library has to be imported (or installed) to know its errors.
_BY_TYPE: Final[dict[str, ErrorClass]] = {
    **dict.fromkeys(
        (
            "NoCredentialsError",
            "PartialCredentialsError",
            "CredentialRetrievalError",
            "TokenRetrievalError",
            "ProfileNotFound",
            "DefaultCredentialsError",
            "CredentialUnavailableError",
            "ClientAuthenticationError",
        ),
        _NO_CREDENTIALS,
    ),
    **dict.fromkeys(("RefreshError", "UnauthenticatedError"), _CREDENTIALS),
    "PermissionDeniedError": _FORBIDDEN,
    "UnknownConfigurationKeyError": _OPTIONS,
    **dict.fromkeys(("NotImplementedError", "NotSupportedError"), _UNSUPPORTED),
    # fsspec's clients for GCS and Azure.
    **dict.fromkeys(("ServiceRequestTimeoutError", "ServiceResponseTimeoutError"), _SLOW),
    **dict.fromkeys(("ParamValidationError", "NoRegionError"), _REFUSED_REQUEST),
    **dict.fromkeys(
        ("ConnectTimeoutError", "ReadTimeoutError", "ServerTimeoutError", "FSTimeoutError"), _SLOW
    ),
}
_CONNECTION_TYPES: Final = frozenset(
    (
        "EndpointConnectionError",
        "ConnectionClosedError",
        "ClientPayloadError",
        "IncompleteReadError",
        "ServerDisconnectedError",
        "ServiceRequestError",
        "ServiceResponseError",
        "ProxyError",
    )
)
# What obstore's text says of a request that was never answered, first match first.
_BY_TEXT: Final[tuple[tuple[str, ErrorClass], ...]] = (
    ("ertificate", _UNTRUSTED),
    ("InvalidContentType", _NOT_TLS),
    ("corrupt message", _NOT_TLS),
    ("dns error", _UNKNOWN_HOST),
    ("Connection refused", _REFUSED),
    ("timed out", _SLOW),
    ("TimedOut", _SLOW),
    ("CredentialsError", _NO_CREDENTIALS),
    ("ProfileNotFound", _NO_CREDENTIALS),
    ("token request", _NO_CREDENTIALS),
    ("credential", _NO_CREDENTIALS),
    ("response body error", _CONNECTION),
    ("error sending request", _CONNECTION),
    ("error decoding response body", _CONNECTION),
    ("onnection", _CONNECTION),
)


class Secrets:
    """The values that must not appear in a message, taken from a URL and its options."""

    def __init__(self, storage_options: Mapping[str, object]) -> None:
        found = set(_secret_values(storage_options, secret=False))
        # Longest first, so that a secret which contains another leaves nothing of itself behind.
        self._values = sorted(found, key=len, reverse=True)

    def hide(self, text: str) -> str:
        """`text` with every known secret and every `user:password@` taken out."""
        for value in self._values:
            text = text.replace(value, "***")
        return _QUERY.sub(r"\1?***", hide_user_info(text))


def hide_user_info(text: str) -> str:
    """`text` with every `user:password@` of a URL taken out."""
    return _USER_INFO.sub("***@", text)


def _secret_values(value: object, *, secret: bool) -> Iterator[str]:
    match value:
        case str():
            if secret and len(value) >= _SECRET_CHARACTERS_MIN:
                yield value
        case dict():
            for name, inner in value.items():  # pyright: ignore[reportUnknownVariableType]
                named = bool(_SECRET_NAME.search(str(name)))  # pyright: ignore[reportUnknownArgumentType]
                yield from _secret_values(inner, secret=secret or named)  # pyright: ignore[reportUnknownArgumentType]
        case _:
            return


def translate(error: Exception, doing: str, secrets: Secrets) -> TierError:
    """The tier's error for `error`, which stopped `doing` (such as "write s3://b/p/name")."""
    verdict = judge(error)
    said = f"{type(error).__name__}: {error}".split(_OBSTORE_DETAIL, 1)[0]
    detail = secrets.hide(" ".join(said.split()))[:DETAIL_CHARACTERS_MAX]
    message = f"{doing}: {verdict.what} ({detail}); {verdict.remedy}"
    match verdict.kind:
        case ErrorKind.MISSING:
            return ChunkMissing(message)
        case ErrorKind.EMPTY:
            return ImageTruncated(message)
        case ErrorKind.EXISTS:
            return ObjectExists(message)
        case ErrorKind.FULL:
            return TierFull(message)
        case ErrorKind.LATER:
            return TierUnavailable(message, retryable=True, cause=verdict.cause)
        case ErrorKind.STOP:
            return TierUnavailable(message, retryable=False, cause=verdict.cause)


def judge(error: Exception) -> ErrorClass:
    """The verdict on `error`: the store's own words count more than what a client made of them."""
    chain = list(_chain(error))
    for rule in (_by_obstore, _by_answer, _by_tls, _by_type, _by_os, _by_connection):
        for link in chain:
            verdict = rule(link)
            if verdict is not None:
                return verdict
    return _UNKNOWN


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    for _ in range(CHAIN_LENGTH_MAX):
        if link is None:
            return
        yield link
        link = link.__cause__ or link.__context__


def _by_obstore(error: BaseException) -> ErrorClass | None:
    """What obstore says, which keeps neither the status nor the code but in its text."""
    kind, text = type(error), str(error)
    if not kind.__module__.startswith("obstore") and _OBSTORE_DETAIL not in text:
        return None
    if kind.__name__ == "AlreadyExistsError":
        return _EXISTS
    code, status = _OBSTORE_CODE.search(text), _OBSTORE_STATUS.search(text)
    if code is not None and code[1] in _BY_CODE:
        return _BY_CODE[code[1]]
    if status is not None and "token request" not in text:
        return _by_status(int(status[1]))
    for words, verdict in _BY_TEXT:
        if words in text:
            return verdict
    return None


def _by_status(status: int) -> ErrorClass | None:
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    if status >= 500:
        return _BUSY
    return _REFUSED_REQUEST if status >= 300 else None


def _by_answer(error: BaseException) -> ErrorClass | None:
    """What the server answered: a botocore `response`, or the status that other clients keep."""
    response = getattr(error, "response", None)
    code, status = "", 0
    if isinstance(response, dict):
        answer: dict[str, dict[str, object]] = response
        code = str(answer.get("Error", {}).get("Code", ""))
        status_found = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        status = status_found if isinstance(status_found, int) else 0
        # A HEAD has no body, so botocore puts the status where the code belongs.
        status = int(code) if code.isdecimal() else status
    else:
        status = _status_of(error)
        # An enum in Azure's client; its text is the code.
        code = str(getattr(error, "error_code", None) or "").rsplit(".", 1)[-1]
    if code in _BY_CODE:
        return _BY_CODE[code]
    return _by_status(status)


def _status_of(error: BaseException) -> int:
    """The HTTP status that clients other than botocore keep on their errors, or 0."""
    # gcsfs has it in `code`, but so have aiohttp's parse errors, which no server answered.
    names = ("code",) if type(error).__name__ == "HttpError" else ("status", "status_code")
    for name in names:
        value = getattr(error, name, None)
        if isinstance(value, int) and 300 <= value < 600:
            return value
    return 0


def _by_tls(error: BaseException) -> ErrorClass | None:
    if isinstance(error, ssl.SSLCertVerificationError):
        return _UNTRUSTED
    if isinstance(error, ssl.SSLError):
        reason = str(error).upper()
        if "WRONG_VERSION" in reason or "RECORD LAYER" in reason or "UNKNOWN_PROTOCOL" in reason:
            return _NOT_TLS
        return _CONNECTION
    return None


def _by_os(error: BaseException) -> ErrorClass | None:
    if isinstance(error, socket.gaierror):
        return _UNKNOWN_HOST
    if isinstance(error, ImportError):
        return _PACKAGE
    if isinstance(error, TypeError):
        return _OPTIONS
    if isinstance(error, OSError) and error.errno in _BY_ERRNO:
        return _BY_ERRNO[error.errno]
    if isinstance(error, FileNotFoundError):
        return _MISSING
    if isinstance(error, FileExistsError):
        return _EXISTS
    if isinstance(error, PermissionError):
        return _READ_ONLY
    if isinstance(error, TimeoutError):
        return _SLOW
    # gcsfs makes one of a 403, without errno.
    if isinstance(error, OSError) and str(error).startswith("Forbidden: "):
        return _FORBIDDEN
    # Several addresses tried and all refused: asyncio joins them into one OSError without errno.
    if isinstance(error, OSError) and "Errno 111" in str(error):
        return _REFUSED
    return None


def _by_type(error: BaseException) -> ErrorClass | None:
    return _BY_TYPE.get(type(error).__name__)


def _by_connection(error: BaseException) -> ErrorClass | None:
    # Last: an EndpointConnectionError says only that it failed; an OSError behind it says why.
    return _CONNECTION if type(error).__name__ in _CONNECTION_TYPES else None

"""Turns what an object store's client raised into one of the tier's errors.

Owns the table of conditions, the tables from error codes of S3, GCS and Azure, HTTP statuses, errno
and exception types to them, and the removal of secrets from messages. Does not own retries
(`middleware/`) and does no I/O.

Invariants: every exception becomes a `TierError`; an unknown one is retryable, because retries are
bounded and a wrong "stop" would turn the store off; a server's 404 is a miss only with the error
code that says so; no secret of `storage_options` or of the URL appears in a message.
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
_SECRET_CHARACTERS_MIN: Final = 4
_SECRET_NAME = re.compile(
    r"key|secret|token|pass|cred|sas|private|session|auth|connection_string", re.IGNORECASE
)
_USER_INFO = re.compile(r"(?<=://)[^/@\s]+@")
_QUERY = re.compile(r"(?<=://)([^\s?]+)\?[^\s)\"']+")
"""A query of an Azure URL may be a signature."""
# obstore keeps status and code in its text only.
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
    """One condition: what it means to the caller, what happened, and the remedy."""

    kind: ErrorKind
    what: str
    remedy: str


_LATER, _STOP = ErrorKind.LATER, ErrorKind.STOP
_RETRIED = "retried with growing pauses"
CONDITIONS: Final = {
    "missing": ErrorClass(
        ErrorKind.MISSING, "no such object", "nothing to do: what is missing is computed"
    ),
    "truncated": ErrorClass(ErrorKind.EMPTY, "the object is empty", "it will be written again"),
    "exists": ErrorClass(ErrorKind.EXISTS, "the name is taken", "another writer was first"),
    "full": ErrorClass(
        ErrorKind.FULL, "no space is left", "free space or raise the quota of the store"
    ),
    "credentials": ErrorClass(
        _STOP,
        "the credentials were refused",
        "check store.credentials (or, with kind auto, those of the environment)",
    ),
    "forbidden": ErrorClass(
        _STOP,
        "access was denied",
        "check the credentials, and allow them to get, put, delete and list objects under the URL",
    ),
    "no_credentials": ErrorClass(
        _STOP,
        "no credentials were found",
        "set store.credentials, or give the environment some",
    ),
    "no_bucket": ErrorClass(
        _STOP, "the bucket does not exist", "create it, or correct the bucket in store.url"
    ),
    "region": ErrorClass(
        _STOP,
        "the bucket is served by another region or endpoint",
        "set store.region and store.endpoint",
    ),
    "clock": ErrorClass(_STOP, "the clocks differ too much", "synchronise this machine's clock"),
    "busy": ErrorClass(_LATER, "the store is busy or failing", _RETRIED),
    "not_found": ErrorClass(
        _LATER,
        "a 404 came without the store's own error code for a missing object",
        "check what answers at store.endpoint: an ingress or proxy before the store, or another "
        "server",
    ),
    "garbled": ErrorClass(_LATER, "the upload arrived damaged", _RETRIED),
    "request": ErrorClass(
        _STOP,
        "the store refused the request",
        "check store.url, store.endpoint and the other settings of store",
    ),
    "options": ErrorClass(
        _STOP, "an option is not understood", "check the names in store.storage_options"
    ),
    "untrusted": ErrorClass(
        _STOP,
        "the server's TLS certificate is not trusted",
        "give its authority's PEM file as store.tls.ca_file",
    ),
    "not_tls": ErrorClass(
        _STOP,
        "the endpoint does not speak TLS as asked",
        "check whether store.endpoint should start with http:// rather than https://",
    ),
    "package": ErrorClass(_STOP, "a Python package is missing", "install the one that is named"),
    "refused": ErrorClass(
        _LATER,
        "the connection was refused",
        "check that the store is running and that store.endpoint has its host and port",
    ),
    "unknown_host": ErrorClass(
        _LATER, "the host name is not known", "check store.endpoint and this machine's DNS"
    ),
    "connection": ErrorClass(
        _LATER,
        "the connection failed",
        "check store.endpoint, store.proxy and the network to the store",
    ),
    "slow": ErrorClass(
        _LATER, "there was no answer in time", "check the network to the store and its load"
    ),
    "read_only": ErrorClass(
        _STOP,
        "the folder cannot be written or read by this user",
        "change its owner or mode, mount it writable, or choose another store.url",
    ),
    "not_a_folder": ErrorClass(
        _STOP, "a file stands where a folder is needed", "move it, or choose another store.url"
    ),
    "unsupported": ErrorClass(
        _STOP, "the store cannot do that", "choose another store, or see the detail"
    ),
    "other": ErrorClass(_LATER, "the store failed", f"see the detail; {_RETRIED}"),
}
"""By cause, which is also what failures are counted as."""


def _causes(words: Mapping[str, str]) -> dict[str, str]:
    return {word: cause for cause, found in words.items() for word in found.split()}


# S3: https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html, without the quota codes
# of MinIO and others.
_BY_CODE: Final = _causes(
    {
        "missing": "NoSuchKey NoSuchVersion BlobNotFound",
        "no_bucket": "NoSuchBucket InvalidBucketName ContainerNotFound ContainerDisabled "
        "InvalidResourceName",
        "credentials": "InvalidAccessKeyId SignatureDoesNotMatch InvalidToken ExpiredToken "
        "InvalidSecurity NotSignedUp AuthenticationFailed InvalidAuthenticationInfo "
        "NoAuthenticationInformation AccountProblem",
        "forbidden": "AccessDenied AllAccessDisabled AuthorizationFailure "
        "AuthorizationPermissionMismatch InsufficientAccountPermissions PublicAccessNotPermitted",
        "region": "PermanentRedirect TemporaryRedirect Redirect AuthorizationHeaderMalformed "
        "IllegalLocationConstraintException",
        "clock": "RequestTimeTooSkewed",
        "truncated": "InvalidRange",
        "exists": "PreconditionFailed BlobAlreadyExists ConditionNotMet",
        "full": "QuotaExceeded XMinioStorageFull InsufficientStorage StorageQuotaExceeded",
        "busy": "SlowDown ServiceUnavailable InternalError RequestTimeout OperationAborted "
        "OperationTimedOut ServerBusy ContainerBeingDeleted Throttling ThrottlingException "
        "ConditionalRequestConflict",
        # S3's own answer to a header that a server does not know, such as If-None-Match.
        "unsupported": "NotImplemented",
        "garbled": "BadDigest IncompleteBody XAmzContentSHA256Mismatch",
    }
)
_BY_STATUS: Final = {
    **dict.fromkeys((301, 307, 308), "region"),
    401: "credentials",
    403: "forbidden",
    # A proxy before a store says it too, of objects that are there: only a code says "missing".
    404: "not_found",
    **dict.fromkeys((408, 409, 425, 429), "busy"),
    412: "exists",
    416: "truncated",
    501: "unsupported",
    507: "full",
}
_BY_ERRNO: Final = {
    errno.ENOENT: "missing",
    errno.EEXIST: "exists",
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "read_only"),
    **dict.fromkeys((errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP), "not_a_folder"),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "full"),
    # Some mounts have no hard links; a name that must not replace another is made with one.
    **dict.fromkeys((errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK), "unsupported"),
    errno.ECONNREFUSED: "refused",
    errno.ETIMEDOUT: "slow",
    **dict.fromkeys(
        (errno.ECONNRESET, errno.EPIPE, errno.EHOSTUNREACH, errno.ENETUNREACH), "connection"
    ),
}
# By name, so that no client library has to be imported (or installed) to know its errors.
_BY_TYPE: Final = _causes(
    {
        "no_credentials": "NoCredentialsError PartialCredentialsError CredentialRetrievalError "
        "TokenRetrievalError ProfileNotFound DefaultCredentialsError CredentialUnavailableError "
        "ClientAuthenticationError",
        "credentials": "RefreshError UnauthenticatedError",
        "forbidden": "PermissionDeniedError",
        "options": "UnknownConfigurationKeyError",
        "unsupported": "NotImplementedError NotSupportedError",
        "request": "ParamValidationError NoRegionError",
        "slow": "ServiceRequestTimeoutError ServiceResponseTimeoutError ConnectTimeoutError "
        "ReadTimeoutError ServerTimeoutError FSTimeoutError",
    }
)
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
# obstore's text about a request that was never answered; the first match counts.
_BY_TEXT: Final = (
    ("ertificate", "untrusted"),
    ("InvalidContentType", "not_tls"),
    ("corrupt message", "not_tls"),
    ("dns error", "unknown_host"),
    ("Connection refused", "refused"),
    ("timed out", "slow"),
    ("TimedOut", "slow"),
    ("CredentialsError", "no_credentials"),
    ("ProfileNotFound", "no_credentials"),
    ("token request", "no_credentials"),
    ("credential", "no_credentials"),
    ("response body error", "connection"),
    ("error sending request", "connection"),
    ("error decoding response body", "connection"),
    ("onnection", "connection"),
)


class Secrets:
    """The values that must not appear in a message, taken from a URL's options."""

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
    if isinstance(value, str):
        if secret and len(value) >= _SECRET_CHARACTERS_MIN:
            yield value
    elif isinstance(value, dict):
        inner: dict[object, object] = value
        for name, one in inner.items():
            yield from _secret_values(one, secret=secret or bool(_SECRET_NAME.search(str(name))))


def translate(error: Exception, doing: str, secrets: Secrets) -> TierError:
    """The tier's error for `error`, which stopped `doing` (such as "write s3://b/p/name")."""
    cause = _cause(error)
    condition = CONDITIONS[cause]
    said = f"{type(error).__name__}: {error}".split(_OBSTORE_DETAIL, 1)[0]
    detail = secrets.hide(" ".join(said.split()))[:DETAIL_CHARACTERS_MAX]
    message = f"{doing}: {condition.what} ({detail}); {condition.remedy}"
    match condition.kind:
        case ErrorKind.MISSING:
            return ChunkMissing(message)
        case ErrorKind.EMPTY:
            return ImageTruncated(message)
        case ErrorKind.EXISTS:
            return ObjectExists(message)
        case ErrorKind.FULL:
            return TierFull(message)
        case ErrorKind.LATER:
            return TierUnavailable(message, retryable=True, cause=cause)
        case ErrorKind.STOP:
            return TierUnavailable(message, retryable=False, cause=cause)


def judge(error: Exception) -> ErrorClass:
    """The condition that `error` reports."""
    return CONDITIONS[_cause(error)]


def is_missing(error: Exception) -> bool:
    """Whether the store itself said that the object is not there."""
    return _cause(error) == "missing"


def _cause(error: Exception) -> str:
    """The store's own words count more than what a client made of them."""
    chain = list(_chain(error))
    for rule in (_by_obstore, _by_answer, _by_tls, _by_type, _by_os, _by_connection):
        for link in chain:
            cause = rule(link)
            if cause is not None:
                return cause
    return "other"


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    for _ in range(CHAIN_LENGTH_MAX):
        if link is None:
            return
        yield link
        link = link.__cause__ or link.__context__


def _by_obstore(error: BaseException) -> str | None:
    kind, text = type(error), str(error)
    if not kind.__module__.startswith("obstore") and _OBSTORE_DETAIL not in text:
        return None
    if kind.__name__ == "AlreadyExistsError":
        return "exists"
    code, status = _OBSTORE_CODE.search(text), _OBSTORE_STATUS.search(text)
    if code is not None and code[1] in _BY_CODE:
        return _BY_CODE[code[1]]
    if status is not None and "token request" not in text:
        return _by_status(int(status[1]))
    return next((cause for words, cause in _BY_TEXT if words in text), None)


def _by_status(status: int) -> str | None:
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    if status >= 500:
        return "busy"
    return "request" if status >= 300 else None


def _by_answer(error: BaseException) -> str | None:
    """What the server answered: botocore's `response`, or the status that other clients keep."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        answer: dict[str, dict[str, object]] = response
        code = str(answer.get("Error", {}).get("Code", ""))
        found = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        status = found if isinstance(found, int) else 0
        # A HEAD has no body, so botocore puts the status where the code belongs.
        status = int(code) if code.isdecimal() else status
    else:
        status = _status_of(error)
        # An enum in Azure's client; its text is the code.
        code = str(getattr(error, "error_code", None) or "").rsplit(".", 1)[-1]
    return _BY_CODE.get(code) or _by_status(status)


def _status_of(error: BaseException) -> int:
    """The HTTP status that clients other than botocore keep on their errors, or 0."""
    # gcsfs has it in `code`, but so have aiohttp's parse errors, which no server answered.
    names = ("code",) if type(error).__name__ == "HttpError" else ("status", "status_code")
    for name in names:
        value = getattr(error, name, None)
        if isinstance(value, int) and 300 <= value < 600:
            return value
    return 0


def _by_tls(error: BaseException) -> str | None:
    if isinstance(error, ssl.SSLCertVerificationError):
        return "untrusted"
    if isinstance(error, ssl.SSLError):
        reason = str(error).upper()
        not_tls = ("WRONG_VERSION", "RECORD LAYER", "UNKNOWN_PROTOCOL")
        return "not_tls" if any(one in reason for one in not_tls) else "connection"
    return None


def _by_type(error: BaseException) -> str | None:
    return _BY_TYPE.get(type(error).__name__)


def _by_os(error: BaseException) -> str | None:
    if isinstance(error, socket.gaierror):
        return "unknown_host"
    if isinstance(error, OSError) and error.errno in _BY_ERRNO:
        return _BY_ERRNO[error.errno]
    for kind, cause in (
        (ImportError, "package"),
        (TypeError, "options"),
        (FileNotFoundError, "missing"),
        (FileExistsError, "exists"),
        (PermissionError, "read_only"),
        (TimeoutError, "slow"),
    ):
        if isinstance(error, kind):
            return cause
    if isinstance(error, OSError):
        # gcsfs makes one of a 403, without errno.
        if str(error).startswith("Forbidden: "):
            return "forbidden"
        # Several addresses tried and all refused: asyncio joins them into one without errno.
        if "Errno 111" in str(error):
            return "refused"
    return None


def _by_connection(error: BaseException) -> str | None:
    # Last: an EndpointConnectionError says only that it failed; an OSError behind it says why.
    return "connection" if type(error).__name__ in _CONNECTION_TYPES else None

"""Turns what an object store's client raised into one of the tier's errors.

Owns the table of conditions, the tables from error codes of S3, GCS and Azure, HTTP statuses, errno
and exception types to them. Does not own retries (`middleware.py`) and does no I/O.

Invariants: every exception becomes a `TierError`; an unknown one is retryable, because retries are
bounded and a wrong "stop" would turn the store off; a server's 404 is a miss only with the error
code that says so; no secret of a setting or of a URL appears in a message.
"""

import errno
import os
import re
import socket
import ssl
from collections.abc import Callable, Mapping
from typing import Final

from tiers.errors import (
    ChunkMissing,
    ImageTruncated,
    ObjectExists,
    TierError,
    TierFull,
    TierUnavailable,
)
from tiers.redaction import Redactor, mask_urls

DETAIL_CHARACTERS_MAX: Final = 240
CHAIN_LENGTH_MAX: Final = 16
# obstore keeps status and code in its text only.
_OBSTORE_STATUS = re.compile(r"status code: (\d{3})")
# The code of an answer, of one object of a bulk delete, or of AWS STS in botocore's words.
_OBSTORE_CODE = re.compile(r"<Code>(\w+)</Code>|\(code: (\w+)\)| \((\w+)\) when calling")
# Which exception our credential provider raised, and whether it names a file of this machine.
_OBSTORE_PROVIDER = re.compile(r"credential provider: (\w+): (\[Errno \d+\] [^:]*: ['\"]/)?")
_STATUS = re.compile(r"[345]\d\d")
_OBSTORE_DETAIL = "\n\nDebug source"

CONDITIONS: Final = {
    "missing": "no such object; nothing to do: what is missing is computed",
    "truncated": "the object is empty; it will be written again",
    "exists": "the name is taken; another writer was first",
    "full": "no space is left; free space or raise the quota of the store",
    "credentials": "the credentials were refused; check store.credentials (or, with kind auto, "
    "those of the environment)",
    "forbidden": "access was denied; check the credentials, and allow them to get, put, delete "
    "and list objects under the URL",
    "no_credentials": "no credentials were found; set store.credentials, or give the environment"
    " some",
    "local_file": "a file of this machine is missing or cannot be read, which requests need for "
    "their credentials or for TLS; restore it, or correct store.credentials and store.tls",
    "no_bucket": "the bucket does not exist; create it, or correct the bucket in store.url",
    "region": "the bucket is served by another region or endpoint; set store.region and "
    "store.endpoint",
    "clock": "the clocks differ too much; synchronise this machine's clock",
    "busy": "the store is busy or failing; retried with growing pauses",
    "not_found": "a 404 came without the store's own error code for a missing object; check what"
    " answers at store.endpoint: a proxy before the store, or another server",
    "garbled": "the upload arrived damaged; retried with growing pauses",
    "request": "the store refused the request; check store.url, store.endpoint and the other "
    "settings of store",
    "options": "an option is not understood; check the names in store.storage_options",
    "untrusted": "the server's TLS certificate is not trusted; give its authority's PEM file as "
    "store.tls.ca_file",
    "not_tls": "the endpoint does not speak TLS as asked; check whether store.endpoint should "
    "start with http:// rather than https://",
    "package": "a Python package is missing; install the one that is named",
    "refused": "the connection was refused; check that the store is running and that "
    "store.endpoint has its host and port",
    "unknown_host": "the host name is not known; check store.endpoint and this machine's DNS",
    "connection": "the connection failed; check store.endpoint, store.proxy and the network to "
    "the store",
    "slow": "there was no answer in time; check the network to the store and its load; if uploads "
    "take longer than store.read_timeout, raise it (obstore applies it to a whole upload)",
    "read_only": "the folder cannot be written or read by this user; change its owner or mode, "
    "mount it writable, name it in ReadWritePaths= of the systemd unit, or choose another "
    "store.url",
    "not_a_folder": "a file stands where a folder is needed; move it, or choose another store.url",
    "unsupported": "the store cannot do that; choose another store, or see the detail",
    "other": "the store failed; see the detail; retried with growing pauses",
}
"""What happened and the remedy, by cause, which is also what failures are counted as."""
_ERRORS: Final[dict[str, type[TierError]]] = {
    "missing": ChunkMissing,
    "truncated": ImageTruncated,
    "exists": ObjectExists,
    "full": TierFull,
}
"""All other causes are `TierUnavailable`."""
_RETRYABLE: Final = frozenset(
    (
        "busy",
        "not_found",
        "garbled",
        "local_file",
        "refused",
        "unknown_host",
        "connection",
        "slow",
        "other",
    )
)


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
        "NoAuthenticationInformation AccountProblem "
        # Those of AWS STS.
        "InvalidClientTokenId InvalidIdentityToken ExpiredTokenException IDPRejectedClaim",
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
        "ConditionalRequestConflict IDPCommunicationError InternalFailure RequestLimitExceeded",
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
_BY_CONNECTION: Final = _causes(
    {
        "connection": "EndpointConnectionError ConnectionClosedError ClientPayloadError "
        "IncompleteReadError ServerDisconnectedError ServiceRequestError ServiceResponseError "
        "ProxyError ProxyConnectionError HTTPClientError ResponseStreamingError"
    }
)
_BY_BASE: Final = (
    (socket.gaierror, "unknown_host"),
    (ImportError, "package"),
    (TypeError, "options"),
    (FileNotFoundError, "missing"),
    (FileExistsError, "exists"),
    (PermissionError, "read_only"),
    (TimeoutError, "slow"),
)
# obstore's text about a request without an answer that says why; the first match counts.
_BY_TEXT: Final = {
    # S3 sends it, without a place or a code, for a bucket of another region.
    "redirect without LOCATION": "region",
    "ertificate": "untrusted",
    # botocore's, about all that TLS can fail with.
    "SSL validation failed": "connection",
    "InvalidContentType": "not_tls",
    "corrupt message": "not_tls",
    "dns error": "unknown_host",
    "Connection refused": "refused",
    "timed out": "slow",
    "TimedOut": "slow",
    "CredentialsError": "no_credentials",
    "ProfileNotFound": "no_credentials",
    "token request": "no_credentials",
    "credential": "no_credentials",
    "response body error": "connection",
    "error sending request": "connection",
    "error decoding response body": "connection",
    "onnection": "connection",
}


def translate(error: Exception, doing: str, secrets: Redactor, *, server: bool) -> TierError:
    """The tier's error for `error`, which stopped `doing` (such as "write s3://b/p/name").

    `server`: the store is none of this machine's folders.
    """
    cause = _cause(error, server=server)
    what, remedy = CONDITIONS[cause].split("; ", 1)
    said = f"{type(error).__name__}: {error}".split(_OBSTORE_DETAIL, 1)[0]
    detail = mask_urls(secrets.redacted(" ".join(said.split())))[:DETAIL_CHARACTERS_MAX]
    message = f"{doing}: {what} ({detail}); {remedy}"
    if cause in _ERRORS:
        return _ERRORS[cause](message)
    return TierUnavailable(message, retryable=cause in _RETRYABLE, cause=cause)


def is_missing(error: Exception, *, server: bool) -> bool:
    """Whether the store itself said that the object is not there; `server` as in `translate`."""
    return _cause(error, server=server) == "missing"


def _cause(error: Exception, *, server: bool) -> str:
    """The store's own words count more than what a client made of them."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and len(chain) < CHAIN_LENGTH_MAX:
        chain.append(link)
        link = link.__cause__ or link.__context__
    rules: tuple[Callable[[BaseException], str | None], ...] = (
        *(_by_obstore, _by_answer, _by_tls),
        lambda one: _BY_TYPE.get(type(one).__name__),
        *([_by_local_file] if server else []),
        _by_os,
        # Last: an EndpointConnectionError says only that it failed; an OSError behind it says why.
        lambda one: _BY_CONNECTION.get(type(one).__name__),
    )
    for rule in rules:
        for one in chain:
            if (cause := rule(one)) is not None:
                return cause
    return "other"


def _by_obstore(error: BaseException) -> str | None:
    kind, text = type(error), str(error)
    if not kind.__module__.startswith("obstore") and _OBSTORE_DETAIL not in text:
        return None
    code, status = _OBSTORE_CODE.search(text), _OBSTORE_STATUS.search(text)
    if code is not None and (cause := _BY_CODE.get(code[code.lastindex or 0])) is not None:
        return cause
    if code is not None and code[3] is not None and _STATUS.fullmatch(code[3]):
        # Where an answer has no code, botocore puts its status there.
        return _by_status(int(code[3]))
    # Every answer 409 is one, also those whose code says to try again.
    if kind.__name__ == "AlreadyExistsError":
        return "exists"
    if status is not None and "token request" not in text:
        return _by_status(int(status[1]))
    if (raised := _OBSTORE_PROVIDER.search(text)) is not None:
        if raised[2] is not None:
            return "local_file"
        name = raised[1]
        if (cause := _BY_TYPE.get(name) or _BY_CONNECTION.get(name)) is not None:
            return cause
    return next((cause for words, cause in _BY_TEXT.items() if words in text), None)


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
        # A HEAD has no body, so botocore puts the status where the code belongs.
        found = [code, answer.get("ResponseMetadata", {}).get("HTTPStatusCode")]
    else:
        # An enum in Azure's client; its text is the code.
        code = str(getattr(error, "error_code", None) or "").rsplit(".", 1)[-1]
        # gcsfs has it in `code`, but so have aiohttp's parse errors, which no server answered.
        names = ("code",) if type(error).__name__ == "HttpError" else ("status", "status_code")
        found = [getattr(error, name, None) for name in names]
    status = next((one for one in map(str, found) if _STATUS.fullmatch(one)), "0")
    return _BY_CODE.get(code) or _by_status(int(status))


def _by_tls(error: BaseException) -> str | None:
    if isinstance(error, ssl.SSLCertVerificationError):
        return "untrusted"
    if isinstance(error, ssl.SSLError):
        reason = str(error).upper()
        not_tls = ("WRONG_VERSION", "RECORD LAYER", "UNKNOWN_PROTOCOL")
        return "not_tls" if any(one in reason for one in not_tls) else "connection"
    return None


def _by_local_file(error: BaseException) -> str | None:
    """A file of the operating system: one with a token, keys or authorities, or a program."""
    name = error.filename if isinstance(error, OSError) else None
    # adlfs names an object, without a slash at the start.
    return "local_file" if isinstance(name, str) and os.path.isabs(name) else None


def _by_os(error: BaseException) -> str | None:
    if isinstance(error, OSError) and error.errno in _BY_ERRNO:
        return _BY_ERRNO[error.errno]
    found = next((cause for base, cause in _BY_BASE if isinstance(error, base)), None)
    if found is None and isinstance(error, OSError):
        # gcsfs makes one of a 403, without errno.
        if str(error).startswith("Forbidden: "):
            return "forbidden"
        # Several addresses tried and all refused: asyncio joins them into one without errno.
        if "Errno 111" in str(error):
            return "refused"
    return found

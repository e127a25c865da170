"""What clients raise, turned into what a caller can do; and no secret on the way."""

from __future__ import annotations

import errno
import socket
import ssl

import pytest
from obstore.exceptions import AlreadyExistsError

from tiers.errors import (
    ChunkMissing,
    ImageTruncated,
    ObjectExists,
    TierError,
    TierFull,
    TierUnavailable,
)
from tiers.redaction import Redactor, mask_url, mask_urls, masked
from tiers.store.errors import (
    CHAIN_LENGTH_MAX,
    DETAIL_CHARACTERS_MAX,
    is_missing,
    translate,
)

NO_SECRETS = Redactor()


class Answered(Exception):
    """As botocore's ClientError: what the server answered is in `response`."""

    def __init__(self, code: str, status: int = 0) -> None:
        super().__init__(f"An error occurred ({code})")
        self.response = {
            "Error": {"Code": code, "Message": "…"},
            "ResponseMetadata": {"HTTPStatusCode": status},
        }


class HttpError(Exception):
    """As gcsfs has it."""

    def __init__(self, code: int) -> None:
        super().__init__("…")
        self.code = code


class HttpResponseError(Exception):
    """As azure-core and aiohttp's ClientResponseError have it."""

    def __init__(self, field: str, status: int) -> None:
        super().__init__("…")
        setattr(self, field, status)


class TransferEncodingError(Exception):
    """As aiohttp's parser raises it: a code that no server answered."""

    code = 400


def named(name: str) -> Exception:
    """An error of a type that is only known by its name."""
    kind: type[Exception] = type(name, (Exception,), {})
    return kind("…")


def outcome(error: Exception) -> tuple[type[TierError], bool | None]:
    # A folder's errors name a file, too.
    server = not (isinstance(error, OSError) and error.filename)
    translated = translate(error, "read s3://b/name", NO_SECRETS, server=server)
    assert str(translated).startswith("read s3://b/name: ")
    retryable = translated.retryable if isinstance(translated, TierUnavailable) else None
    return type(translated), retryable


LATER = (TierUnavailable, True)
STOP = (TierUnavailable, False)
MISSING = (ChunkMissing, None)
EXISTS = (ObjectExists, None)
EMPTY = (ImageTruncated, None)
FULL = (TierFull, None)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (Answered("NoSuchKey", 404), MISSING),
        (Answered("404"), LATER),
        (Answered("", 404), LATER),
        (Answered("Unheard", 404), LATER),
        (Answered("BlobNotFound", 404), MISSING),
        (Answered("NoSuchBucket", 404), STOP),
        (Answered("AccessDenied", 403), STOP),
        (Answered("403"), STOP),
        (Answered("Unheard", 403), STOP),
        (Answered("SignatureDoesNotMatch", 403), STOP),
        (Answered("RequestTimeTooSkewed", 403), STOP),
        (Answered("PermanentRedirect", 301), STOP),
        (Answered("301"), STOP),
        (Answered("Unheard", 400), STOP),
        (Answered("InvalidRange", 416), EMPTY),
        (Answered("SlowDown", 503), LATER),
        (Answered("503"), LATER),
        (Answered("Unheard", 502), LATER),
        (Answered("RequestTimeout", 400), LATER),
        (Answered("BadDigest", 400), LATER),
        (Answered("429"), LATER),
        (Answered("XMinioStorageFull", 507), FULL),
        (Answered("Unheard", 507), FULL),
        (Answered("no status"), LATER),
        (HttpError(404), LATER),
        (HttpError(401), STOP),
        (HttpError(503), LATER),
        (HttpResponseError("status", 403), STOP),
        (HttpResponseError("status_code", 500), LATER),
        (TransferEncodingError(), LATER),
        (ssl.SSLCertVerificationError("CERTIFICATE_VERIFY_FAILED"), STOP),
        (ssl.SSLError("[SSL: WRONG_VERSION_NUMBER] wrong version number"), STOP),
        (ssl.SSLError("unexpected eof"), LATER),
        (socket.gaierror(-2, "Name or service not known"), LATER),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), LATER),
        (OSError("Multiple exceptions: [Errno 111] …, [Errno 111] …"), LATER),
        (ConnectionResetError(errno.ECONNRESET, "reset"), LATER),
        (TimeoutError(), LATER),
        (FileNotFoundError("gone"), MISSING),
        (FileNotFoundError(errno.ENOENT, "gone"), MISSING),
        (PermissionError("no"), STOP),
        (OSError(errno.EROFS, "read-only"), STOP),
        (NotADirectoryError(errno.ENOTDIR, "file"), STOP),
        (OSError(errno.ENOSPC, "full"), FULL),
        (OSError(errno.EDQUOT, "quota"), FULL),
        (OSError(errno.EIO, "disk"), LATER),
        (OSError(errno.EOPNOTSUPP, "no links"), STOP),
        (OSError(errno.ENOSYS, "no links"), STOP),
        (ModuleNotFoundError("No module named 'gcsfs'"), STOP),
        (TypeError("unexpected keyword argument"), STOP),
        (named("NoCredentialsError"), STOP),
        (named("ProfileNotFound"), STOP),
        (named("ReadTimeoutError"), LATER),
        (named("EndpointConnectionError"), LATER),
        (named("NobodyKnowsThisOne"), LATER),
    ],
    ids=repr,
)
def test_each_condition_says_what_to_do(
    error: Exception, expected: tuple[type[TierError], bool | None]
) -> None:
    assert outcome(error) == expected


def test_a_folder_that_systemd_made_read_only_names_the_setting_of_the_unit() -> None:
    error = OSError(errno.EROFS, "Read-only file system", "/mnt/kvlake/probe")
    found = translate(error, "write file:///mnt/kvlake/probe", NO_SECRETS, server=False)
    assert "ReadWritePaths=" in str(found)


def test_a_missing_file_of_this_machine_is_no_missing_object() -> None:
    """A token or authorities that vanished: every chunk was withdrawn for all readers."""
    error = FileNotFoundError(errno.ENOENT, "No such file or directory", "/var/run/token")
    wrapped = RuntimeError("no credentials")
    wrapped.__cause__ = error
    for one in (error, wrapped):
        found = translate(one, "read s3://b/name", NO_SECRETS, server=True)
        assert isinstance(found, TierUnavailable)
        assert "restore it" in str(found)
        assert not is_missing(one, server=True)
    assert is_missing(error, server=False)
    for one in (FileNotFoundError("b/name"), FileNotFoundError(errno.ENOENT, "…", "b/name")):
        assert is_missing(one, server=True), "as drivers say it"


def test_the_servers_code_counts_more_than_the_clients_exception() -> None:
    # s3fs makes FileNotFoundError of both.
    error = FileNotFoundError("The specified bucket does not exist")
    error.__cause__ = Answered("NoSuchBucket", 404)
    assert outcome(error) == STOP
    error.__cause__ = Answered("NoSuchKey", 404)
    assert outcome(error) == MISSING
    # An ingress whose store restarts.
    error.__cause__ = Answered("404", 404)
    assert outcome(error) == LATER


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("ConditionalRequestConflict", LATER),
        ("OperationAborted", LATER),
        ("PreconditionFailed", EXISTS),
        ("Unheard", EXISTS),
    ],
)
def test_a_409_that_says_to_try_again_is_no_object_that_exists(
    code: str, expected: tuple[type[TierError], bool | None]
) -> None:
    """For obstore every 409 is an `AlreadyExistsError`."""
    answer = f"status code: 409 Conflict: <Error><Code>{code}</Code></Error>"
    assert outcome(AlreadyExistsError(answer)) == expected


def test_the_reason_is_found_behind_a_general_error() -> None:
    error = named("EndpointConnectionError")
    error.__context__ = ConnectionRefusedError(errno.ECONNREFUSED, "refused")
    assert "refused" in str(translate(error, "read s3://b/name", NO_SECRETS, server=True))
    error.__context__ = socket.gaierror(-2, "Name or service not known")
    assert "host name" in str(translate(error, "read s3://b/name", NO_SECRETS, server=True))


def test_a_circular_chain_ends() -> None:
    first, second = named("A"), named("B")
    first.__cause__, second.__cause__ = second, first
    assert outcome(first) == LATER
    deep: Exception = PermissionError("no")
    for _ in range(2 * CHAIN_LENGTH_MAX):
        outer = named("Outer")
        outer.__cause__ = deep
        deep = outer
    assert outcome(deep) == LATER


def test_secrets_are_removed_everywhere() -> None:
    found: set[str] = set()
    masked(
        {
            "key": "AKIAsomebody",
            "secret": "AKIAsomebody+tail",
            "client_kwargs": {"aws_session_token": "session-value", "region_name": "us-east-1"},
            "token": {"private_key": "-----BEGIN", "project": "inside-a-secret"},
            "endpoint_url": "http://host:1",
            "anon": False,
            "password": "abc",
        },
        found,
    )
    hidden = Redactor(found)
    text = "AKIAsomebody+tail AKIAsomebody session-value -----BEGIN inside-a-secret us-east-1"
    assert hidden.redacted(text) == "*** *** *** *** *** us-east-1"
    assert hidden.redacted("abc http://host:1") == "abc http://host:1"


def test_user_and_password_are_removed_from_a_url() -> None:
    for mask in (mask_url, mask_urls):
        assert mask("sftp://me:hunter2@host/path") == "sftp://***@host/path"
        assert mask("s3://bucket/a@b") == "s3://bucket/a@b"
        assert (
            mask("abfs://box@team.dfs.core.windows.net") == "abfs://box@team.dfs.core.windows.net"
        )
    assert mask_urls("PUT 'https://h/x?sig=hunter2' ended") == "PUT 'https://h/x?***' ended"
    message = translate(
        OSError("cannot reach http://u:hunter2@host/x"),
        "write sftp://***@host",
        NO_SECRETS,
        server=False,
    )
    assert "hunter2" not in str(message)


def test_a_long_answer_is_cut() -> None:
    error = translate(OSError("x" * 1_000_000), "read s3://b/name", NO_SECRETS, server=True)
    assert len(str(error)) < DETAIL_CHARACTERS_MAX + 200

"""What obstore says of answers, and of credentials that it does not get, and what it means."""

from __future__ import annotations

import errno
import http.server
import threading
import time
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import obstore
import pytest
from botocore import exceptions as aws
from obstore import store

from tiers.errors import TierUnavailable
from tiers.redaction import Redactor
from tiers.store.access import Access, Credentials
from tiers.store.errors import translate
from tiers.store.object_tier import UrlObjects

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DELETED = (
    '<DeleteResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Error><Key>a</Key>'
    "<Code>{}</Code><Message>no</Message></Error></DeleteResult>"
)

PIECE_BYTES = 1 << 20


class Answers(http.server.BaseHTTPRequestHandler):
    """Redirects all without saying where to, and deletes nothing, for the reason `code`."""

    code = "AccessDenied"
    pause_seconds = 0.0

    def do_GET(self) -> None:
        self._answer(301, b"")

    def do_PUT(self) -> None:
        # Steadily, and slowly where `pause_seconds` says so.
        left = int(self.headers["content-length"])
        while left and (piece := self.rfile.read(min(left, PIECE_BYTES))):
            left -= len(piece)
            time.sleep(self.pause_seconds)
        if not left:
            self._respond(301, b"")

    def do_POST(self) -> None:
        self._answer(200, DELETED.format(self.code).encode())

    def _answer(self, status: int, body: bytes) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self._respond(status, body)

    def _respond(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a test's output is for what failed."""


@pytest.fixture
def answers() -> Iterator[str]:
    """The server's address."""
    with http.server.HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def made(endpoint: str, **options: Any) -> store.S3Store:
    return store.S3Store(
        "bucket",
        endpoint=endpoint,
        region="us-east-1",
        client_options={"allow_http": True},
        retry_config={"max_retries": 0},
        **options,
    )


def raised(call: Callable[[], object]) -> TierUnavailable:
    with pytest.raises(obstore.exceptions.BaseError) as info:
        call()
    found = translate(info.value, "read s3://bucket/a", Redactor(), server=True)
    assert isinstance(found, TierUnavailable)
    return found


def test_a_redirect_to_nowhere_is_a_wrong_region(answers: str) -> None:
    client = made(answers, skip_signature=True)
    for call in (
        lambda: obstore.get(client, "a"),
        lambda: obstore.put(client, "a", b"x"),
        lambda: list(obstore.list(client)),
    ):
        found = raised(call)
        assert (found.cause, found.retryable) == ("region", False)
        assert "store.region" in str(found)


@pytest.mark.parametrize(
    ("code", "cause"),
    [("AccessDenied", "forbidden"), ("InternalError", "busy"), ("Unheard", "other")],
)
def test_an_object_that_a_bulk_delete_kept_has_its_own_code(
    answers: str, code: str, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Answers, "code", code)
    found = raised(lambda: obstore.delete(made(answers, skip_signature=True), ["a", "b"]))
    assert found.cause == cause


async def test_the_read_timeout_limits_a_whole_upload(
    answers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the setting's documentation and the remedy say."""
    monkeypatch.setattr(Answers, "pause_seconds", 0.1)
    anonymous = Credentials(kind="anonymous")
    access = Access(endpoint=answers, region="r", credentials=anonymous, read_timeout=1.0)
    tier = UrlObjects("s3://bucket", access)
    with pytest.raises(TierUnavailable, match=r"in time.*whole upload") as info:
        await tier.write("name", np.zeros(40 * PIECE_BYTES, np.uint8))
    assert info.value.cause == "slow"
    await tier.close()


def refused(code: str) -> aws.ClientError:
    return aws.ClientError({"Error": {"Code": code, "Message": "no (really)"}}, "AssumeRole")


@pytest.mark.parametrize(
    ("error", "cause", "retryable"),
    [
        (aws.ConnectTimeoutError(endpoint_url="https://sts"), "slow", True),
        (aws.ReadTimeoutError(endpoint_url="https://sts"), "slow", True),
        (aws.EndpointConnectionError(endpoint_url="https://sts"), "connection", True),
        (aws.ProxyConnectionError(proxy_url="http://proxy"), "connection", True),
        (aws.HTTPClientError(error="a wrong answer"), "connection", True),
        (aws.SSLError(endpoint_url="https://sts", error="EOF occurred"), "connection", True),
        (aws.SSLError(endpoint_url="https://sts", error="certificate…"), "untrusted", False),
        (refused("Throttling"), "busy", True),
        (refused("IDPCommunicationError"), "busy", True),
        (refused("InternalFailure"), "busy", True),
        (refused("503"), "busy", True),
        (refused("AccessDenied"), "forbidden", False),
        (refused("ExpiredTokenException"), "credentials", False),
        (refused("Unheard"), "no_credentials", False),
        (FileNotFoundError(errno.ENOENT, "No such file", "/var/run/token"), "local_file", True),
        (PermissionError(errno.EACCES, "Permission denied", "/it's"), "local_file", True),
        (aws.NoCredentialsError(), "no_credentials", False),
        (aws.ProfileNotFound(profile="team"), "no_credentials", False),
        (ValueError("unheard of"), "no_credentials", False),
    ],
    ids=repr,
)
def test_why_there_are_no_s3_credentials(error: Exception, cause: str, retryable: bool) -> None:
    def provider() -> NoReturn:
        raise error

    found = raised(
        lambda: obstore.get(made("http://127.0.0.1:9", credential_provider=provider), "a")
    )
    assert (found.cause, found.retryable) == (cause, retryable)

"""Reads that go straight from the socket to the slot, from a server that answers as it is told."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import time
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import anyio
import numpy as np
import pytest
from anyio.abc import SocketAttribute

from tests import places
from tests.tiers.tier_suite import image_of
from tiers.errors import ChunkMissing, ImageTruncated, TierUnavailable
from tiers.store.access import Access, Credentials
from tiers.store.client import PIECE_BYTES
from tiers.store.object_tier import UrlObjects
from tiers.threads import COMPUTING_MAX

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from anyio.abc import SocketStream

    from tests.harness.servers import S3Server

IMAGE = image_of(300_000)
OK = b"HTTP/1.1 206 Partial Content\r\nContent-Length: 300000\r\n\r\n"
NOWHERE = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
"""As an ingress answers while its store restarts."""
GONE = NOWHERE.replace(
    b"Length: 0\r\n\r\n", b"Length: 37\r\n\r\n<Error><Code>NoSuchKey</Code></Error>"
)


class Slowly(NamedTuple):
    """An answer in parts, with a pause after each."""

    parts: list[bytes]
    seconds: float


class Told:
    """Answers each request with the next of `answers`, on as many connections as it gets."""

    def __init__(self, *answers: bytes | Slowly | None) -> None:
        self.answers: list[bytes | Slowly | None] = list(answers)
        self.port = 0
        self.connections = 0
        self.connections_min = 0
        """Nobody is answered before there are as many."""
        self.requests: list[bytes] = []
        self.sent: list[float] = []
        """When each part of an answer in parts was sent."""
        self.ends = False
        """Whether each answer is the last of its connection, said or not."""
        self.for_obstore: bytes | None = None
        """What obstore, which names itself, is answered each time, in place of `answers`."""

    async def serve(self, stream: SocketStream) -> None:
        self.connections += 1
        async with stream:
            with contextlib.suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                while True:
                    self.requests.append(await stream.receive())
                    while self.connections < self.connections_min:  # noqa: ASYNC110
                        await anyio.sleep(0.01)
                    obstores = self.for_obstore and b"user-agent:" in self.requests[-1].lower()
                    answer = self.for_obstore if obstores else self.answers.pop(0)
                    if answer is None:
                        await anyio.sleep_forever()
                    elif isinstance(answer, Slowly):
                        for part in answer.parts:
                            await stream.send(part)
                            self.sent.append(time.monotonic())
                            await anyio.sleep(answer.seconds)
                    elif not answer:
                        return
                    else:
                        await stream.send(answer)
                    if self.ends:
                        return


@contextlib.asynccontextmanager
async def telling(
    *answers: bytes | Slowly | None, read_seconds_max: float = 20
) -> AsyncGenerator[tuple[Told, UrlObjects]]:
    """A server and a tier that reads from it. None: no answer; empty: it hangs up."""
    told = Told(*answers)
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    told.port = listener.extra(SocketAttribute.local_port)
    access = Access(
        endpoint=f"http://127.0.0.1:{told.port}",
        region="us-east-1",
        credentials=Credentials(kind="anonymous"),
        read_timeout=read_seconds_max,
    )
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, told.serve)
        tier = UrlObjects("s3://bucket/some prefix", access)
        yield told, tier
        await tier.close()
        tasks.cancel_scope.cancel()


def slot(size_bytes: int = 400_000) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.zeros(size_bytes, dtype=np.uint8)


async def test_one_connection_serves_one_read_after_the_other() -> None:
    whole = OK + IMAGE.tobytes()
    async with telling(whole, whole) as (told, tier):
        for _ in range(2):
            into = slot()
            assert await tier.read("a=b", into) == IMAGE.nbytes
            assert np.array_equal(into[: IMAGE.nbytes], IMAGE)
            assert not into[IMAGE.nbytes :].any()
    assert told.connections == 1
    assert told.requests[0].startswith(b"GET /bucket/some%20prefix/a%3Db HTTP/1.1\r\n")
    assert b"range: bytes=0-400000\r\n" in told.requests[0]


async def test_a_read_looks_at_one_kept_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of reads would look at all of them in each, on the event loop."""
    looks: list[int] = []
    poll = select.poll

    def counted() -> select.poll:
        looks.append(1)
        return poll()

    kept = 8
    async with telling(*[OK + IMAGE.tobytes()] * (kept + 1)) as (told, tier):
        # None of the first reads finds another one's connection.
        told.connections_min = kept
        async with anyio.create_task_group() as tasks:
            for _ in range(kept):
                tasks.start_soon(tier.read, "name", slot())
        assert told.connections == kept
        monkeypatch.setattr(select, "poll", counted)
        assert await tier.read("name", slot()) == IMAGE.nbytes
    assert told.connections == kept
    # Threads that wait for a socket look, too, at theirs.
    assert len(looks) < kept


def check_pieces(pieces: list[tuple[int, int, int]], size_bytes: int) -> None:
    """All of it was told, in order, and never more at once than stays in a core's cache."""
    assert {size for size, _, _ in pieces} == {size_bytes}
    assert [pieces[0][1], pieces[-1][2]] == [0, size_bytes]
    assert all(before[2] == after[1] for before, after in pairwise(pieces))
    assert all(0 < last - first <= PIECE_BYTES for _, first, last in pieces)


async def test_seen_is_called_for_each_piece_and_again_on_another_connection() -> None:
    image = image_of(3 * PIECE_BYTES + 100)
    whole = OK.replace(b"300000", str(image.nbytes).encode()) + image.tobytes()
    async with telling(OK + IMAGE.tobytes(), b"", whole) as (told, tier):
        pieces: list[tuple[int, int, int]] = []

        def seen(size_bytes: int, first: int, last: int) -> None:
            pieces.append((size_bytes, first, last))

        assert await tier.read("name", slot(), seen=seen) == IMAGE.nbytes
        check_pieces(pieces, IMAGE.nbytes)
        pieces.clear()
        into = slot(image.nbytes)
        # The kept connection has ended, which is found out by using it.
        assert await tier.read("name", into, seen=seen) == image.nbytes
        assert np.array_equal(into, image)
    assert told.connections == 2
    check_pieces(pieces, image.nbytes)


async def test_a_server_may_be_slow_as_long_as_it_is_not_silent() -> None:
    """Less than a piece comes within `read_timeout`, each time."""
    whole = OK + IMAGE.tobytes()
    parts = [whole[: len(OK) + 5], *(whole[len(OK) + 5 + i * 50_000 :][:50_000] for i in range(6))]
    into = slot()
    pieces: list[tuple[int, int, int]] = []
    while True:
        async with telling(read_seconds_max=1) as (told, tier):
            told.answers = [Slowly(parts, 0.3)]
            pieces.clear()
            begun = time.monotonic()
            try:
                size = await tier.read("name", into, seen=lambda *one: pieces.append(one))
            except TierUnavailable:
                # A machine that paused made the server silent after all: once more.
                times = [begun, *told.sent, time.monotonic()]
                assert max(after - before for before, after in pairwise(times)) > 0.9
            else:
                break
    assert size == IMAGE.nbytes
    assert np.array_equal(into[: IMAGE.nbytes], IMAGE)
    check_pieces(pieces, IMAGE.nbytes)


async def test_a_server_that_falls_silent_meets_the_read_timeout() -> None:
    async with telling(read_seconds_max=0.2) as (told, tier):
        told.answers = [Slowly([OK + bytes(1000), bytes(1000)], 30)]
        with pytest.raises(TierUnavailable, match="silent"):
            await tier.read("name", slot(), seen=lambda *_: None)


async def test_reads_that_hang_hold_no_turn() -> None:
    """More of them than there are turns: the one that comes is read all the same."""
    half = OK + IMAGE.tobytes()[:100_000]
    async with telling() as (told, tier), anyio.create_task_group() as tasks:
        told.answers = [Slowly([half, b""], 3600) for _ in range(2 * COMPUTING_MAX)]
        for _ in range(2 * COMPUTING_MAX):
            tasks.start_soon(lambda: tier.read("hangs", slot(), seen=lambda *_: None))
        while len(told.requests) < 2 * COMPUTING_MAX:  # noqa: ASYNC110 (the server has no event)
            await anyio.sleep(0.01)
        told.answers = [OK + IMAGE.tobytes()]
        into = slot()
        with anyio.fail_after(30):
            assert await tier.read("comes", into, seen=lambda *_: None) == IMAGE.nbytes
        assert np.array_equal(into[: IMAGE.nbytes], IMAGE)
        tasks.cancel_scope.cancel()


async def test_descriptors_may_be_many() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    whole = OK + IMAGE.tobytes()
    try:
        async with telling(whole, whole) as (told, tier):
            for _ in range(2):
                assert await tier.read("name", slot()) == IMAGE.nbytes
        assert told.connections == 1
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    "head",
    [OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), OK.replace(b"1.1 206", b"1.0 200")],
    ids=["said", "http 1.0"],
)
async def test_a_connection_that_the_server_closes_is_not_kept(head: bytes) -> None:
    whole = head + IMAGE.tobytes()
    async with telling(whole, whole) as (told, tier):
        for _ in range(2):
            assert await tier.read("name", slot()) == IMAGE.nbytes
    assert told.connections == 2


async def test_a_kept_connection_that_ended_meanwhile_is_replaced() -> None:
    whole = OK + IMAGE.tobytes()
    # The second request is heard on the kept connection and answered by hanging up.
    async with telling(whole, b"", whole) as (told, tier):
        for _ in range(2):
            assert await tier.read("name", slot()) == IMAGE.nbytes
    assert (told.connections, len(told.requests)) == (2, 3)


async def test_a_new_connection_that_ends_is_an_error_and_not_tried_again() -> None:
    async with telling(b"") as (told, tier):
        with pytest.raises(TierUnavailable, match="the connection failed") as caught:
            await tier.read("name", slot())
    assert caught.value.retryable
    assert len(told.requests) == 1


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (GONE, ChunkMissing),
        (NOWHERE, TierUnavailable),
        (OK.replace(b"300000", b"400001"), ImageTruncated),
        (OK.replace(b"300000", b"0"), ImageTruncated),
        (OK + bytes(299_999), TierUnavailable),
        (OK[:-5], TierUnavailable),
    ],
    ids=["missing", "no word of the store", "too long", "empty", "cut short", "head cut short"],
)
async def test_answers_that_are_no_object(answer: bytes, error: type[Exception]) -> None:
    async with telling(answer, b"") as (told, tier):
        told.ends = True
        with pytest.raises(error):
            await tier.read("name", slot())
    assert len(told.requests) == 1


@pytest.mark.parametrize("answer", [NOWHERE, GONE], ids=["no word of the store", "a missing key"])
async def test_a_404_is_not_an_empty_listing(answer: bytes) -> None:
    async with telling() as (told, tier):
        told.for_obstore = answer
        with pytest.raises(TierUnavailable) as caught:
            await tier.list("folder")
        assert caught.value.retryable


async def test_a_404_without_a_code_is_not_a_missing_object_for_obstore() -> None:
    # obstore has one exception for every 404.
    async with telling() as (told, tier):
        told.for_obstore = NOWHERE
        for verb in (tier.delete(["one", "other"]), tier.quarantine("one")):
            with pytest.raises(TierUnavailable, match="check what answers") as caught:
                await verb
            assert (caught.value.retryable, caught.value.cause) == (True, "not_found")
        told.for_obstore = GONE
        await tier.delete(["one", "other"])
        await tier.quarantine("one")


async def test_a_refusal_is_reported_with_its_code_and_message() -> None:
    body = b"<Error><Code>SlowDown</Code><Message>ask less</Message><Key>secret</Key></Error>"
    head = f"HTTP/1.1 503 Slow Down\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    async with telling(head + body) as (_, tier):
        with pytest.raises(TierUnavailable, match="SlowDown ask less") as caught:
            await tier.read("name", slot())
    assert (caught.value.cause, caught.value.retryable) == ("busy", True)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "until the end"])
async def test_a_refusal_may_have_no_length(*, chunked: bool) -> None:
    body = b"<Error><Code>SlowDown</Code><Message>ask less</Message></Error>"
    head = b"HTTP/1.1 503 Slow Down\r\n"
    if chunked:
        parts = [
            head + b"Transfer-Encoding: chunked\r\n\r\n",
            b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body),
        ]
    else:
        parts = [head + b"Connection: close\r\n\r\n", body]
    async with telling(Slowly(parts, 0.01), OK + IMAGE.tobytes()) as (told, tier):
        told.for_obstore = b"HTTP/1.1 500 not it\r\nContent-Length: 0\r\n\r\n"
        told.ends = not chunked
        with pytest.raises(TierUnavailable, match="SlowDown ask less") as caught:
            await tier.read("name", slot())
        assert (caught.value.cause, caught.value.retryable) == ("busy", True)
        # It says nothing of how the store answers what it does serve.
        assert await tier.read("name", slot()) == IMAGE.nbytes


async def test_early_hints_are_skipped() -> None:
    hints = b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"
    async with telling(hints + hints + OK + IMAGE.tobytes()) as (told, tier):
        told.for_obstore = b"HTTP/1.1 500 not it\r\nContent-Length: 0\r\n\r\n"
        assert await tier.read("name", slot()) == IMAGE.nbytes


@pytest.mark.parametrize("answer", [None, OK + IMAGE[:1000].tobytes()], ids=["head", "body"])
async def test_a_cancel_does_not_wait_for_the_server(answer: bytes | None) -> None:
    async with telling(answer) as (_, tier):
        into, started = slot(), time.monotonic()
        with anyio.move_on_after(0.2) as scope:
            await tier.read("name", into)
        assert scope.cancelled_caught
        assert time.monotonic() - started < 15  # the server's silence would last 20


async def test_a_server_that_sends_no_length_is_read_by_obstore() -> None:
    pieces = b"HTTP/1.1 206 Partial Content\r\nTransfer-Encoding: chunked\r\n\r\n"
    headed = OK.replace(
        b"\r\n\r\n",
        b"\r\nContent-Range: bytes 0-299999/300000\r\nETag: x\r\n"
        b"Last-Modified: Fri, 24 May 2013 00:00:00 GMT\r\n\r\n",
    )
    whole = headed + IMAGE.tobytes()

    async def read(tier: UrlObjects) -> None:
        into = slot()
        assert await tier.read("name", into) == IMAGE.nbytes
        assert np.array_equal(into[: IMAGE.nbytes], IMAGE)

    async with telling(pieces, pieces) as (told, tier):
        told.for_obstore = whole
        # Two find it out side by side.
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read, tier)
            tasks.start_soon(read, tier)
        await read(tier)
    assert len(told.requests) == 5


ANYONE = Credentials(kind="anonymous")
HERE = "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("url", "access", "direct"),
    [
        ("s3://bucket", Access(endpoint=HERE, credentials=ANYONE), True),
        ("s3://bucket", Access(endpoint=HERE, credentials=ANYONE, addressing="virtual"), True),
        ("s3://bucket", Access(endpoint="https://127.0.0.1", credentials=ANYONE), False),
        ("s3://bucket", Access(credentials=ANYONE), False),
        ("s3://bucket", Access(endpoint=HERE, credentials=ANYONE, proxy=HERE), False),
        ("gs://bucket", Access(endpoint=HERE, credentials=ANYONE), False),
    ],
    ids=["path", "virtual", "tls", "aws", "proxy", "gcs"],
)
def test_which_stores_are_read_directly(
    url: str, access: Access, *, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def make(base: str, *_: object) -> None:
        made.append(base)

    places.patch(monkeypatch, "S3DirectReads", make)
    UrlObjects(url, access)
    assert bool(made) is direct


async def test_a_proxy_of_the_environment_is_left_to_obstore(
    moto: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nobody listens there: who asks it fails, who goes straight to the server does not.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    tier = UrlObjects(f"{moto.url}/proxied", moto.access_at())
    with pytest.raises(TierUnavailable):
        await tier.read("name", slot())
    await tier.close()
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    tier = UrlObjects(f"{moto.url}/proxied", moto.access_at())
    with pytest.raises(ChunkMissing):
        await tier.read("name", slot())
    await tier.close()

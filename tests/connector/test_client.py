"""The client's sessions, on real sockets with the test as sidecar: how they begin, move and end.

What a session carries is in `test_client_jobs.py`.
"""

from __future__ import annotations

import itertools
import os
import resource
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from connector.client import Attempt, Client, job_endpoint
from sidecar.protocol import IndexMoved, Refused, Release, Role
from sidecar.protocol.codec import encode, frame_stream
from sidecar.protocol.peer import Peer
from tests import places
from tests.connector.clients import attach_of, live, make_client, sidecar
from tests.connector.double import LIMITS, SALT
from tests.connector.listening import WAIT_SECONDS_MAX, Sidecar, until
from tests.mappings import sizes_of
from tiers.kv.index import FLAG_HOST, IndexWriter, tag_of, tags_of

__all__ = ["make_client", "sidecar"]

KEY = b"k" * 32


class TestAttach:
    def test_a_scheduler_gets_the_index(
        self, sidecar: Sidecar, make_client: Callable[..., Client]
    ) -> None:
        sidecar.index.set(tag_of(KEY, SALT), FLAG_HOST)
        client = make_client()
        peer, answer = sidecar.admit()
        assert peer.attach == attach_of()
        assert peer.fds == []
        assert client.wait_attached(WAIT_SECONDS_MAX)
        session = live(client)
        assert (session.epoch, session.token, session.limits) == (7, answer.token, LIMITS)
        assert session.index is not None
        assert session.index.lookup(tags_of([KEY], SALT)).tolist() == [FLAG_HOST]
        assert client.session is session

    def test_a_worker_hands_over_its_descriptors(
        self, sidecar: Sidecar, make_client: Callable[..., Client]
    ) -> None:
        memory, page = os.memfd_create("memory"), os.memfd_create("page")
        context = object()
        client = make_client(lambda: Attempt(attach_of(Role.SCHEDULER), [memory, page], context))
        peer, _ = sidecar.admit()
        assert [os.fstat(fd).st_ino for fd in peer.fds] == [
            os.fstat(fd).st_ino for fd in (memory, page)
        ]
        assert live(client).context is context
        client.close()
        # They keep their owners.
        os.close(memory)
        os.close(page)

    @pytest.mark.promise("attach-again")
    def test_each_attempt_is_new(
        self, sidecar: Sidecar, make_client: Callable[..., Client]
    ) -> None:
        contexts = iter(range(100))
        client = make_client(lambda: Attempt(attach_of(), context=next(contexts)))
        sidecar.accept().close()
        sidecar.admit()
        assert live(client).context == 1

    def test_waiting_has_an_end(self, make_client: Callable[..., Client]) -> None:
        assert not make_client(None, "/nonexistent/attach.sock").wait_attached(0.05)

    def test_a_sidecar_that_starts_later_is_found(
        self, sidecar: Sidecar, make_client: Callable[..., Client]
    ) -> None:
        sidecar.stop()
        client = make_client()
        assert client.session is None
        sidecar.listen()
        sidecar.admit()
        live(client)

    def test_a_refusal_is_logged_once_and_retried(
        self,
        sidecar: Sidecar,
        make_client: Callable[..., Client],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        client = make_client()
        for _ in range(3):
            sidecar.accept().reply(frame_stream(encode(Refused("limits", "sessions_max=1"))))
        sidecar.admit()
        live(client)
        assert caplog.text.count("sessions_max=1") == 1

    @pytest.mark.parametrize(
        "payload",
        [
            b"",
            b"\x10",
            b"\x10\0\0\0half",
            b"\xff\xff\xff\xff",
            frame_stream(b"\xc1garbage"),
            frame_stream(b"\x80"),
            frame_stream(encode(IndexMoved(7, 4096))),
        ],
    )
    def test_a_garbled_answer_is_no_session_and_no_end(
        self, sidecar: Sidecar, make_client: Callable[..., Client], payload: bytes
    ) -> None:
        client = make_client()
        peer = sidecar.accept()
        if payload:
            peer.reply(payload, (sidecar.index.fd,))
        peer.close()
        assert client.session is None
        sidecar.admit()
        live(client)

    @pytest.mark.parametrize("what", ["missing", "too many", "wrong size", "not an index"])
    def test_an_answer_without_a_valid_index_is_rejected(
        self, sidecar: Sidecar, make_client: Callable[..., Client], what: str
    ) -> None:
        client = make_client()
        peer = sidecar.accept()
        other = os.memfd_create("other")
        os.ftruncate(other, sidecar.index.size_bytes)
        fds = {"missing": (), "too many": (sidecar.index.fd, other), "not an index": (other,)}
        size = sidecar.index.size_bytes + (4096 if what == "wrong size" else 0)
        answer = sidecar.attached(index_bytes=size)
        peer.reply(frame_stream(encode(answer)), fds.get(what, (sidecar.index.fd,)))
        os.close(other)
        sidecar.admit()
        live(client)

    def test_a_bug_in_making_the_attempt_does_not_end_the_thread(
        self,
        sidecar: Sidecar,
        make_client: Callable[..., Client],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        calls = itertools.count()

        def attempt() -> Attempt:
            if next(calls) < 5:
                raise RuntimeError("a bug")
            return Attempt(attach_of())

        client = make_client(attempt)
        for _ in range(5):
            assert sidecar.listener is not None
            sidecar.listener.accept()[0].close()
        sidecar.admit()
        live(client)
        assert caplog.text.count("failed unexpectedly") == 1


class TestLoss:
    def test_the_end_of_the_connection_ends_the_session(
        self, sidecar: Sidecar, make_client: Callable[..., Client]
    ) -> None:
        client = make_client()
        sidecar.admit()
        first = live(client)
        sidecar.stop()
        until(lambda: client.session is None, "the end of the session")
        assert first.dead
        assert not client.send(first, Release(7, [1], []))
        assert client.poll() == []

    def test_the_next_life_is_another_session(
        self, sidecar: Sidecar, make_client: Callable[..., Client]
    ) -> None:
        client = make_client()
        sidecar.admit(epoch=7)
        first = live(client)
        sidecar.stop()
        until(lambda: client.session is None, "the end of the session")
        sidecar.listen()
        sidecar.admit(epoch=8)
        second = live(client)
        assert second is not first
        assert second.epoch == 8
        # What was made for the first life does not go out in the second.
        assert not client.send(first, Release(7, [1], []))
        assert client.send(second, Release(8, [1], []))

    def test_descriptors_do_not_pile_up(
        self, sidecar: Sidecar, make_client: Callable[..., Client]
    ) -> None:
        client = make_client()
        counts: list[int] = []
        for epoch in range(1, 25):
            peer, _ = sidecar.admit(epoch=epoch)
            while client.session is None or client.session.epoch != epoch:
                time.sleep(0.005)
            counts.append(len(os.listdir("/proc/self/fd")))
            peer.close()
            sidecar.peers.remove(peer)
        # The thread and libzmq close those of the life before when they come to it. One left by
        # each life would make 19 or more.
        assert min(counts[-5:]) <= max(counts[:5]) + 4

    def test_high_descriptors_are_no_limit(
        self, sidecar: Sidecar, make_client: Callable[..., Client]
    ) -> None:
        # select() refuses descriptors from 1,024 on; an engine may well have that many.
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if hard < 2048:
            pytest.skip(f"at most {hard} files may be open here")
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
        taken: list[int] = []
        try:
            while not taken or taken[-1] < 1100:
                taken.append(os.open("/dev/null", os.O_RDONLY))
            client = make_client()
            peer, _ = sidecar.admit()
            session = live(client)
            peer.reply(
                frame_stream(encode(IndexMoved(7, sidecar.index.size_bytes))), (sidecar.index.fd,)
            )
            before = session.index
            until(lambda: live(client).index is not before, "the moved index")
            assert client.session is session
            client.close()
        finally:
            for fd in taken:
                os.close(fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class TestIndexMoved:
    def test_lookups_go_to_the_newest(
        self, sidecar: Sidecar, make_client: Callable[..., Client]
    ) -> None:
        client = make_client()
        peer, _ = sidecar.admit()
        session = live(client)
        # Two at once: the thread may take both before the engine looks.
        small, large = IndexWriter(512), IndexWriter(1024)
        large.set(tag_of(KEY, SALT), FLAG_HOST)
        for index in (small, large):
            peer.reply(frame_stream(encode(IndexMoved(7, index.size_bytes))), (index.fd,))

        def found() -> bool:
            current = client.session
            assert current is session
            assert current.index is not None
            return bool(current.index.lookup(tags_of([KEY], SALT))[0])

        until(found, "the entry of the newest index")
        small.close()
        large.close()

    def test_an_idle_engine_keeps_the_newest_alone(
        self, sidecar: Sidecar, make_client: Callable[..., Client]
    ) -> None:
        client = make_client()
        peer, _ = sidecar.admit()
        session = live(client)
        indexes = [IndexWriter(512 << power) for power in range(4)]
        inodes = [os.fstat(index.fd).st_ino for index in (sidecar.index, *indexes)]

        def mapped_bytes() -> list[int]:
            sizes = sizes_of("kvlake-index")
            return [sizes[inode] for inode in inodes]

        before = mapped_bytes()
        indexes[-1].set(tag_of(KEY, SALT), FLAG_HOST)
        for index in indexes:
            peer.reply(frame_stream(encode(IndexMoved(7, index.size_bytes))), (index.fd,))
        until(
            lambda: bool(session.moved) and bool(session.moved[-1].lookup(tags_of([KEY], SALT))[0]),
            "the newest index",
        )
        # Mapped a second time, beside its writer: the index of the session, and the newest.
        until(lambda: mapped_bytes() == [*before[:-1], 2 * before[-1]], "the others are unmapped")
        for index in indexes:
            index.close()

    def test_one_without_its_descriptor_ends_the_session(
        self, sidecar: Sidecar, make_client: Callable[..., Client]
    ) -> None:
        """As the kernel delivers it where no more files may be open."""
        client = make_client()
        peer, _ = sidecar.admit()
        first = live(client)
        peer.reply(frame_stream(encode(IndexMoved(7, sidecar.index.size_bytes))))
        sidecar.admit()
        until(lambda: client.session not in (None, first), "another session")


class TestClose:
    def test_twice_and_without_a_sidecar(self, make_client: Callable[..., Client]) -> None:
        client = make_client(None, "/nonexistent/attach.sock")
        client.close()
        client.close()
        assert client.session is None

    def test_the_sidecar_sees_the_end(
        self, sidecar: Sidecar, make_client: Callable[..., Client]
    ) -> None:
        client = make_client()
        peer, _ = sidecar.admit()
        live(client)
        client.close()
        assert peer.connection.recv(1) == b""
        assert client.session is None

    def test_it_waits_until_the_sidecar_hangs_up_which_has_unmapped_by_then(
        self, sidecar: Sidecar, make_client: Callable[..., Client]
    ) -> None:
        client = make_client()
        peer, _ = sidecar.admit()
        live(client)
        ended: list[bool] = []
        closing = threading.Thread(target=lambda: ended.append(client.close(WAIT_SECONDS_MAX)))
        closing.start()
        assert peer.connection.recv(1) == b""
        assert not ended
        peer.connection.close()
        closing.join(WAIT_SECONDS_MAX)
        assert ended == [True]
        assert client.close()

    def test_one_that_did_not_wait_is_waited_for_later(
        self, sidecar: Sidecar, make_client: Callable[..., Client]
    ) -> None:
        client = make_client()
        peer, _ = sidecar.admit()
        live(client)
        assert not client.close(wait_seconds_max=0.0)
        assert client.session is None
        assert peer.connection.recv(1) == b""
        assert not client.close(wait_seconds_max=0.0), "it still has our memory"
        ended: list[bool] = []
        closing = threading.Thread(target=lambda: ended.append(client.close(WAIT_SECONDS_MAX)))
        closing.start()
        closing.join(0.1)
        assert not ended
        peer.connection.close()
        closing.join(WAIT_SECONDS_MAX)
        assert ended == [True]

    def test_a_sidecar_that_does_not_is_not_waited_for_longer_than_asked(
        self, sidecar: Sidecar, make_client: Callable[..., Client]
    ) -> None:
        client = make_client()
        sidecar.admit()
        live(client)
        assert not client.close(0.05)

    def test_an_absent_sidecar_holds_nothing(self, make_client: Callable[..., Client]) -> None:
        assert make_client(None, "/nonexistent/attach.sock").close(WAIT_SECONDS_MAX)

    def test_no_descriptor_is_left(
        self, sidecar: Sidecar, make_client: Callable[..., Client]
    ) -> None:
        before = set(os.listdir("/proc/self/fd"))
        client = make_client()
        peer, _ = sidecar.admit()
        live(client)
        # A thread that is not waited for keeps its own.
        client.close(wait_seconds_max=WAIT_SECONDS_MAX)
        peer.close()
        sidecar.peers.remove(peer)
        # The ROUTER, in this process too, drops its end of the DEALER's connection a little later.
        until(lambda: set(os.listdir("/proc/self/fd")) <= before, "the last descriptor's end")


def test_the_first_path_that_answers_is_used(
    make_client: Callable[..., Client], sidecar: Sidecar, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "vllm.kvlake")
    absent = f"{sidecar.path}.absent"
    client = make_client(None, absent, sidecar.path)
    sidecar.admit()
    assert client.wait_attached(WAIT_SECONDS_MAX)
    until(lambda: f"attached to the sidecar at {sidecar.path}" in caplog.text, "its line")


def test_jobs_go_to_the_socket_beside_the_one_that_answered(short_directory: Path) -> None:
    """A container may have the sidecar's folder at another path."""
    told = f"ipc://{short_directory}/theirs/jobs.sock"
    here = short_directory / "ours"
    here.mkdir()
    attach = str(here / "attach.sock")
    assert job_endpoint(told, (attach,)) == told
    with socket.socket(socket.AF_UNIX) as jobs:
        jobs.bind(str(here / "jobs.sock"))
        assert job_endpoint(told, (attach,)) == f"ipc://{here}/jobs.sock"
        # Not by default, where others may have made the folder.
        assert job_endpoint(told, (attach, "/run/kvlake/default/attach.sock")) == told
        (short_directory / "theirs").mkdir()
        with socket.socket(socket.AF_UNIX) as another:
            another.bind(told.removeprefix("ipc://"))
            assert job_endpoint(told, (attach,)) == f"ipc://{here}/jobs.sock"
        # The same place, by a link.
        (short_directory / "theirs" / "attach.sock").touch()
        (here / "attach.sock").symlink_to(short_directory / "theirs" / "attach.sock")
        assert job_endpoint(told, (attach,)) == told
    assert job_endpoint("", (attach,)) == ""


def test_every_place_that_was_tried_is_named(
    make_client: Callable[..., Client], sidecar: Sidecar, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = f"{sidecar.path}.1", f"{sidecar.path}.2"
    make_client(None, first, second)
    until(
        lambda: any(f"no sidecar at {first} or {second} (" in one for one in caplog.messages),
        "both named",
    )


@pytest.mark.promise("foreign-listener")
def test_a_socket_of_another_user_in_tmp_is_not_used(
    make_client: Callable[..., Client],
    sidecar: Sidecar,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The owner of its path was checked, which the owner of its directory can replace meanwhile."""
    places.patch(monkeypatch, "peer_of", lambda _connection: Peer(1, 54321, 1))
    make_client(None, f"{sidecar.path}.absent", sidecar.path)
    until(lambda: any("it belongs to uid 54321" in one for one in caplog.messages), "refused")

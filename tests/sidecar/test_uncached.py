"""Engines that run without the cache: the sidecar lists them, counts them, and says why."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sidecar.cli.status import render
from sidecar.errors import AttachRefused
from sidecar.protocol import DECLINED_CHARS_MAX, PROTOCOL_VERSION, Attach, Declined, Refused, Role
from sidecar.protocol.codec import ProtocolError, decode_attach_reply, encode, frame_stream
from sidecar.protocol.peer import Peer
from sidecar.service.uncached import REASONS, REFUSED_MAX, REFUSED_SECONDS, UncachedEngines
from tests.sidecar.client import (
    WAIT_SECONDS_MAX,
    RefusedError,
    RunningSidecar,
    Scheduler,
    Worker,
    attach_message,
    config_in,
)

WHY = "chunk.tokens=100 is not a multiple of the engine's block size, 32; choose 96 or 128"
DECLINED = Declined(PROTOCOL_VERSION, Role.SCHEDULER, "engine", "chunk_tokens", WHY)


@contextlib.contextmanager
def declining(path: Path, message: Declined = DECLINED) -> Generator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(WAIT_SECONDS_MAX)
        connection.connect(str(path))
        connection.sendall(frame_stream(encode(message)))
        yield connection


def answer(connection: socket.socket) -> Refused:
    """What the sidecar says before it hangs up."""
    data = b""
    while piece := connection.recv(4096):
        data += piece
    reply = decode_attach_reply(data[4:])
    assert isinstance(reply, Refused)
    return reply


def listed(number: int) -> Callable[[dict[str, Any]], bool]:
    return lambda status: len(status["uncached"]) == number


def counted(sidecar: RunningSidecar) -> dict[str, int]:
    """Engines without the cache, by reason, as Prometheus gets them; reasons of none left out."""
    told = sidecar.get("/metrics").decode()
    found = re.findall(r'^kvlake_engines_uncached\{reason="(\w+)"\} (\S+)$', told, re.MULTILINE)
    assert {reason for reason, _ in found} == set(REASONS)
    return {reason: int(float(value)) for reason, value in found if float(value)}


@pytest.mark.promise("uncached-engines")
def test_an_engine_that_declined_is_shown_until_it_is_gone(sidecar: RunningSidecar) -> None:
    assert counted(sidecar) == {}
    with declining(sidecar.path):
        # Others are served, so it is ready.
        sidecar.wait_until(lambda status: bool(status["uncached"] and status["ready"]))
        status = sidecar.status()
        (one,) = status["uncached"]
        assert (one["engine_id"], one["pid"], one["uid"]) == ("engine", os.getpid(), os.getuid())
        assert (one["reason"], one["message"]) == ("chunk_tokens", WHY)
        assert counted(sidecar) == {"chunk_tokens": 1}
        (problem,) = [each for each in status["problems"] if each["code"] == "uncached"]
        assert not problem["serious"]
        assert WHY in problem["reason"]
        page = render(status)
        assert "no engine is attached" in page
        assert f"chunk_tokens: {WHY}" in page
    sidecar.wait_until(listed(0))
    assert counted(sidecar) == {}
    assert "WITHOUT THE CACHE" not in render(sidecar.status())


def test_its_processes_are_one_engine(sidecar: RunningSidecar) -> None:
    worker = msgspec.structs.replace(DECLINED, role=Role.WORKER, reason="memory")
    with declining(sidecar.path):
        sidecar.wait_until(listed(1))
        with declining(sidecar.path, worker), declining(sidecar.path, worker):
            with declining(sidecar.path, msgspec.structs.replace(DECLINED, engine_id="other")):
                sidecar.wait_until(listed(2))
            assert counted(sidecar)["chunk_tokens"] >= 1
        sidecar.wait_until(listed(1))
        assert counted(sidecar) == {"chunk_tokens": 1}


def test_a_reason_of_a_later_release_is_shown(sidecar: RunningSidecar) -> None:
    with declining(sidecar.path, msgspec.structs.replace(DECLINED, reason="full_moon")):
        sidecar.wait_until(listed(1))
        assert counted(sidecar) == {"other": 1}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"reason": "Chunk Tokens"}, "reason"),
        ({"reason": "x" * 33}, "reason"),
        ({"message": ""}, "message"),
        ({"message": "x" * (DECLINED_CHARS_MAX + 1)}, "message"),
        ({"message": "\x1b[2Jgone"}, "message"),
        ({"engine_id": ""}, "engine_id"),
        ({"engine_id": "\x1b[2Jgone"}, "engine_id"),
        ({"version": 99}, "version"),
    ],
)
def test_what_cannot_be_shown_is_refused(
    sidecar: RunningSidecar, changes: dict[str, Any], field: str
) -> None:
    with declining(sidecar.path, msgspec.structs.replace(DECLINED, **changes)) as connection:
        assert field in answer(connection).message
    assert not any(one["reason"] != "refused" for one in sidecar.status()["uncached"])


def test_too_many_are_refused_and_take_no_place_of_a_client(short_directory: Path) -> None:
    config = config_in(short_directory, limits={"sessions_max": 2})
    with RunningSidecar(config) as sidecar, declining(sidecar.path), declining(sidecar.path):
        sidecar.wait_until(listed(1))
        with declining(sidecar.path) as third:
            said = answer(third)
        assert (said.code, "limits.sessions_max=2" in said.message) == ("declined", True)
        with Worker(sidecar.path), Scheduler(sidecar.path):
            assert len(sidecar.status()["sessions"]) == 2


def test_a_sidecar_that_does_not_know_the_message_refuses_it_in_words() -> None:
    """As those of before did: an `Attach` was all that they decoded."""
    with pytest.raises(msgspec.ValidationError, match="declined"):
        msgspec.msgpack.decode(encode(DECLINED), type=Attach)


@pytest.mark.promise("uncached-engines")
def test_an_engine_whose_attach_is_refused_is_shown_until_it_attaches(
    sidecar: RunningSidecar,
) -> None:
    for _ in range(3):
        with pytest.raises(RefusedError):
            Worker(sidecar.path, engine_id="large", blocks_per_chunk=4096)
    (one,) = sidecar.status()["uncached"]
    assert (one["engine_id"], one["reason"]) == ("large", "refused")
    assert "refused (pool)" in one["message"]
    assert "host.size" in one["message"], "the remedy"
    assert counted(sidecar) == {"refused": 1}
    with Worker(sidecar.path, engine_id="large"):
        sidecar.wait_until(listed(0))


def test_one_that_could_not_be_understood_is_shown_by_its_pid(sidecar: RunningSidecar) -> None:
    message = msgspec.msgpack.encode({"type": "attach", "version": 3, "\x1b[2J": 1})
    with pytest.raises(RefusedError):
        Worker(sidecar.path, version=3)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(sidecar.path))
        connection.sendall(frame_stream(message))
        sidecar.wait_until(listed(1))
    (one,) = sidecar.status()["uncached"]
    assert (one["engine_id"], one["pid"]) == ("", os.getpid())
    assert "same kvlake release" in one["message"]
    assert one["message"].isprintable()
    assert json.dumps(one)


# --- the list by itself --------------------------------------------------------------------------


class Clock:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


def peer(uid: int = 0, pid: int = 1) -> Peer:
    return Peer(pid, uid, uid)


def test_one_that_does_not_try_again_is_forgotten() -> None:
    clock = Clock()
    engines = UncachedEngines(4, clock=clock)
    attach, error = attach_message(Role.SCHEDULER), AttachRefused("sessions", "too many")
    for _ in range(3):
        engines.refused(peer(), attach, error)
        clock.now += REFUSED_SECONDS
    (one,) = engines.all()
    assert one.since == 1_000.0, "the first of them"
    clock.now += 0.1
    assert engines.all() == []
    engines.refused(peer(), attach, error)
    assert [one.since for one in engines.all()] == [clock.now]


def test_users_who_are_not_served_are_one_entry_each() -> None:
    engines = UncachedEngines(4, clock=Clock())
    for pid in range(1, 1_000):
        for uid in (1_001, 1_002):
            engines.refused(peer(uid, pid), None, AttachRefused("user", "not served"))
    assert {one.uid for one in engines.all()} == {1_001, 1_002}
    assert len(engines.all()) == 2


def test_the_list_is_bounded() -> None:
    engines = UncachedEngines(4, clock=Clock())
    for pid in range(1, 1_000):
        engines.refused(peer(0, pid), None, ProtocolError("malformed", "no MessagePack"))
    assert len(engines.all()) == REFUSED_MAX
    assert engines.all()[-1].pid == 999


def test_a_sidecar_that_stops_is_no_reason() -> None:
    engines = UncachedEngines(4, clock=Clock())
    engines.refused(peer(), attach_message(Role.WORKER), AttachRefused("draining", "stopping"))
    assert engines.all() == []

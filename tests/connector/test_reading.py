"""Weights are read beside the engine: it starts at once, and is cached once they are known."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from connector.client import Attempt, Client
from connector.identity.file_digests import file_digest, file_stamp
from connector.identity.profile import EngineProfile
from connector.identity.reading import Identity
from connector.identity.weights import UnreadFiles
from connector.vllm import KVLakeConnector
from sidecar.protocol import Declined, Role, Submit
from tests import places
from tests.connector.clients import attach_of
from tests.connector.configurations import kv_cache_config, request_of, vllm_config, write_model
from tests.connector.engine import Engine
from tests.connector.listening import WAIT_SECONDS_MAX, Sidecar, until
from tests.connector.locked_weights import LockedWeights
from tests.connector.offloading_engine import Engine as NativeEngine
from tests.connector.offloading_engine import prompt, sidecar
from tests.connector.prompts import CACHED, PROMPT, counted, total
from tests.harness.sidecars import SidecarProcess

__all__ = ["sidecar"]

HUGE_BYTES = 1 << 42
"""Size of a file without blocks on the disk, which takes an hour to read."""


@pytest.fixture
def locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LockedWeights]:
    locked = LockedWeights(tmp_path / "cache", monkeypatch)
    yield locked
    locked.release()


@pytest.fixture
def listener(short_directory: Path) -> Iterator[Sidecar]:
    listener = Sidecar(short_directory)
    yield listener
    listener.close()


def write(path: Path, content: bytes = b"weights") -> Path:
    path.write_bytes(content)
    return path


def huge(path: Path) -> Path:
    with path.open("wb") as file:
        file.truncate(HUGE_BYTES)
    return path


def identity_of(*paths: Path) -> Identity:
    files = [UnreadFiles([("", "", file_stamp(path))], single=True) for path in paths]
    return Identity([{"model": {"digest": one}} for one in files], logs=True)


def profile_of(connector: KVLakeConnector) -> EngineProfile:
    return connector._engine  # noqa: SLF001 (its public names are vLLM's)


def readers() -> list[threading.Thread]:
    return [
        one for one in threading.enumerate() if one.name in ("kvlake-weights", "kvlake-identity")
    ]


def no_readers() -> None:
    until(lambda: not readers(), "the end of the threads that read")


class TestIdentity:
    def test_small_files_are_known_at_once(self, tmp_path: Path) -> None:
        identity = identity_of(write(tmp_path / "1"), write(tmp_path / "2", b"other"))
        assert identity.ended
        digests = [hashlib.sha256(content).hexdigest() for content in (b"weights", b"other")]
        assert identity.descriptions == [{"model": {"digest": digest}} for digest in digests]
        called: list[int] = []
        identity.when_complete(lambda: called.append(1))
        assert called == [1]

    def test_large_files_are_read_once_and_then_known_at_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        places.patch(monkeypatch, "SETTLED_SECONDS", -3600)
        places.patch(monkeypatch, "AT_ONCE_BYTES_MAX", 0)
        caplog.set_level("INFO", "vllm.kvlake")
        path = write(tmp_path / "1")
        ended = threading.Event()
        first = identity_of(path)
        assert "until then this engine is served without the cache" in caplog.text
        first.then(ended.set)
        assert ended.wait(WAIT_SECONDS_MAX)
        assert "the weights are identified" in caplog.text
        caplog.clear()
        again = identity_of(path)
        assert again.ended
        assert again.descriptions == first.descriptions
        assert not caplog.text
        no_readers()

    def test_no_process_is_waited_for(self, tmp_path: Path, locked: LockedWeights) -> None:
        identity = identity_of(write(tmp_path / "1"))
        called: list[int] = []
        identity.then(lambda: called.append(1))
        identity.when_complete(lambda: called.append(2))
        assert not identity.ended
        assert not identity.descriptions
        locked.release()
        until(lambda: identity.ended, "the end")
        assert called == [1, 2]
        no_readers()

    @pytest.mark.promise("weights")
    @pytest.mark.parametrize("replaced", [False, True])
    def test_files_that_changed_since_the_engine_loaded_them(
        self, tmp_path: Path, locked: LockedWeights, replaced: bool
    ) -> None:
        """Also if another file takes the place of one, with the same content and time."""
        path = write(tmp_path / "1")
        identity = identity_of(path)
        called: list[str] = []
        identity.then(lambda: called.append(identity.refusal))
        identity.when_complete(lambda: called.append("complete"))
        if replaced:
            status = path.stat()
            other = write(tmp_path / "2")
            os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
            other.replace(path)
        else:
            write(path, b"WEIGHTS")
        locked.release()
        until(lambda: identity.ended, "the end")
        assert called == [f"{path} was changed before it was read"]
        assert not identity.descriptions

    @pytest.mark.promise("weights")
    def test_a_file_that_changes_while_others_are_read(
        self, tmp_path: Path, locked: LockedWeights, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first, last = write(tmp_path / "1"), write(tmp_path / "2", b"other")

        def read(path: Path, *options: Any) -> str:
            digest = file_digest(path, *options)
            if path == last:
                write(first, b"WEIGHTS")
            return digest

        places.patch(monkeypatch, "THREADS_BESIDE_ENGINE", 1)
        places.patch(monkeypatch, "file_digest", read)
        identity = identity_of(first, last)
        locked.release()
        until(lambda: identity.ended, "the end")
        assert identity.refusal == f"{first} was changed while the weights were read"

    def test_a_file_that_cannot_be_read(self, tmp_path: Path, locked: LockedWeights) -> None:
        path = write(tmp_path / "1")
        identity = identity_of(path)
        path.unlink()
        locked.release()
        until(lambda: identity.ended, "the end")
        assert "No such file" in identity.refusal

    def test_a_fault_of_the_reading_is_a_refusal(
        self, tmp_path: Path, locked: LockedWeights, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*_: Any) -> str:
            raise ZeroDivisionError

        places.patch(monkeypatch, "file_digest", broken)
        identity = identity_of(write(tmp_path / "1"))
        locked.release()
        until(lambda: identity.ended, "the end")
        assert identity.refusal == "ZeroDivisionError()"

    def test_closed_while_another_process_reads(
        self, tmp_path: Path, locked: LockedWeights
    ) -> None:
        identity = identity_of(write(tmp_path / "1"))
        identity.then(lambda: pytest.fail("it was closed"))
        identity.close()
        no_readers()
        assert not identity.ended

    @pytest.mark.promise("weights-read")
    def test_closed_while_it_reads(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        identity = identity_of(huge(tmp_path / "1"), huge(tmp_path / "2"))
        until(lambda: len(readers()) > 1, "the reading")
        identity.close()
        no_readers()
        assert not identity.ended
        assert not (tmp_path / "cache" / "kvlake" / "weights.json").exists()

    def test_a_process_ends_while_it_reads(self, tmp_path: Path) -> None:
        """VLLM does not always call `shutdown`."""
        huge(tmp_path / "1")
        program = """
import sys, threading, time
from pathlib import Path
from connector.identity.file_digests import file_stamp
from connector.identity.reading import Identity
from connector.identity.weights import UnreadFiles

file = UnreadFiles([("", "", file_stamp(Path(sys.argv[1])))], single=True)
identity = Identity([file], logs=True)
while not any(one.name == "kvlake-weights" for one in threading.enumerate()):
    time.sleep(0.005)
print(identity.ended)
"""
        ran = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / "1")],
            cwd=places.ROOT,
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")},
            timeout=4 * WAIT_SECONDS_MAX,
            capture_output=True,
            text=True,
            check=True,
        )
        assert ran.stdout.split() == ["False"]

    def test_threads_that_read_yield_to_the_engine(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locked: LockedWeights
    ) -> None:
        found: list[int] = []

        def read(*arguments: Any) -> str:
            found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
            return file_digest(*arguments)

        places.patch(monkeypatch, "file_digest", read)
        own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        identity = identity_of(write(tmp_path / "1"))
        locked.release()
        until(lambda: identity.ended, "the end")
        assert found == [min(own + 10, 19)]
        assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own


class TestClient:
    def test_it_attaches_when_it_is_started(self, listener: Sidecar) -> None:
        starts: list[Callable[[], None]] = []
        client = Client(
            (listener.path,),
            lambda: Attempt(attach_of()),
            attach_seconds=WAIT_SECONDS_MAX,
            when=starts.append,
        )
        assert client.session is None
        assert not client.thread.is_alive()
        (start,) = starts
        start()
        listener.admit()
        until(lambda: client.session is not None, "a session")
        client.close()

    def test_closed_before_it_is_started(self, listener: Sidecar) -> None:
        starts: list[Callable[[], None]] = []
        client = Client((listener.path,), lambda: Attempt(attach_of()), when=starts.append)
        assert client.close(release_seconds_max=WAIT_SECONDS_MAX), "nothing was ever shared"
        starts[0]()
        assert client.thread.ident is None


class TestConnector:
    """The engine's two roles while another process reads the weights."""

    @pytest.mark.promise("weights-read")
    def test_requests_are_cached_once_the_weights_are_known(
        self, model: Path, locked: LockedWeights
    ) -> None:
        """The double's client attaches all the same, so keys of unknown weights would show."""
        engine = Engine(model)
        taken = counted(engine)
        profile = profile_of(engine.connector)
        assert not profile.groups[0].namespace_digest
        for name in "ab":
            engine.run(request_of(name, PROMPT, max_tokens=2))
            engine.forget()
        assert engine.computed["b"] >= len(PROMPT)
        assert not [sent for rank in engine.ranks for sent in rank.client.sent_of(Submit)]
        assert set(engine.outcomes) == {"refused", "tail"}
        running = engine.add(request_of("c", PROMPT, max_tokens=CACHED))
        engine.step()
        locked.release()
        until(lambda: bool(profile.groups[0].namespace_digest), "the namespace")
        engine.run(request_of("d", PROMPT[:100], max_tokens=2))
        assert total(taken, "chunks_stored") > 0
        engine.settle()
        assert running.is_finished()
        stored = total(taken, "chunks_stored")
        assert not engine.role.requests
        engine.forget()
        engine.run(request_of("e", PROMPT, max_tokens=2))
        assert engine.computed["e"] == len(PROMPT) - 96 + 1, "of c nothing was stored"
        assert total(taken, "chunks_stored") > stored
        engine.forget()
        engine.run(request_of("f", PROMPT, max_tokens=2))
        assert engine.computed["f"] == len(PROMPT) - CACHED + 1
        engine.check_idle()
        engine.close()

    def test_a_reset_meanwhile_counts(self, model: Path, locked: LockedWeights) -> None:
        """Weights may have been replaced before: what others stored must not be found."""
        engine, other = Engine(model), Engine(model)
        engine.connector.reset_cache()
        generation = engine.role.requests.generation
        assert generation
        locked.release()
        groups = profile_of(engine.connector).groups
        until(lambda: bool(groups[0].namespace_digest), "the namespace")
        assert engine.role.requests.generation == generation
        for one in (engine, other):
            one.close()

    def test_one_that_ends_before(self, model: Path, locked: LockedWeights) -> None:
        engine = Engine(model)
        engine.run(request_of("a", PROMPT, max_tokens=2))
        engine.close()
        no_readers()

    def test_it_attaches_once_the_weights_are_known(
        self, model: Path, locked: LockedWeights, listener: Sidecar
    ) -> None:
        config = vllm_config(model, socket=listener.path, attach_seconds=WAIT_SECONDS_MAX)
        connector = KVLakeConnector(config, KVConnectorRole.SCHEDULER, kv_cache_config())
        connector.bind_gpu_block_pool(Mock())
        role = connector._scheduler  # noqa: SLF001 (its public names are vLLM's)
        assert role is not None
        client = role.client
        assert not client.thread.is_alive()
        locked.release()
        attach = listener.accept().attach
        assert attach.role is Role.SCHEDULER
        known = EngineProfile(config, kv_cache_config())
        assert attach.namespace == known.groups[0].namespace
        connector.shutdown()
        no_readers()

    @pytest.mark.promise("uncached-engines")
    def test_weights_that_change_meanwhile(
        self,
        tmp_path: Path,
        locked: LockedWeights,
        listener: Sidecar,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """Both roles see it, the sidecar hears of both, and the engine serves on."""
        folder = tmp_path / "model"
        folder.mkdir()
        engine = Engine(write_model(folder), socket=listener.path)
        engine.run(request_of("a", PROMPT, max_tokens=2))
        write(folder / "model.safetensors", b"others")
        locked.release()
        for connector in (engine.connector, engine.ranks[0].connector):
            ended = threading.Event()
            profile_of(connector).then(ended.set)
            assert ended.wait(WAIT_SECONDS_MAX)
            assert profile_of(connector).refusal
        engine.run(request_of("b", PROMPT, max_tokens=2))
        engine.forget()
        engine.run(request_of("c", PROMPT, max_tokens=2))
        assert engine.computed["c"] >= len(PROMPT)
        assert engine.role.retired
        found = [listener.accept().first for _ in range(2)]
        assert {one.role for one in found if isinstance(one, Declined)} == {
            Role.SCHEDULER,
            Role.WORKER,
        }
        assert {one.reason for one in found if isinstance(one, Declined)} == {"weights"}
        assert caplog.text.count("was changed before it was read") == 1
        engine.close()


class TestOffloading:
    """VLLM's own offloading while another process reads the weights."""

    pytestmark = pytest.mark.usefixtures("warm_sidecars")

    @pytest.mark.promise("weights-read")
    def test_requests_are_cached_once_the_weights_are_known(
        self, model: Path, sidecar: SidecarProcess, locked: LockedWeights
    ) -> None:
        engine = NativeEngine(model, sidecar.socket)
        (tier,) = engine.manager.secondary_tiers
        tokens = prompt(200)
        for name in "ab":
            assert engine.run(name, tokens) == 0
            engine.forget()
        assert tier.client.session is None
        running = engine.add(request_of("c", tokens, max_tokens=100))
        engine.step()
        locked.release()
        until(lambda: tier.client.session is not None, "a session")
        engine.settle()
        assert running.is_finished()
        engine.forget()
        assert engine.run("d", tokens) == 0, "of c nothing was stored"
        engine.forget()
        assert engine.run("e", tokens) == 192
        engine.close()
        no_readers()

    @pytest.mark.promise("uncached-engines")
    def test_weights_that_change_meanwhile(
        self,
        tmp_path: Path,
        locked: LockedWeights,
        listener: Sidecar,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        folder = tmp_path / "model"
        folder.mkdir()
        engine = NativeEngine(write_model(folder), listener.path)
        tokens = prompt(200)
        assert engine.run("a", tokens) == 0
        write(folder / "model.safetensors", b"others")
        locked.release()
        declined = listener.accept().first
        assert isinstance(declined, Declined)
        assert (declined.role, declined.reason) == (Role.SCHEDULER, "weights")
        assert "was changed before it was read" in declined.message
        assert f"by vLLM's host tier alone, because {declined.message}" in caplog.text
        engine.forget(host_tier=False)
        assert engine.run("b", tokens) == 192, "vLLM's own host tier"
        engine.forget()
        assert engine.run("c", tokens) == 0
        engine.close()

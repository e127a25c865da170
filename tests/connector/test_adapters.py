"""LoRA adapters whose files change: KV of one is never loaded or stored as that of another.

vLLM reads an adapter's folder at times that the scheduler does not know: before the first
request (`add_lora`), and again after it dropped the adapter for others (`max_cpu_loras`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

from connector.identity.adapters import UNKNOWN, Adapters, LoadedAdapters, files_identity
from connector.identity.file_digests import file_stamp
from connector.identity.weights import read_adapter
from connector.plan import StepReport
from connector.vllm_workarounds import watch_adapter_loads
from tests import places
from tests.connector.configurations import request_of
from tests.connector.engine import Engine
from tests.connector.prompts import CACHED, PROMPT

OTHER = [number + 1 for number in PROMPT]


def write(folder: Path, content: bytes) -> Path:
    """The files of an adapter. They were changed just now, so their stamps tell little."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(content * 100)
    return folder


def files_of(folder: Path) -> str:
    return read_adapter(str(folder)).digest


class Adapted:
    """An engine, and two adapters in folders."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine = engine
        self.engine.loras_max = 1
        self.folder = write(folder / "x", b"1")
        self.x = LoRARequest("x", 1, str(self.folder))
        self.y = LoRARequest("y", 2, str(write(folder / "y", b"y")))
        self._count = 0

    def run(self, lora: Any, prompt: list[int] = PROMPT) -> tuple[int, set[bytes]]:
        """Tokens that a request had not to compute, and what was stored for it."""
        self._count += 1
        before = set(self.engine.sidecar.parts)
        request = request_of(f"r{self._count}", prompt, max_tokens=1, lora_request=lora)
        self.engine.run(request)
        self.engine.check_idle()
        computed = self.engine.computed[request.request_id]
        return len(prompt) - computed, set(self.engine.sidecar.parts) - before


@pytest.fixture(params=[1, 2], ids=["one rank", "two ranks"])
def adapted(make: Callable[..., Engine], tmp_path: Path, request: pytest.FixtureRequest) -> Adapted:
    return Adapted(make(ranks=request.param), tmp_path)


@pytest.mark.promise("adapters")
class TestFilesThatChange:
    def test_an_unchanged_adapter_is_cached(self, adapted: Adapted) -> None:
        """Also if vLLM dropped it and read it again."""
        assert adapted.run(adapted.x)[1]
        assert adapted.run(adapted.y)[1]
        adapted.engine.forget()
        assert adapted.run(adapted.x)[0] == CACHED
        adapted.engine.forget()
        assert adapted.run(adapted.y)[0] == CACHED

    def test_files_that_are_replaced_while_another_adapter_is_in_memory(
        self, adapted: Adapted, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert adapted.run(adapted.x)[1]
        write(adapted.folder, b"2")
        assert adapted.run(adapted.y)[1]
        adapted.engine.forget()
        # vLLM reads the folder again.
        assert adapted.run(adapted.x) == (0, set())
        adapted.engine.forget()
        assert adapted.run(adapted.x, OTHER) == (0, set())
        assert caplog.text.count("is not cached any more") == 1
        assert "another path" in caplog.text

    def test_files_that_are_replaced_by_others_of_the_same_size_and_time(
        self, adapted: Adapted
    ) -> None:
        path = adapted.folder / "adapter_model.safetensors"
        assert adapted.run(adapted.x)[1]
        status = path.stat()
        write(adapted.folder, b"2")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        adapted.engine.forget()
        assert adapted.run(adapted.x) == (0, set())

    def test_a_file_that_was_written_again_with_the_same_bytes(self, adapted: Adapted) -> None:
        adapted.run(adapted.x)
        write(adapted.folder, b"1")
        adapted.engine.forget()
        assert adapted.run(adapted.x)[0] == CACHED

    def test_files_that_are_replaced_before_a_step_that_reads_them(
        self, adapted: Adapted, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A running request computes with another adapter from then on."""
        engine = adapted.engine
        assert adapted.run(adapted.x)[1]
        assert adapted.run(adapted.y)[1]
        stored = set(engine.sidecar.parts)
        request = engine.add(request_of("late", OTHER, max_tokens=1, lora_request=adapted.x))
        write(adapted.folder, b"2")
        engine.finish(request)
        engine.settle()
        assert set(engine.sidecar.parts) == stored
        assert "vLLM loaded other files for lora_int_id 1" in caplog.text
        engine.check_idle()

    def test_kv_of_the_old_files_under_another_number(self, adapted: Adapted) -> None:
        """vLLM's own prefix cache knows only name and path."""
        assert adapted.run(adapted.x)[1]
        write(adapted.folder, b"2")
        # Nobody knows what computed this.
        assert adapted.run(adapted.x, OTHER)[1] == set()
        again = LoRARequest("x", 3, str(adapted.folder))
        own, stored = adapted.run(again, OTHER)
        assert own
        assert not stored
        adapted.engine.forget()
        assert adapted.run(again, OTHER)[1]
        adapted.engine.forget()
        assert adapted.run(again, OTHER)[0] == CACHED

    def test_files_that_are_deleted(
        self, adapted: Adapted, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert adapted.run(adapted.x)[1]
        path = adapted.folder / "adapter_model.safetensors"
        content = path.read_bytes()
        path.unlink()
        adapted.engine.forget()
        assert adapted.run(adapted.x) == (0, set())
        assert caplog.text.count("is not cached") == 1
        path.write_bytes(content)
        adapted.engine.forget()
        assert adapted.run(adapted.x)[0] == CACHED


@pytest.mark.promise("adapters")
class TestLoadedBeforeTheFirstRequest:
    def test_same_files(self, adapted: Adapted) -> None:
        """The first request is computed: it is not known yet what vLLM has loaded."""
        adapted.run(adapted.x)
        other = LoRARequest("x", 5, str(adapted.folder))
        adapted.engine.add_lora(other)
        adapted.engine.forget()
        assert adapted.run(other)[0] == 0
        adapted.engine.forget()
        assert adapted.run(other)[0] == CACHED

    def test_other_files(self, adapted: Adapted, caplog: pytest.LogCaptureFixture) -> None:
        """Chunks of the new files are not for an engine with the old ones."""
        write(adapted.folder, b"2")
        assert adapted.run(adapted.x)[1]
        other = LoRARequest("x", 5, str(adapted.folder))
        write(adapted.folder, b"1")
        adapted.engine.add_lora(other)
        write(adapted.folder, b"2")
        adapted.engine.forget()
        # Under these very keys there are chunks.
        assert adapted.run(other) == (0, set())
        assert "vLLM loaded other files" in caplog.text
        adapted.engine.forget()
        assert adapted.run(other, OTHER) == (0, set())

    def test_other_files_that_were_reported(self, adapted: Adapted) -> None:
        """Other requests ran between, so the scheduler knows before the first one."""
        adapted.engine.add_lora(adapted.x)
        write(adapted.folder, b"2")
        adapted.run(None)
        assert adapted.run(adapted.x) == (0, set())
        again = LoRARequest("x", 3, str(adapted.folder))
        own, stored = adapted.run(again)
        assert own
        assert not stored

    def test_in_place(self, adapted: Adapted) -> None:
        assert adapted.run(adapted.x)[1]
        write(adapted.folder, b"2")
        replaced = LoRARequest("x", 1, str(adapted.folder), load_inplace=True)
        adapted.engine.add_lora(replaced)
        adapted.engine.forget()
        assert adapted.run(replaced)[1]
        adapted.engine.forget()
        assert adapted.run(replaced)[0] == CACHED
        # And without the word, which is of the load alone.
        adapted.engine.forget()
        assert adapted.run(adapted.x)[0] == CACHED


class TestWorkerReports:
    def test_loads_of_vllms_managers_are_noticed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Both managers load with the same function."""
        monkeypatch.setattr(LRUCacheWorkerLoRAManager.__mro__[1], "_load_adapter", lambda *_: "it")
        loaded, again = LoadedAdapters(), LoadedAdapters()
        for _ in range(2):
            watch_adapter_loads(loaded)
            watch_adapter_loads(again)
        lora = LoRARequest("a", 1, str(write(tmp_path / "a", b"1")))
        manager = object.__new__(LRUCacheWorkerLoRAManager)
        load: Any = manager._load_adapter
        assert load(lora) == "it"
        files = files_of(tmp_path / "a")
        assert loaded.take() == again.take() == {(1, files, False): 1}
        assert loaded.take() == {}
        assert loaded.holds(1, files)
        assert not loaded.holds(1, "others")
        assert not loaded.holds(2, files)
        assert loaded.holds(0, "")

    def test_files_that_change_while_vllm_reads_them_are_unknown(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "a", b"1")
        lora = LoRARequest("a", 1, str(folder))
        loaded = LoadedAdapters()
        before = loaded.begin(lora)
        write(folder, b"2")
        loaded.note(lora, before)
        assert loaded.take() == {(1, UNKNOWN, False): 1}
        assert not loaded.holds(1, files_of(folder))

    def test_a_number_of_two_adapters_holds_neither(self, tmp_path: Path) -> None:
        """Also once the first is back: blocks of its requests hold KV of the other."""
        folder = tmp_path / "a"
        loaded = LoadedAdapters()
        for content in (b"1", b"2", b"1"):
            lora = LoRARequest("a", 1, str(write(folder, content)))
            loaded.note(lora, loaded.begin(lora))
        assert loaded.take() == {(1, UNKNOWN, False): 1}
        assert not loaded.holds(1, files_of(folder))

    def test_settled_files_are_not_read_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lora = LoRARequest("a", 1, str(write(tmp_path / "a", b"1")))
        reads: list[Path] = []
        places.patch(monkeypatch, "SETTLED_SECONDS", -3600)
        digest = places.find("file_digest").value

        def counted(path: Path, *options: Any) -> str:
            reads.append(path)
            return str(digest(path, *options))

        places.patch(monkeypatch, "file_digest", counted)
        loaded = LoadedAdapters()
        for _ in range(3):
            loaded.note(lora, loaded.begin(lora))
        assert len(reads) == 2, "two files, once each"

    def test_ranks_that_loaded_different_files_have_neither(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        folder = write(tmp_path / "a", b"1")
        lora = LoRARequest("a", 1, str(folder))
        files = files_of(folder)
        for told in ([files], [files, "others"]):
            void: list[tuple[int, str]] = []

            def note(number: int, kept: str, void: list[tuple[int, str]] = void) -> None:
                void.append((number, kept))

            adapters = Adapters(2, note)
            assert adapters.of(lora) is not None
            adapters.loaded({(1, one, False): 1 for one in told})
            assert not adapters.confirmed(1, files)
            assert void
            assert adapters.of(lora) is None
        assert caplog.text.count("another path") == 2

    def test_the_way_files_are_read_is_part_of_the_identity(self) -> None:
        two, three = (SimpleNamespace(is_3d_lora_weight=each) for each in (False, True))
        assert files_identity("x", two) != files_identity("x", three)

    def test_a_report_of_adapters_is_not_empty(self) -> None:
        one = StepReport(adapters={(1, "x", False): 1})
        assert not one.empty
        assert one.add(one).adapters == {(1, "x", False): 2}


def test_file_stamps_use_the_system_clock(tmp_path: Path) -> None:
    """A change is settled after `SETTLED_SECONDS`."""
    settled = places.find("stamps_settled").value
    stamps = [file_stamp(path) for path in write(tmp_path / "a", b"1").iterdir()]
    now = time.time()
    assert not settled(stamps, now)
    assert settled(stamps, now + 10)

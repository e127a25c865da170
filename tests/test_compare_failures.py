"""`make compare`: what its rows keep of a load under which an engine or a cache ended."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.compare.peers import faults, turns, under_load
from benchmarks.compare.peers.arms import Arm, ArmFactory, Cache
from benchmarks.compare.peers.client import Answer
from benchmarks.compare.peers.metrics import Counts
from benchmarks.compare.peers.processes import ServerGroup
from benchmarks.compare.peers.tools import bench_load
from benchmarks.compare.peers.turns import Comparison

if TYPE_CHECKING:
    from pathlib import Path


class DeadAfter:
    """Reads of an engine's metrics, which are refused from some read on."""

    def __init__(self, reads: int) -> None:
        self.reads_left = reads

    def __call__(self, *_: object) -> Counts:
        self.reads_left -= 1
        if self.reads_left < 0:
            raise ConnectionRefusedError("refused")
        return Counts()


BENCH_RESULT = {"completed": 1, "ttfts": [0.1, 0.0], "errors": ["", "the engine died"]}
UNREAD = "its engine's metrics could not be read: refused"


def one_arm(tmp_path: Path) -> tuple[Comparison, Any]:
    engine, cache = (ServerGroup(["none"], tmp_path / "log", "http://127.0.0.1:9") for _ in "ab")
    arm = Arm("kvlake", "kvlake", "a sidecar", engine, "http://127.0.0.1:9", Cache(cache))
    factory = ArmFactory(tmp_path, tmp_path / "model")
    return Comparison([arm], factory, tmp_path, tmp_path / "model", quick=True), arm


def test_failed_requests_of_a_tool_count_though_the_engine_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison, _ = one_arm(tmp_path)
    counts = DeadAfter(1)
    monkeypatch.setattr(under_load, "counts_of", counts)
    monkeypatch.setattr(turns, "counts_of", counts)
    monkeypatch.setattr(under_load, "use_tool", lambda *_: bench_load(BENCH_RESULT))
    (row,) = under_load.no_hits(comparison)
    assert (row.requests, row.failures, row.ttft_p50, row.computed) == (2, 1, 100.0, None)
    assert row.note == f"the engine died; {UNREAD}"


@pytest.mark.parametrize("dies_while_loaded", [True, False])
def test_failed_requests_beside_a_killed_cache_count_though_the_engine_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_while_loaded: bool
) -> None:
    comparison, _ = one_arm(tmp_path)
    counts, reads = DeadAfter(1), DeadAfter(1 if dies_while_loaded else 2)
    prompts = iter((0, faults.KILLED_AT_PROMPTS))
    monkeypatch.setattr(faults, "counts_of", counts)
    monkeypatch.setattr(turns, "counts_of", counts)
    monkeypatch.setattr(faults, "prompts_of", lambda _: reads() and next(prompts))
    running = subprocess.Popen(["true"])
    monkeypatch.setattr(running, "poll", lambda: None)
    monkeypatch.setattr(faults, "start_tool", lambda *_: running)
    monkeypatch.setattr(faults, "stop_tool", lambda process: process.wait())
    monkeypatch.setattr(faults, "finish_tool", lambda *_: BENCH_RESULT)
    (row,) = faults.kill_cache(comparison)
    assert (row.requests, row.failures) == (2, 1)
    assert row.note == f"longest TTFT 0.1 s; the engine died; {UNREAD}"


def test_what_no_tool_did_is_not_said_of_the_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison, _ = one_arm(tmp_path)
    for module in (faults, under_load):
        monkeypatch.setattr(module, "counts_of", DeadAfter(0))
    (killed,), (loaded,) = faults.kill_cache(comparison), under_load.no_hits(comparison)
    assert killed.note == loaded.note == "not measured: refused"


def test_an_arm_that_is_started_again_is_warmed_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison, arm = one_arm(tmp_path)
    asked: list[int] = []
    monkeypatch.setattr(turns, "start_all", lambda arms: None)
    monkeypatch.setattr(turns, "complete", lambda url, prompt, *_: asked.append(len(prompt)))
    monkeypatch.setattr(turns, "reset_prefix_cache", lambda url: None)
    turns.revive(comparison, arm)
    assert asked == [4000, 4000, 512, 512]


def test_a_second_node_has_loaded_from_its_store_before_it_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison, _ = one_arm(tmp_path)
    prompts = [comparison.tokens(64) for _ in range(2)]
    asked: dict[str, list[list[int]]] = {}

    def complete(url: str, prompt: list[int], *_: object) -> Answer:
        asked.setdefault(url, []).append(prompt)
        return Answer("a", 0.1, 0.3, 5)

    monkeypatch.setattr(faults, "complete", complete)
    monkeypatch.setattr(faults, "start_all", lambda _: None)
    monkeypatch.setattr(faults, "wait_written", lambda _: None)
    counts = DeadAfter(1)
    monkeypatch.setattr(faults, "counts_of", counts)
    monkeypatch.setattr(turns, "counts_of", counts)
    row = faults.on_second_node(comparison, "kvlake", prompts)
    (_, *stored), (_, *loaded) = asked.values()
    assert stored == loaded == [stored[0], *prompts]
    assert (row.requests, row.note) == (len(prompts), UNREAD)

"""Replays: traces are read or refused, references do as published, and the engine does as a set."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import pytest

from benchmarks.replay import cost
from benchmarks.replay.__main__ import main
from benchmarks.replay.clairvoyant import ClairvoyantCache
from benchmarks.replay.contenders import NAMES, policy_ratios, reference_ratios, sidecar_ratios
from benchmarks.replay.in_sidecar import SidecarCache
from benchmarks.replay.references import REFERENCES
from benchmarks.replay.replay import PARTS, PolicyCache, bounds, leading, replay
from benchmarks.replay.traces import PromptRequest, PromptTrace, TraceError, read_trace
from tiers.policy import POLICIES
from tiers.policy.key import Left

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tiers.policy.key import CacheKey

CHUNK_TOKENS = 512


def key(name: object) -> CacheKey:
    return (1, str(name).encode().ljust(32, b"."))


def prompt(names: Sequence[object]) -> PromptRequest:
    return PromptRequest(tuple(map(key, names)), CHUNK_TOKENS * len(names))


def conversations(seed: int, requests: int = 60, *, longest: int = 12) -> PromptTrace:
    """Prompts that continue or begin like earlier ones: a chunk always follows the same chunk."""
    generator = random.Random(seed)
    chains: list[list[int]] = [[]]
    found: list[PromptRequest] = []
    chunks = 0
    for _ in range(requests):
        earlier = generator.choice(chains[-8:])
        kept = len(earlier) if generator.random() < 0.7 else generator.randint(0, len(earlier))
        new = generator.randint(not kept, 4)
        chain = [*earlier[:kept], *range(chunks, chunks + new)][:longest]
        chunks += new
        chains.append(chain)
        found.append(prompt(chain))
    return PromptTrace("conversations", CHUNK_TOKENS, found)


def write(path: Path, *lines: object) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n")
    return path


# --- traces --------------------------------------------------------------------------------------


def test_a_trace_of_mooncake(tmp_path: Path) -> None:
    path = write(
        tmp_path / "some.jsonl",
        {"timestamp": 0, "input_length": 1025, "output_length": 4, "hash_ids": [0, 7, 9]},
        "",
        {"input_length": 512, "hash_ids": [0]},
    )
    trace = read_trace(path)
    first, second = trace.requests
    assert (trace.name, trace.tokens_per_key) == ("some", 512)
    assert (first.num_tokens, second.num_tokens) == (1025, 512)
    assert first.keys[:1] == second.keys
    assert len(set(first.keys)) == 3
    assert {len(digest) for _, digest in first.keys} == {32}
    assert (trace.num_keys, trace.num_different) == (4, 3)


def test_a_trace_of_keys(tmp_path: Path) -> None:
    path = write(
        tmp_path / "own.jsonl",
        {"keys": ["a0", "b1"], "tokens_per_key": 256},
        {"keys": [], "tokens_per_key": 256},
        {"keys": ["a0", "c2"], "tokens_per_key": 256, "tokens": 300},
    )
    trace = read_trace(path)
    assert trace.tokens_per_key == 256
    assert [one.num_tokens for one in trace.requests] == [512, 300]
    assert trace.num_different == 3


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", ["JSON", '"{"', "one JSON object on each line"]),
        ("[1]", ["JSON", "[1]", "one JSON object"]),
        ({"blocks": [1]}, ["fields", '["blocks"]', "hash_ids and input_length, or keys"]),
        ({"hash_ids": 3, "input_length": 5}, ["hash_ids", "3", "a list of integers"]),
        ({"hash_ids": [1, True], "input_length": 600}, ["hash_ids[1]", "true", "integers only"]),
        ({"hash_ids": [1, 1], "input_length": 600}, ["hash_ids[1]", "1", "once"]),
        ({"hash_ids": [1]}, ["input_length", "null", "an integer from 1 on"]),
        ({"hash_ids": [1], "input_length": 513}, ["input_length", "513", "have 1 to 512"]),
        ({"hash_ids": [1, 2], "input_length": 512}, ["input_length", "512", "have 513 to 1024"]),
        ({"hash_ids": [2], "input_length": 5}, ["hash_ids[0]", '"2"', "in line 1", "all tokens"]),
        ({"keys": ["x"]}, ["tokens_per_key", "null", "an integer from 1 on"]),
        ({"keys": ["x"], "tokens_per_key": 16}, ["tokens_per_key", "16", "earlier lines have 512"]),
        ({"keys": [5], "tokens_per_key": 512}, ["keys[0]", "5", "strings only"]),
        ({"keys": ["x"], "tokens_per_key": 512, "tokens": 0}, ["tokens", "0", "have 1 to 512"]),
    ],
)
def test_a_bad_line_is_refused(tmp_path: Path, line: object, said: list[str]) -> None:
    good = {"hash_ids": [1, 2], "input_length": 1000}
    path = write(tmp_path / "bad.jsonl", good, line)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    for word in [f"{path}, line 2", *said]:
        assert word in str(caught.value)


def test_a_trace_without_prompts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no line has a prompt"):
        read_trace(write(tmp_path / "empty.jsonl", ""))


# --- references ----------------------------------------------------------------------------------


def accessed(name: str, capacity: int, blocks: Sequence[object]) -> set[object]:
    """Which of some blocks a reference has after accesses to them, one at a time."""
    cache = REFERENCES[name](capacity)
    for block in blocks:
        cache.access(key(block))
    return {block for block in blocks if key(block) in cache}


def test_lru_keeps_what_was_used_last() -> None:
    assert accessed("LRU", 2, "abac") == {"a", "c"}


def test_arc_keeps_what_was_used_twice_during_a_scan() -> None:
    assert "a" in accessed("ARC", 4, ["a", "a", *range(20)])
    assert "a" not in accessed("ARC", 4, ["a", *range(20)])


def test_arc_adapts_to_what_returns() -> None:
    # 1 leaves when 3 comes. When it returns, 2 leaves: what was used twice stays.
    assert accessed("ARC", 3, [0, 0, 1, 2, 3, 1]) == {0, 1, 3}


def test_s3_fifo_moves_what_was_used_again() -> None:
    # Two more accesses in the small queue are enough.
    assert "a" in accessed("S3-FIFO", 10, ["a", "a", "a", *range(20)])
    assert "a" not in accessed("S3-FIFO", 10, ["a", *range(20)])


def test_s3_fifo_remembers_what_it_evicted() -> None:
    # It returns to the main queue, where the scan does not reach it.
    assert "a" in accessed("S3-FIFO", 10, ["a", *range(10), "a", *range(20, 40)])


def test_sieve_spares_what_was_visited_once() -> None:
    assert accessed("SIEVE", 3, "abcad") == {"a", "c", "d"}
    assert accessed("SIEVE", 3, "abcade") == {"a", "d", "e"}


def test_tiny_lfu_admits_what_is_used_more_often() -> None:
    blocks = ["a", "a", "b", "b", "c", "d", "e"]
    assert accessed("W-TinyLFU", 3, blocks) == {"a", "b", "e"}
    assert accessed("W-TinyLFU", 3, [*blocks, "d", "d", "f"]) == {"b", "d", "f"}


@pytest.mark.parametrize("name", REFERENCES)
def test_a_reference_has_at_most_its_capacity(name: str) -> None:
    trace = conversations(1, 200)
    different = {one for request in trace.requests for one in request.keys}
    for capacity in (1, 2, 5, 11):
        cache = REFERENCES[name](capacity)
        for request in trace.requests:
            cache.serve(request)
            assert sum(one in cache for one in different) <= capacity


def test_a_hit_needs_all_chunks_before_it() -> None:
    cache = REFERENCES["LRU"](4)
    cache.serve(prompt("bc"))
    assert cache.serve(prompt("abc")) == 0
    assert cache.serve(prompt("abx")) == 2
    assert leading(prompt("ab").keys, cache) == 2


def test_the_tail_of_a_prompt_goes_first() -> None:
    cache = REFERENCES["LRU"](3)
    cache.serve(prompt("abcde"))
    assert cache.serve(prompt("abcde")) == 3


# --- clairvoyant ---------------------------------------------------------------------------------


def test_the_clairvoyant_keeps_what_is_used_soonest() -> None:
    prompts = [prompt(one) for one in ("ab", "cd", "e", "ab", "cd")]
    cache = ClairvoyantCache(prompts, 2)
    assert [cache.serve(one) for one in prompts] == [0, 0, 0, 2, 0]


def test_the_clairvoyant_gives_up_tails_first() -> None:
    prompts = [prompt(one) for one in ("abc", "d", "abc")]
    cache = ClairvoyantCache(prompts, 2)
    assert [cache.serve(one) for one in prompts] == [0, 0, 2]


@pytest.mark.parametrize("seed", range(12))
def test_nothing_has_more_hits_than_the_clairvoyant(seed: int) -> None:
    trace = conversations(seed)
    for capacity in (1, 3, 8, 20):
        best = reference_ratios("clairvoyant", trace, capacity, ["all", "first"])
        for name in NAMES:
            if name in POLICIES:
                found, _ = policy_ratios(name, trace, capacity, ["all", "first"])
            else:
                found = reference_ratios(name, trace, capacity, ["all", "first"])
            assert found["all"] <= best["all"], name
            assert found["first"] <= best["first"], name


# --- the sidecar ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
def test_the_engine_has_the_hits_of_the_policy(name: str) -> None:
    trace = conversations(3, 600, longest=30)
    for capacity in (10, 60):
        alone = replay(PolicyCache(POLICIES[name](), capacity), trace.requests)
        engine = SidecarCache(POLICIES[name](), capacity, with_store=False)
        assert replay(engine, trace.requests) == alone
        assert sum(alone.hits) > 0
        assert sum(engine.reads) == 0


def test_a_store_has_what_host_memory_lost() -> None:
    trace = conversations(4, 200)
    hits, reads, _ = sidecar_ratios("lru", trace, 16, ["all"], with_store=True)
    repeated = 1 - trace.num_different / trace.num_keys
    assert 0 < hits["all"] < repeated
    assert hits["all"] + reads["all"] == pytest.approx(repeated)


# --- what is reported ----------------------------------------------------------------------------


def test_parts_of_a_trace() -> None:
    assert [bounds(part, 5) for part in PARTS] == [(0, 2), (2, 5), (0, 5)]
    trace = conversations(5)
    found, _ = policy_ratios("lru", trace, 9, PARTS)
    hits = replay(PolicyCache(POLICIES["lru"](), 9), trace.requests)
    assert found["first"] == sum(hits.hits[:30]) / sum(hits.keys[:30])
    assert found["second"] == sum(hits.hits[30:]) / sum(hits.keys[30:])
    assert found["all"] == sum(hits.hits) / trace.num_keys


class _Hoarder:
    """A policy that keeps a thousand bytes for each key."""

    by_last_use: bool = False

    def __init__(self) -> None:
        self._kept: dict[CacheKey, bytearray] = {}

    def use(self, keys: Sequence[CacheKey], num_tokens: int) -> None: ...

    def add(
        self, key: CacheKey, parent: CacheKey | None, uses: int = 0, *, first: bool = False
    ) -> None:
        self._kept[key] = bytearray(1000)

    def remove(self, key: CacheKey, why: Left = Left.EVICTED) -> None:
        del self._kept[key]

    def admits(self, key: CacheKey, parent: CacheKey | None) -> bool:
        return True

    def victims(self) -> Iterator[CacheKey]:
        return iter(self._kept)


def test_memory_is_that_of_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "DIFFERENT_MIN", 1000)
    assert 1000 < cost.bytes_per_chunk(_Hoarder, 200) < 1500


def test_the_report_has_every_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = conversations(6)
    lines = [
        {"keys": [one.decode() for _, one in request.keys], "tokens_per_key": 512}
        for request in trace.requests
    ]
    path = write(tmp_path / "a&b.jsonl", *lines)
    places = {one: tmp_path / "made" / one for one in ("replay.json", "replay.svg")}
    arguments = [str(path), "--tokens", "4000", "9000", "--part", "first", "all", "--quick"]
    main([*arguments, "--json", str(places["replay.json"]), "--plot", str(places["replay.svg"])])
    report: dict[str, Any] = json.loads(places["replay.json"].read_text())
    assert len(report["hits"]) == 2 * 2 * len(NAMES)
    assert all(0 <= row["hit_ratio"] <= 1 for row in report["hits"])
    assert len(report["times"]) == 2 * len(POLICIES)
    assert {"cpu", "cores", "load_before", "python"} <= report["machine"].keys()
    lines_drawn = ET.fromstring(places["replay.svg"].read_text()).iter(
        "{http://www.w3.org/2000/svg}polyline"
    )
    assert len(list(lines_drawn)) == len(NAMES)
    text = capsys.readouterr().out
    for name in NAMES:
        rows = [row for row in report["hits"] if (row["policy"], row["part"]) == (name, "all")]
        cells = [f"{100 * row['hit_ratio']:.1f}" for row in rows]
        assert [name, *cells] in [line.split() for line in text.splitlines()]


def test_a_replay_repeats_the_samples_of_density(tmp_path: Path) -> None:
    """Python's hashes, by which it samples, were others in each run."""
    path = write(tmp_path / "one.jsonl", {"keys": ["a"], "tokens_per_key": 16})
    arguments = [str(path), "--tokens", "16", "--policies", "lru", "--quick", "--json"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    for seed, given in (("0", {}), ("7", {"PYTHONHASHSEED": "7"})):
        subprocess.run(
            [sys.executable, "-m", "benchmarks.replay", *arguments, str(tmp_path / seed)],
            check=True,
            capture_output=True,
            env=environment | given,
        )
        command = json.loads((tmp_path / seed).read_text())["command"]
        assert command.startswith(f"PYTHONHASHSEED={seed} python -m benchmarks.replay one.jsonl ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "TRACE"),
        (["no-such-file"], "no-such-file: No such file or directory; name a file"),
        (["{trace}", "--tokens", "5"], "--tokens 5: less than a chunk; give at least 16"),
        (["{trace}", "{trace}"], "the same name"),
        (["{trace}", "--policies", "best"], "invalid choice: 'best'"),
    ],
)
def test_bad_arguments_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    path = write(tmp_path / "one.jsonl", {"keys": ["a"], "tokens_per_key": 16})
    with pytest.raises(SystemExit) as caught:
        main([one.format(trace=path) for one in arguments])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err

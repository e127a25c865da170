"""Scenarios of many requests at once, by load tools of others; a turn is a whole run of one."""

from __future__ import annotations

import heapq
import itertools
import json
import random
from typing import TYPE_CHECKING, Any, Final

from benchmarks.compare.peers.metrics import counts_of
from benchmarks.compare.peers.rows import Row, differing
from benchmarks.compare.peers.tools import (
    Load,
    ToolFailed,
    bench_command,
    bench_load,
    finish_tool,
    guidellm_command,
    guidellm_load,
    start_tool,
)
from benchmarks.compare.peers.turns import REFERENCE, count_since, say, turn
from benchmarks.replay.workloads import WORKLOADS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from benchmarks.compare.peers.arms import Arm
    from benchmarks.compare.peers.turns import Comparison

TRACE_TOKENS: Final = 64
"""What a block of a trace, of 512 tokens, becomes here: a core computes that much less."""
TRACE_PROMPT_BLOCKS_MAX: Final = 100
TRACE_SECONDS: Final = 60
TRACE_SECONDS_QUICK: Final = 20
TRACE_ANSWER_TOKENS: Final = 16


def run_tool(comparison: Comparison, scenario: str, tool: str, options: Sequence[str]) -> list[Row]:
    """A row for each arm, with the same load."""
    rows: list[Row] = []
    loads: dict[str, Load] = {}
    # All arms get the same prompts, and a scenario none of an earlier one.
    seed = comparison.chooser.randrange(1 << 20)
    for arm in comparison.arms:
        if arm.trouble:
            rows.append(Row(scenario, arm.name, note=arm.trouble))
            continue
        with turn(arm):
            try:
                before = counts_of(arm)
                load = use_tool(comparison, arm, scenario, tool, options, seed)
            except (ToolFailed, OSError) as error:
                say(f"{scenario}, {arm.name}: {error}")
                rows.append(Row(scenario, arm.name, note=not_measured(tool, error)))
                continue
            loads[arm.name] = load
            row = load.row(scenario, arm.name)
            count_since(row, arm, before, has_process=arm.cache is not None)
        if load.texts and REFERENCE in loads:
            row.differ = differing(load.texts, loads[REFERENCE].texts)
        rows.append(row)
    return rows


def not_measured(tool: str, error: ToolFailed | OSError) -> str:
    """Why a row has no figures. What is no failure of the tool is one of our own requests."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    who = tool if isinstance(error, ToolFailed) else "not measured:"
    return " ".join([who, *dict.fromkeys((lines[0], lines[-1]))])[:200]


def use_tool(
    comparison: Comparison, arm: Arm, scenario: str, tool: str, options: Sequence[str], seed: int
) -> Load:
    """Put one load on one arm. Raises `ToolFailed`."""
    command, read = TOOLS[tool]
    result = comparison.folder / f"{scenario}-{arm.name}.json"
    log = result.with_suffix(".log")
    process = start_tool(command(arm.url, comparison.model, result, options, seed=seed), log)
    try:
        return read(finish_tool(process, log, result))
    except (KeyError, TypeError, ValueError) as error:
        raise ToolFailed(f"wrote a result that cannot be read: {error!r}") from error


TOOLS: Final[dict[str, tuple[Callable[..., list[str]], Callable[[dict[str, Any]], Load]]]] = {
    "vllm bench serve": (bench_command, bench_load),
    "guidellm": (guidellm_command, guidellm_load),
}


def prefix_options(prefixes: int, requests: int) -> list[str]:
    """Repeated prefixes, which together are larger than the engine's own cache."""
    return [
        *("--dataset-name", "prefix_repetition", "--num-prompts", str(requests)),
        *("--prefix-repetition-num-prefixes", str(prefixes)),
        *("--prefix-repetition-prefix-len", "3000", "--prefix-repetition-suffix-len", "64"),
        *("--prefix-repetition-output-len", "16", "--max-concurrency", "4"),
    ]


def prefixes(comparison: Comparison) -> list[Row]:
    """Prompts with one of several prefixes of 3,000 tokens, four at a time."""
    options = prefix_options(comparison.size(12, 8), comparison.size(60, 24))
    return run_tool(comparison, "prefixes", "vllm bench serve", options)


def no_hits(comparison: Comparison) -> list[Row]:
    """Prompts of 512 tokens that share nothing, eight at a time: what a cache costs."""
    options = [
        *("--dataset-name", "random", "--random-input-len", "512", "--random-output-len", "16"),
        *("--num-prompts", str(comparison.size(128, 48)), "--max-concurrency", "8"),
    ]
    return run_tool(comparison, "no-hits", "vllm bench serve", options)


def trace(comparison: Comparison) -> list[Row]:
    """A slice of a recorded trace, at its pace; without a file, of a made-up one."""
    count = comparison.size(150, 50)
    options = [
        *("--dataset-name", "timed_trace", "--dataset-path", str(write_slice(comparison, count))),
        *("--timed-trace-chunk-hash-size", str(TRACE_TOKENS), "--num-prompts", str(count)),
        "--self-timed",
    ]
    return run_tool(comparison, "trace", "vllm bench serve", options)


def trace_by_guidellm(comparison: Comparison) -> list[Row]:
    """The same slice, replayed by guidellm with texts of its own."""
    count = comparison.size(150, 50)
    source = {"kind": "json_file", "path": str(write_slice(comparison, count))}
    data = {"kind": "mooncake", "source": source, "hash_id_block_size": TRACE_TOKENS}
    options = [
        *("--data", json.dumps(data)),
        *("--profile", json.dumps({"kind": "replay", "schedule_turn": "timestamp"})),
        *("--constraint", json.dumps({"kind": "max_requests", "count": count})),
    ]
    return run_tool(comparison, "trace-by-guidellm", "guidellm", options)


def write_slice(comparison: Comparison, count: int) -> Path:
    """The file of the slice, in Mooncake's format."""
    path = comparison.folder / "slice.jsonl"
    entries = recorded(comparison.trace, count) if comparison.trace else made_up(count)
    entries = paced(entries, comparison.size(TRACE_SECONDS, TRACE_SECONDS_QUICK))
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def recorded(path: Path, count: int) -> list[dict[str, Any]]:
    """The first requests of a file as Mooncake publishes them."""
    entries: list[dict[str, Any]] = []
    with path.open() as lines:
        for line in itertools.islice(lines, count):
            one = json.loads(line)
            entries.append(entry_of(float(one["timestamp"]), one["hash_ids"]))
    return entries


def made_up(count: int) -> list[dict[str, Any]]:
    """Requests of the workload `chat`, which nobody recorded."""
    numbers: dict[str, int] = {}
    entries: list[dict[str, Any]] = []
    made = itertools.islice(WORKLOADS["chat"](random.Random(1)), 2 * count)
    for at, keys in heapq.nsmallest(count, made, key=lambda timed: timed[0]):
        entries.append(entry_of(at, [numbers.setdefault(key, len(numbers)) for key in keys]))
    return entries


def entry_of(timestamp: float, hash_ids: list[int]) -> dict[str, Any]:
    """One request, with shorter blocks and at most as many as a prompt may have."""
    blocks = hash_ids[:TRACE_PROMPT_BLOCKS_MAX]
    return {
        "timestamp": timestamp,
        "input_length": TRACE_TOKENS * len(blocks),
        "output_length": TRACE_ANSWER_TOKENS,
        "hash_ids": blocks,
    }


def paced(entries: list[dict[str, Any]], seconds: float) -> list[dict[str, Any]]:
    """The same requests within these seconds from 0 on, their distances in proportion."""
    first = min(entry["timestamp"] for entry in entries)
    last = max(entry["timestamp"] for entry in entries)
    scale = seconds / (last - first) if last > first else 0.0
    return [entry | {"timestamp": (entry["timestamp"] - first) * scale} for entry in entries]


def turns_with_delays(comparison: Comparison) -> list[Row]:
    """guidellm: conversations of four turns with a pause before each, four at a time."""
    data = {
        "kind": "synthetic_text",
        "prompt_tokens": 384,
        "output_tokens": 16,
        "turns": 4,
        "delay": 0.5,
        "prefix_buckets": [
            {"bucket_weight": 60, "prefix_count": 1, "prefix_tokens": 1024},
            {"bucket_weight": 40, "prefix_count": 3, "prefix_tokens": 2048},
        ],
    }
    requests = comparison.size(96, 32)
    options = [
        *("--data", json.dumps(data)),
        *("--profile", json.dumps({"kind": "concurrent", "streams": [4]})),
        *("--constraint", json.dumps({"kind": "max_requests", "count": requests})),
    ]
    return run_tool(comparison, "turns-with-delays", "guidellm", options)

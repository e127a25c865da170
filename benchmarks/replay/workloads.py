"""Made-up workloads, as traces to replay: to compare policies on what none of them was tuned on.

    python -m benchmarks.replay.workloads FOLDER [--seed 1] [--requests 12000]

Writes a file for each workload, in the format of `kvlake record`. Chunks have 512 tokens. Requests
come in the order of time; the times between them are drawn from the distributions that are named.

chat: people talk to a service with a system prompt, 8 turns on average, and read half a minute
(lognormal) between two. agents: programs call a model 30 times in a row, seconds apart, each call
longer than the one before; all share their tools. documents: questions about 400 documents of up to
120 chunks, some of them asked about far more often than others. once: prompts that share nothing
but a system prompt.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CHUNK_TOKENS: Final = 512
DOCUMENTS: Final = 400
SYSTEM_CHUNKS: Final = 2
TOOL_CHUNKS: Final = 12

Timed = tuple[float, list[str]]
"""When a prompt comes, and its chunks."""


def chat(chooser: random.Random) -> Iterator[Timed]:
    """One conversation after the other; `merged` puts their turns in order."""
    now = 0.0
    for number in itertools.count():
        now += chooser.expovariate(1 / 2)
        at, keys = now, [f"system {one}" for one in range(SYSTEM_CHUNKS)]
        for turn in range(1 + int(chooser.expovariate(1 / 8))):
            keys += [f"{number} {turn} {one}" for one in range(chooser.randint(1, 5))]
            yield at, list(keys)
            at += chooser.lognormvariate(3.4, 1.0)


def agents(chooser: random.Random) -> Iterator[Timed]:
    """One task after the other."""
    now = 0.0
    for number in itertools.count():
        now += chooser.expovariate(1 / 4)
        at, keys = now, [f"tools {one}" for one in range(TOOL_CHUNKS)]
        for step in range(1 + int(chooser.expovariate(1 / 30))):
            keys += [f"{number} {step} {one}" for one in range(chooser.randint(1, 3))]
            yield at, list(keys)
            at += chooser.lognormvariate(1.6, 0.8)


def documents(chooser: random.Random) -> Iterator[Timed]:
    """One question after the other."""
    lengths = [chooser.randint(2, 120) for _ in range(DOCUMENTS)]
    weights = [1 / (1 + number) ** 0.8 for number in range(DOCUMENTS)]
    for number in itertools.count():
        (name,) = chooser.choices(range(DOCUMENTS), weights)
        keys = ["system", *(f"{name} {one}" for one in range(lengths[name]))]
        yield float(number), [*keys, f"question {number}"]


def once(chooser: random.Random) -> Iterator[Timed]:
    """Prompts that nobody continues."""
    for number in itertools.count():
        keys = [f"system {one}" for one in range(SYSTEM_CHUNKS)]
        yield float(number), keys + [f"{number} {one}" for one in range(chooser.randint(1, 30))]


WORKLOADS: Final[dict[str, Callable[[random.Random], Iterator[Timed]]]] = {
    "chat": chat,
    "agents": agents,
    "documents": documents,
    "once": once,
}


def merged(name: str, seed: int, requests: int) -> list[list[str]]:
    """The first requests of a workload, in the order of time."""
    made = itertools.islice(WORKLOADS[name](random.Random(f"{name} {seed}")), 2 * requests)
    ordered = heapq.nsmallest(requests, made, key=lambda timed: timed[0])
    return [keys for _, keys in ordered]


def main() -> None:
    """Write all workloads."""
    parser = argparse.ArgumentParser(description="traces of made-up workloads")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=12_000)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in WORKLOADS:
        lines = (
            json.dumps({"keys": keys, "tokens_per_key": CHUNK_TOKENS}) + "\n"
            for keys in merged(name, options.seed, options.requests)
        )
        (options.folder / f"{name}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main()

"""Replay traces of prompts against eviction policies: hits, time and memory of each.

    python -m benchmarks.replay TRACE… [--tokens N …] [--policies NAME …] [--part PART …]
                                [--quick] [--json FILE] [--plot FILE] [--docs FILE]

A chunk is a hit if host memory has it and all chunks before it in the prompt. kvlake's policies run
with a set of keys and in the sidecar's own engine, whose host memory then holds slots without
bytes. They are compared with policies from publications, and with the best that is possible
(`clairvoyant.py`). `traces.py` says what a trace looks like. `density` samples by Python's hashes,
so the process runs with PYTHONHASHSEED=0 unless it is set.

Times are those of this machine at this moment; compare only numbers taken side by side.
"""

from __future__ import annotations

import argparse
import datetime as dt
import gc
import json
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.replay.contenders import (
    CLAIRVOYANT,
    NAMES,
    microseconds_of,
    policy_ratios,
    reference_ratios,
    sidecar_ratios,
)
from benchmarks.replay.cost import bytes_per_chunk
from benchmarks.replay.docs import fill
from benchmarks.replay.plot import svg
from benchmarks.replay.replay import PARTS
from benchmarks.replay.report import text_of
from benchmarks.replay.traces import PromptTrace, TraceError, read_trace
from benchmarks.run import machine
from tests import places
from tiers.policy import POLICIES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.replay.contenders import Ratios
    from benchmarks.replay.report import Report

RESULT: Final = places.ROOT / "benchmarks/results/replay.json"
SEED: Final = "PYTHONHASHSEED"


def _options(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[PromptTrace]]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.replay",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="JSON lines")
    parser.add_argument(
        "--tokens",
        nargs="+",
        type=int,
        default=[1_000_000, 3_000_000, 10_000_000],
        metavar="N",
        help="sizes of host memory, in tokens",
    )
    parser.add_argument("--policies", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument(
        "--part",
        nargs="+",
        choices=PARTS,
        default=["all"],
        help="half of the requests to count; what comes before fills the cache",
    )
    parser.add_argument(
        "--quick", action="store_true", help="neither in the sidecar's engine, nor memory"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw hit ratios, as SVG")
    parser.add_argument(
        "--docs",
        type=Path,
        metavar="FILE",
        help="also fill the section of this page, and write benchmarks/results/replay.json",
    )
    options = parser.parse_args(arguments)
    traces: list[PromptTrace] = []
    for path in options.traces:
        try:
            traces.append(read_trace(path))
        except OSError as error:
            parser.error(f"TRACE {path}: {error.strerror}; name a file of JSON lines")
        except TraceError as error:
            parser.error(str(error))
    # Folders of traces say nothing to a reader elsewhere.
    files = {str(path): path.name for path in options.traces}
    given = [files.get(one, one) for one in (sys.argv[1:] if arguments is None else arguments)]
    seed = f"{SEED}={os.environ.get(SEED, 'random')}"
    options.command = shlex.join([seed, "python", "-m", "benchmarks.replay", *given])
    names = [trace.name for trace in traces]
    if len(set(names)) < len(names):
        parser.error(f"TRACE: two files have the same name in {names}; rename one")
    least = max(trace.tokens_per_key for trace in traces)
    for tokens in options.tokens:
        if tokens < least:
            parser.error(f"--tokens {tokens}: less than a chunk; give at least {least}")
    return options, traces


def run(options: argparse.Namespace, traces: Sequence[PromptTrace]) -> Report:
    """Replay everything; returns the report."""
    report: Report = {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "machine": machine() | {"python": platform.python_version()},
        "command": options.command,
        "parts": options.part,
        "traces": [
            {
                "name": trace.name,
                "requests": len(trace.requests),
                "chunks": trace.num_keys,
                "different_chunks": trace.num_different,
                "tokens_per_chunk": trace.tokens_per_key,
            }
            for trace in traces
        ],
        "hits": [],
        "times": [],
        "memory": [],
    }
    # As the sidecar does once it is ready: what is there already is not examined again.
    gc.collect()
    gc.freeze()
    for trace in traces:
        for tokens in options.tokens:
            _say(f"{trace.name}, {tokens:,} tokens")
            _replay_all(report, options, trace, tokens)
    if not options.quick:
        own = [name for name in options.policies if name in POLICIES]
        for chunks in sorted(
            {each // trace.tokens_per_key for trace in traces for each in options.tokens}
        ):
            _say(f"memory of {chunks:,} chunks")
            for name in own:
                found = round(bytes_per_chunk(POLICIES[name], chunks), 1)
                report["memory"].append(
                    {"policy": name, "chunks": chunks, "bytes_per_chunk": found}
                )
    return report


def _replay_all(
    report: Report, options: argparse.Namespace, trace: PromptTrace, tokens: int
) -> None:
    capacity, parts = tokens // trace.tokens_per_key, options.part
    common = {"trace": trace.name, "tokens": tokens}

    def hits(
        level: str, name: str, ratios: Ratios, reads: Ratios | None = None
    ) -> Iterator[Report]:
        for part, ratio in ratios.items():
            read = {} if reads is None else {"read_ratio": round(reads[part], 5)}
            row = {"part": part, "level": level, "policy": name, "hit_ratio": round(ratio, 5)}
            yield common | row | read

    for name in options.policies:
        if name not in POLICIES:
            found = reference_ratios(name, trace, capacity, parts)
            level = "bound" if name == CLAIRVOYANT else "reference"
            report["hits"] += hits(level, name, found)
            continue
        # What an earlier replay left takes no time of this one.
        gc.collect()
        found, recorded = policy_ratios(name, trace, capacity, parts)
        microseconds = microseconds_of(name, recorded)
        report["hits"] += hits("policy", name, found)
        times = common | {"policy": name, "microseconds": round(microseconds, 3)}
        report["times"].append(times)
        if options.quick:
            continue
        served, _, decision_ms = sidecar_ratios(name, trace, capacity, parts, with_store=False)
        report["hits"] += hits("sidecar", name, served)
        times["loop_ms_p99"] = round(decision_ms, 3)
        served, read, _ = sidecar_ratios(name, trace, capacity, parts, with_store=True)
        report["hits"] += hits("store", name, served, read)


def _say(text: str) -> None:
    print(f"{text} …", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the options, replay, print."""
    options, traces = _options(arguments)
    report = run(options, traces)
    print(text_of(report))
    results = [] if options.json is None else [options.json]
    if options.docs is not None:
        fill(options.docs, report, f"../images/{options.plot.name}" if options.plot else "")
        results.append(RESULT)
    for path in results:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")
    if options.plot is not None:
        options.plot.parent.mkdir(parents=True, exist_ok=True)
        options.plot.write_text(svg(report))


if __name__ == "__main__":
    if SEED not in os.environ:
        # Python reads it at its start only.
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | {SEED: "0"})
    main()

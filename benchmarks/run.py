"""`make bench`: every benchmark in turn, one JSON report, and what was asked of each figure.

Usage: python -m benchmarks.run [--only NAME …] [--out FILE] [--docs]

Each benchmark is a program of its own that prints one JSON object. Nothing is asserted: what
falls short is printed as plainly as what holds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from benchmarks.store.bandwidth_plot import svg

if TYPE_CHECKING:
    from collections.abc import Callable

BENCHMARKS = {
    "index": "benchmarks.micro.index_bench",
    "directory": "benchmarks.micro.directory_bench",
    "scheduler": "benchmarks.micro.scheduler_bench",
    "wire": "benchmarks.micro.wire_bench",
    "segments": "benchmarks.micro.segments_bench",
    "copy": "benchmarks.micro.copy_bench",
    "copy_engines": "benchmarks.gpu.clock_bench",
    "restart": "benchmarks.micro.restart",
    "objects": "benchmarks.store.objects_bench",
    "loop": "benchmarks.store.loop_bench",
    "catalog": "benchmarks.micro.catalog_bench",
    "engine": "benchmarks.compare.engine_bench",
    "large": "benchmarks.compare.large_bench",
    "savings": "benchmarks.compare.savings_bench",
    "bandwidth": "benchmarks.store.bandwidth_bench",
}

CLEANING_SECONDS_MAX = 60
"""What a benchmark that is interrupted may take to end its servers and remove its folders."""

PICTURE = Path("ttft-by-bandwidth")
"""Plot of `bandwidth`: .svg and .json in `build/bench`; with --docs also where the docs show it."""


def _at_most(name: str, field: str, limit: float) -> tuple[str, Callable[[dict[str, Any]], bool]]:
    return f"{name}.{field} <= {limit}", lambda report: report[name][field] <= limit


def _at_least(name: str, field: str, limit: float) -> tuple[str, Callable[[dict[str, Any]], bool]]:
    return f"{name}.{field} >= {limit}", lambda report: report[name][field] >= limit


TARGETS = [
    _at_most("index", "lookup_400_p50_us", 100),
    _at_most("wire", "round_trip_p50_us", 150),
    _at_most("scheduler", "matched_tokens_miss_p99_us", 200),
    _at_most("scheduler", "allocated_p99_us", 200),
    _at_most("scheduler", "allocated_miss_p99_us", 200),
    _at_least("copy", "store_ratio", 0.85),
    _at_least("copy", "load_ratio", 0.85),
    _at_least("savings", "ratio", 0.8),
    _at_most("savings", "ratio", 1.2),
]


def run_one(module: str) -> dict[str, Any]:
    """Run a benchmark; its last line of output is its result."""
    # One thread per pool, as in the sidecar: the figures are those of one core.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    child = subprocess.Popen(
        [sys.executable, "-m", module],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        output, errors = child.communicate()
    except BaseException:
        _interrupt(child)
        raise
    if child.returncode:
        return {"error": errors[-2000:]}
    result: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return result


def _interrupt(child: subprocess.Popen[str]) -> None:
    """Let a benchmark end its servers and remove its folders, which may take much memory."""
    child.send_signal(signal.SIGINT)
    try:
        child.communicate(timeout=CLEANING_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()


def verdicts(report: dict[str, Any]) -> dict[str, bool | None]:
    """Target to whether it holds; None where it was not measured."""
    result: dict[str, bool | None] = {}
    for text, holds in TARGETS:
        try:
            result[text] = holds(report)
        except KeyError:
            result[text] = None
    for name, value in report.items():
        if isinstance(value, dict):
            result |= {f"{name}.{target}": held for target, held in value.get("holds", {}).items()}
    return result


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return {"cpu": model, "cores": os.cpu_count(), "load_before": os.getloadavg()[0]}


def draw(report: dict[str, Any], *, docs: bool) -> None:
    """Leave the picture of `bandwidth`, and its figures beside it."""
    found = report["bandwidth"]
    text = json.dumps({"machine": report["machine"], **found}, indent=1) + "\n"
    places = [(Path("build/bench"), Path("build/bench"))]
    if docs:
        places.append((Path("docs/evidence"), Path("benchmarks/results")))
    for picture, figures in places:
        picture.mkdir(parents=True, exist_ok=True)
        (picture / PICTURE.with_suffix(".svg")).write_text(svg(found))
        (figures / PICTURE.with_suffix(".json")).write_text(text)


def main() -> NoReturn:
    """Run what was asked for. Exits with 1 if a benchmark failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=sorted(BENCHMARKS), default=None)
    parser.add_argument("--out", type=Path, default=None, help="also write the report to this file")
    parser.add_argument("--docs", action="store_true", help="put the picture into docs/evidence")
    options = parser.parse_args()
    # SIGTERM is like Ctrl-C: what was begun is taken away. A shell lets what it starts in the
    # background ignore SIGINT, and the benchmarks would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    report: dict[str, Any] = {"machine": machine()}
    for name, module in BENCHMARKS.items():
        if options.only is not None and name not in options.only:
            continue
        started = time.perf_counter()
        print(f"{name} …", file=sys.stderr, flush=True)
        report[name] = run_one(module)
        print(f"{name}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    if "points" in report.get("bandwidth", {}):
        draw(report, docs=options.docs)
    report["targets"] = verdicts(report)
    text = json.dumps(report, indent=1)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")
    print(text)
    for target, held in report["targets"].items():
        word = {True: "holds", False: "FALLS SHORT", None: "not measured"}[held]
        print(f"{word:12} {target}", file=sys.stderr)
    failed = {name: one["error"] for name, one in report.items() if "error" in one}
    for name, error in failed.items():
        print(f"{name} FAILED:\n{error}", file=sys.stderr)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

"""`make compare`: kvlake beside plain vLLM, vLLM's own offloading and LMCache.

Prints a table, and where kvlake is behind; `--out` and `--docs` keep the result. Nothing is
asserted: what falls short is printed as plainly as what does not.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.compare.peers.arms import ArmFactory, releases
from benchmarks.compare.peers.docs import fill
from benchmarks.compare.peers.plot import PICTURES, svg
from benchmarks.compare.peers.processes import ENGINE_CORE, OTHER_CORE
from benchmarks.compare.peers.report import text_of
from benchmarks.compare.peers.rows import Row
from benchmarks.compare.peers.scenarios import ABOUT, QUICK, SCENARIOS
from benchmarks.compare.peers.turns import Comparison, say, start_all, turn, warm_up
from benchmarks.compare.peers.under_load import recorded
from sidecar.demo.model import write_model
from sidecar.demo.processes import POOLS
from tests import places

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.compare.peers.report import Report

PAGE: Final = places.ROOT / "docs/evidence/compare.md"
IMAGES: Final = places.ROOT / "docs/images"
RESULT: Final = places.ROOT / "benchmarks/results/compare.json"


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(prog="make compare", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=SCENARIOS, metavar="SCENARIO",
        help=f"scenarios to run: {', '.join(SCENARIOS)}",
    )  # fmt: skip
    parser.add_argument(
        "--arms", nargs="+", choices=ArmFactory.NAMES, metavar="ARM", default=ArmFactory.NAMES,
        help=f"arms to run: {', '.join(ArmFactory.NAMES)}",
    )  # fmt: skip
    parser.add_argument(
        "--quick", action="store_true",
        help=f"fewer requests; without --only, of {', '.join(QUICK)}",
    )  # fmt: skip
    parser.add_argument("--trace", type=Path, help="a trace as Mooncake publishes them")
    parser.add_argument("--out", type=Path, help="also write the report to this file")
    parser.add_argument("--docs", action="store_true", help="fill docs/evidence/compare.md")
    options = parser.parse_args(given)
    if options.trace is not None:
        try:
            recorded(options.trace, 2)
        except OSError as error:
            parser.error(f"--trace {options.trace}: {error.strerror}; name a file of JSON lines")
        except (ValueError, KeyError, TypeError) as error:
            parser.error(
                f"--trace {options.trace}: {error!r}; each line must be an object with timestamp "
                "and hash_ids, as in Mooncake's traces"
            )
    if options.docs and (options.only or options.arms != ArmFactory.NAMES):
        parser.error(
            "--docs fills a page about all scenarios and arms; leave --only and --arms out"
        )
    if not {ENGINE_CORE, OTHER_CORE} <= (cores := os.sched_getaffinity(0)):
        parser.error(
            f"the comparison needs cores {ENGINE_CORE} and {OTHER_CORE}, and this process may use "
            f"{sorted(cores)}; start it without taskset, on a machine with two cores"
        )
    return options


def run(options: argparse.Namespace, folder: Path) -> Report:
    """Start the arms, run the scenarios, end the arms."""
    load, began = os.getloadavg()[0], time.monotonic()
    model = write_model(folder / "model")
    factory = ArmFactory(folder, model)
    arms = [factory.make(name) for name in options.arms]
    comparison = Comparison(
        arms, factory, folder, model, options.quick, options.trace, random.Random(20)
    )
    rows: list[Row] = []
    try:
        say(f"starting {', '.join(options.arms)}")
        start_all(arms)
        for arm in comparison.active:
            with turn(arm):
                warm_up(comparison, arm)
        chosen = options.only or (QUICK if options.quick else SCENARIOS)
        for name in (name for name in SCENARIOS if name in chosen):
            since = time.monotonic()
            found = scenario(comparison, name)
            rows += found
            # A run that is ended early has shown what it measured.
            for row in found:
                say(json.dumps(row.as_dict()))
            say(f"{name}: {time.monotonic() - since:.0f} s")
    finally:
        for arm in arms:
            arm.end()
    return {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "machine": machine(load),
        "releases": releases(),
        "command": command(options),
        "quick": options.quick,
        "trace": options.trace.name if options.trace else "made up",
        "seconds": round(time.monotonic() - began),
        "arms": {arm.name: {"title": arm.title, "cache": arm.cache_note} for arm in arms},
        "scenarios": ABOUT,
        "rows": [row.as_dict() for row in rows],
    }


def scenario(comparison: Comparison, name: str) -> list[Row]:
    """Rows of a scenario; one that fails as a whole says so for each arm."""
    watched = [arm for arm in comparison.arms if arm.degraded]
    before = {arm.name: arm.engine.count_in_log(arm.degraded) for arm in watched}
    try:
        rows = SCENARIOS[name](comparison)
    except Exception as error:
        say(traceback.format_exc())
        return [Row(name, arm.name, note=f"failed: {error!r}"[:200]) for arm in comparison.arms]
    for arm in watched:
        if (times := arm.engine.count_in_log(arm.degraded) - before[arm.name]) > 0:
            for row in (row for row in rows if row.arm == arm.name):
                logged = f'its engine logged "{arm.degraded}" {times} times'
                row.note = f"{row.note}; {logged}" if row.note else logged
    return rows


def command(options: argparse.Namespace) -> str:
    """The command that repeats this run."""
    given: list[str] = []
    if options.only:
        given += ["--only", *options.only]
    if options.arms != ArmFactory.NAMES:
        given += ["--arms", *options.arms]
    if options.quick:
        given.append("--quick")
    if options.trace:
        given += ["--trace", options.trace.name]
    return "make compare" + (f" COMPARE_ARGS='{' '.join(given)}'" if given else "")


def machine(load: float) -> dict[str, Any]:
    """What the figures were measured on."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "load_before": load,
    }


def keep(report: Report, folder: Path, *, docs: bool) -> None:
    """Write the pictures to a folder; with `docs` also page, pictures and report of the clone."""
    drawn = {name: svg(report, *what) for name, what in PICTURES.items()}
    places_of = [folder, IMAGES] if docs else [folder]
    for where in places_of:
        where.mkdir(parents=True, exist_ok=True)
        for name, picture in drawn.items():
            (where / name).write_text(picture)
    if docs:
        RESULT.write_text(json.dumps(report, indent=1) + "\n")
        fill(PAGE, report, {what[1]: f"../images/{name}" for name, what in PICTURES.items()})


def leave(number: int, _frame: object) -> None:
    """End as after a signal, through all `finally`."""
    sys.exit(128 + number)


def main() -> None:
    """Parse, measure, print."""
    options = arguments()
    # SIGTERM is like Ctrl-C: what was begun is taken away.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, leave)
    folder = Path(tempfile.mkdtemp(prefix="kvlake-compare-", dir=POOLS))
    build = places.ROOT / "build/compare"
    try:
        report = run(options, folder)
    finally:
        # Logs and results of the tools stay, to look at.
        left = shutil.ignore_patterns("model", "run", "store-*")
        shutil.copytree(folder, build, dirs_exist_ok=True, ignore=left)
        shutil.rmtree(folder)
    keep(report, build, docs=options.docs)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(text_of(report))


if __name__ == "__main__":
    main()

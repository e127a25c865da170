"""`make gpu-bench`: what the copies of a GPU's memory reach and cost on this machine.

    python -m benchmarks.gpu.run [--only PART …] [--out FOLDER] [--seconds 540]

Prints every figure beside what was asked of it, those that fall short as plainly as the others,
and leaves them as JSON with the device's name and in docs/evidence/performance.md. Ends with 0 if
all was measured, 1 if a part could not be, 2 where it cannot run here.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu.figures import PAGE, RESULTS, Figure, Missing, put_into, write
from tests.gpu.child import ChildError
from tests.gpu.real.preflight import CANNOT_RUN, CannotRun, look_from_outside

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.gpu.parts import Bench


def measure(
    bench: Bench, parts: Sequence[str], seconds_max: float
) -> tuple[list[Figure], list[Missing]]:
    """Every part in turn. One that fails is told as missing, and the others go on."""
    figures: list[Figure] = []
    missing: list[Missing] = []
    begun = time.monotonic()
    for name in parts:
        if time.monotonic() - begun > seconds_max:
            missing.append(Missing(name, f"no time was left of {seconds_max:.0f} s"))
            continue
        started = time.monotonic()
        try:
            found = bench.run(name)
        except (ChildError, AssertionError, OSError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[-1] if str(error).strip() else repr(error)
            missing.append(Missing(name, reason))
            print(f"NOT MEASURED {name}: {error}", flush=True)
            continue
        figures += found
        for one in found:
            beside = f" ({one.beside})" if one.beside else ""
            asked = f"asked {one.asked}" if one.asked else ""
            print(f"{one.verdict:12} {one.part}: {one.name}: {one.shown} {asked}{beside}")
        print(f"-- {name}: {time.monotonic() - started:.0f} s", flush=True)
    return figures, missing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", metavar="PART", default=None)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--seconds", type=float, default=540.0, help="begin no part after so long")
    options = parser.parse_args()
    try:
        device = look_from_outside()
    except CannotRun as error:
        print(f"gpu-bench cannot run here: {error}", file=sys.stderr)
        return CANNOT_RUN
    # Here: where a package is missing, what was said above is better to read than a traceback.
    from benchmarks.gpu.effort import FULL
    from benchmarks.gpu.parts import PARTS, Bench
    from tests.gpu.real.world import Gpu

    bench = Bench(Gpu(), FULL)
    if unknown := sorted(set(options.only or ()) - set(PARTS)):
        parser.error(f"--only {' '.join(unknown)}: the parts are {', '.join(PARTS)}")
    print(f"{device.name}, driver {device.driver_version}, torch {device.torch}", flush=True)
    with bench:
        figures, missing = measure(bench, options.only or PARTS, options.seconds)
    if options.only:
        print("only some parts ran: the results are not kept")
    else:
        path = write(options.out, device, figures, missing, real=bench.place.real)
        print(f"written to {path}")
        if options.out == RESULTS:
            put_into(PAGE, RESULTS)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())

"""`make gpu-test`: the cases on this machine's GPU, and what came of them as JSON.

    python -m tests.gpu.real.run [--out FOLDER] [-k EXPRESSION]

Ends with 0 if every case holds or is skipped, 1 if one does not hold, 2 where they cannot run here.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.figures import PAGE, RESULTS, put_into, verdict
from tests.gpu.real.preflight import CANNOT_RUN, CannotRun, Device, look_from_outside

SUITE: Final = "tests/gpu/real/on_gpu.py"


def outcomes(report: Path) -> dict[str, dict[str, Any]]:
    """Case to what came of it, from pytest's report."""
    found: dict[str, dict[str, Any]] = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        name = str(case.get("name")).partition("[")[2].rstrip("]")
        said = [one.get("value") for one in case.iter("property") if one.get("name") == "said"]
        bad = [one for one in case if one.tag in ("failure", "error", "skipped")]
        found[name] = {
            "holds": not bad,
            "skipped": any(one.tag == "skipped" for one in bad),
            "seconds": round(float(case.get("time") or 0), 1),
            "said": said[0] if said else "",
            "reason": str(bad[0].get("message"))[:2000] if bad else "",
        }
    return found


def write(folder: Path, device: Device, found: dict[str, dict[str, Any]]) -> Path:
    """Leave the results; returns where."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"gpu-test-{device.slug}.json"
    path.write_text(json.dumps({"device": asdict(device), "cases": found}, indent=1) + "\n")
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("-k", default="", help="only these cases, as pytest's -k")
    options = parser.parse_args()
    try:
        device = look_from_outside()
    except CannotRun as error:
        print(f"gpu-test cannot run here: {error}", file=sys.stderr)
        return CANNOT_RUN
    print(f"{device.name}, driver {device.driver_version}, torch {device.torch}", flush=True)
    report = Path("build/gpu/tests.xml")
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    # Without the project's own settings: what they ask of pytest, its plugins and other people's
    # warnings is not what this is about, and the releases here are not those of `make setup`.
    settings = ["-c", os.devnull, "--rootdir=.", "--import-mode=importlib"]
    command = [sys.executable, "-m", "pytest", SUITE, "-m", "gpu", "-v", *settings]
    done = subprocess.run(
        [*command, f"--junitxml={report}", *(["-k", options.k] if options.k else [])], check=False
    )
    if not report.exists():
        print(f"gpu-test: pytest ended with {done.returncode} and no report", file=sys.stderr)
        return 1
    found = outcomes(report)
    for case, result in found.items():
        about = result["said"] or result["reason"]
        print(f"{verdict(result):7} {case} ({result['seconds']} s): {about}")
    if options.k:
        print("only some cases ran: the results are not kept")
    else:
        print(f"written to {write(options.out, device, found)}")
        if options.out == RESULTS:
            put_into(PAGE, RESULTS)
    return 0 if found and all(verdict(result) != "FAILS" for result in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

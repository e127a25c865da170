"""Coverage-guided fuzzing of every target, for `make fuzz`.

    python -m tests.fuzz.run --minutes 10 [--target NAME]... [--grow]

Owns the campaign: one process per target (atheris, which is libFuzzer for Python), its share of
the time, the findings, and growing the committed corpus. Does not own targets or mutations.

Invariants: every input that is tried comes from the corpus, the target's own mutations or
libFuzzer's; a finding is written down as a file that `tests/fuzz/test_targets.py` replays once it
is put in the corpus; the exit code is 0 only if no target found anything.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any, Final

from tests.fuzz.mutation import INPUT_BYTES_MAX
from tests.fuzz.targets import CORPUS, TARGETS, Target

LIVE: Final = "live"
"""Not a target: a sidecar of its own that is attacked over its sockets (`live.py`)."""
FINDINGS: Final = Path("fuzz-findings")
INPUT_SECONDS_MAX: Final = 20
MEMORY_MEGABYTES_MAX: Final = 2048
CORPUS_INPUTS_MAX: Final = 24
CORPUS_INPUT_BYTES_MAX: Final = 8192
SECONDS_MIN: Final = 5
GRACE_SECONDS: Final = 120
GROW_INPUTS_MAX: Final = 500


def main() -> int:
    """Run the campaign; 1 if anything was found."""
    parser = argparse.ArgumentParser(description="Fuzz kvlake, guided by coverage.")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all targets together")
    parser.add_argument(
        "--target", action="append", choices=[*TARGETS, LIVE], help="default: every one"
    )
    parser.add_argument("--grow", action="store_true", help="put the smallest new inputs in corpus")
    given = parser.parse_args()
    names = given.target or [*TARGETS, LIVE]
    seconds = max(SECONDS_MIN, round(given.minutes * 60 / len(names)))
    found = [
        name
        for name in names
        if not (_attack(seconds) if name == LIVE else _campaign(name, seconds, grow=given.grow))
    ]
    for name in found:
        where = f"inputs are in {FINDINGS}, put them in {CORPUS / name}"
        print(f"{name}: FOUND something" + ("" if name == LIVE else f"; {where}"))
    print(f"fuzz: {len(names)} targets, {seconds} s each, {len(found)} with findings")
    return 1 if found else 0


def _campaign(name: str, seconds: int, *, grow: bool) -> bool:
    """Fuzz one target in a process of its own. False if something was found."""
    FINDINGS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"fuzz-{name}-") as folder:
        work = Path(folder)
        for number, data in enumerate(TARGETS[name].corpus()):
            (work / f"seed-{number}").write_bytes(data)
        ended = _libfuzzer(
            name,
            f"-max_total_time={seconds}",
            f"-timeout={INPUT_SECONDS_MAX}",
            f"-rss_limit_mb={MEMORY_MEGABYTES_MAX}",
            f"-max_len={INPUT_BYTES_MAX}",
            f"-artifact_prefix={FINDINGS}/{name}-",
            str(work),
            seconds_max=seconds + GRACE_SECONDS,
        )
        summary = [line for line in ended.stderr.splitlines() if "DONE" in line or "ERROR" in line]
        print(f"{name}: {summary[-1] if summary else ended.stderr[-2000:]}")
        if ended.returncode:
            print(ended.stderr[-3000:])
        elif grow:
            _grow(name, work)
        return ended.returncode == 0


def _attack(seconds: int) -> bool:
    """Attack a live sidecar. False if something was found."""
    command = [sys.executable, "-m", "tests.fuzz.live", "--minutes", str(seconds / 60)]
    return subprocess.run(command, timeout=seconds + GRACE_SECONDS, check=False).returncode == 0


def _libfuzzer(name: str, *arguments: str, seconds_max: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.fuzz.guided", name, *arguments],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=seconds_max,
        check=False,
    )


def _grow(name: str, work: Path) -> None:
    """Keep inputs that reach lines which nothing kept so far does, smallest first, few of them."""
    target = TARGETS[name]
    kept = CORPUS / name
    reached: set[tuple[str, int]] = set()
    for data in target.corpus():
        reached |= _lines(target, data)
    found = [path.read_bytes() for path in work.iterdir() if not path.name.startswith("seed-")]
    for data in sorted(found, key=len)[:GROW_INPUTS_MAX]:
        if len(data) > CORPUS_INPUT_BYTES_MAX or len(target.files()) >= CORPUS_INPUTS_MAX:
            break
        new = _lines(target, data) - reached
        if new:
            reached |= new
            kept.mkdir(parents=True, exist_ok=True)
            (kept / hashlib.sha256(data).hexdigest()[:12]).write_bytes(data)


def _lines(target: Target, data: bytes) -> set[tuple[str, int]]:
    """Which lines of the code under test an input reaches."""
    reached: set[tuple[str, int]] = set()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        path = frame.f_code.co_filename
        if not any(part in path for part in ("/sidecar/", "/tiers/", "/yaml/")):
            return None
        if event == "line":
            reached.add((path, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        target.feed(data)
    finally:
        sys.settrace(before)
    return reached


if __name__ == "__main__":
    sys.exit(main())

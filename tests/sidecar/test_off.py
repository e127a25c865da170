"""What is kept for operators can be switched off: nothing is kept, and every face says so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sidecar.cli import main
from sidecar.cli.fleet import Seen
from sidecar.cli.top import View, frame
from sidecar.config.sections import LimitsSettings
from sidecar.observe.off import switched_off
from sidecar.protocol import Outcome
from sidecar.protocol.prompts import PromptOutcome, PromptRecord, Prompts
from tests.sidecar.client import RunningSidecar, Scheduler, Worker, config_in, key_of

pytestmark = pytest.mark.promise("prompt-tokens")

SETTINGS = ("gone_keys_max", "prompts_kept", "transfers_kept", "curve_keys_max", "history_seconds")
FAMILY = "kvlake_expected_hit_ratio"


@pytest.fixture
def sidecar(short_directory: Path) -> Iterator[RunningSidecar]:
    """One that keeps nothing, after more chunks than fit, a load and a prompt."""
    limits = dict.fromkeys(SETTINGS, 0)
    with (
        RunningSidecar(config_in(short_directory, limits=limits)) as sidecar,
        Scheduler(sidecar.path) as scheduler,
        Worker(sidecar.path) as worker,
    ):
        keys = [key_of("prompt", number) for number in range(2)]
        for _ in range(3):
            scheduler.use(*keys, num_tokens=128)
        for number, key in enumerate(keys):
            assert worker.store(number, key, range(4)) is Outcome.OK
        scheduler.lease(5, keys)
        assert worker.load(5, keys[0], range(4)) is Outcome.OK
        tokens = {PromptOutcome.HOST: 64, PromptOutcome.NEW: 64}
        scheduler.send(Prompts(scheduler.epoch, [PromptRecord("cmpl-1", tokens, bytes(32), 64)]))
        sidecar.wait_until(lambda now: now["prompts"]["prompts"] == 1)
        yield sidecar


def test_nothing_is_kept_and_the_documents_say_so(sidecar: RunningSidecar) -> None:
    status = sidecar.status()
    assert set(status["off"]) == set(SETTINGS)
    assert all(f"limits.{name} is 0; set" in text for name, text in status["off"].items())
    assert status["prompts"]["tokens"] == {"host": 64, "new": 64}, "tokens are counted still"
    assert status["rates"]["bytes_per_second"]["loaded"] > 0
    for path, name, setting in (
        ("/prompts", "prompts", "prompts_kept"),
        ("/transfers", "transfers", "transfers_kept"),
        ("/uses", "uses", "prompts_kept"),
        ("/history", "seconds", "history_seconds"),
    ):
        document = json.loads(sidecar.get(path))
        assert (document[name], document["off"]) == ([], status["off"][setting])


def test_the_metric_is_left_out(sidecar: RunningSidecar, short_directory: Path) -> None:
    assert sidecar.status()["tiers"]["host"]["expected_hit_ratio"] == {}
    text = sidecar.get("/metrics").decode()
    assert FAMILY not in text
    assert "kvlake_prompts_total 1.0" in text
    other = short_directory / "other"
    other.mkdir()
    with RunningSidecar(config_in(other)) as usual:
        assert f"# TYPE {FAMILY} gauge" in usual.get("/metrics").decode()
        assert usual.status()["off"] == {}
        assert "off" not in json.loads(usual.get("/transfers"))


def test_each_setting_names_itself() -> None:
    for name in SETTINGS:
        document: dict[str, Any] = {name: 0}
        ((told, text),) = switched_off(LimitsSettings(**document)).items()
        default = LimitsSettings.model_fields[name].default
        assert told == name
        assert text.endswith(
            f"limits.{name} is 0; set it to {default:g} or another number, and restart the sidecar"
        )


def test_the_commands_say_so(
    sidecar: RunningSidecar, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    url = ["--url", sidecar.info.http_url]
    assert main(["status", *url]) == 0
    shown = capsys.readouterr().out
    assert all(text in shown for text in sidecar.status()["off"].values())
    assert main(["explain", *url]) == 0
    assert "limits.prompts_kept is 0" in capsys.readouterr().out
    assert main(["record", str(tmp_path / "prompts"), *url]) != 0
    assert "limits.prompts_kept is 0" in capsys.readouterr().err
    assert not (tmp_path / "prompts").exists()
    status = sidecar.status()
    shown = drawn(status, "3")
    assert all(text in shown for text in status["off"].values())
    status["prompts"]["last"]["1h"] |= {"seconds": 62.0, "cut": True}
    assert drawn(status, "1").splitlines()[2].split()[-8:-5] == ["10s", "1min", "1m2s"]


def drawn(status: dict[str, Any], page: str) -> str:
    """What `kvlake top` draws."""
    console = Console(width=200)
    with console.capture() as captured:
        console.print(frame([Seen("", status)], View(page=page)))
    return captured.get()

"""A sidecar under attack goes on serving."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.live import campaign

pytestmark = pytest.mark.promise("fuzz-live")

SEED = 7
ATTACKS = 600
SECONDS_MAX = 60.0


def test_a_sidecar_under_attack_serves_others(short_directory: Path) -> None:
    counted = campaign(short_directory / "live", SEED, seconds_max=SECONDS_MAX, attacks_max=ATTACKS)
    # That the attacks were attacks: some were let in, some were not.
    assert counted["attached"] > 10, counted
    assert counted["refused"] > 50, counted
    assert counted["frames_refused"] > 100, counted

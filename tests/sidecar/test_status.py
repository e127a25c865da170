"""The status document: rates of the last minute, and that memory does not grow."""

from __future__ import annotations

from typing import Any

import pytest

from sidecar.config.store import PriceSettings
from sidecar.core.commands import Counters
from sidecar.observe.status import (
    GIGABYTE,
    MONTH_SECONDS,
    SAMPLE_SECONDS,
    WINDOW_SECONDS,
    Rates,
    monthly,
)
from tiers.store.middleware import Billed
from tiers.store.object_tier import UrlObjects


class World:
    def __init__(self) -> None:
        self.counters = Counters()
        self.now = 1000.0
        self.rates = Rates(self.counters, lambda: self.now)

    def go_on(self, seconds: float, **num_bytes: int) -> None:
        """Half a second at a time, as the watchdog beats."""
        for _ in range(int(seconds * 2)):
            self.now += 0.5
            for way, amount in num_bytes.items():
                counted = getattr(self.counters, f"bytes_{way}")
                setattr(self.counters, f"bytes_{way}", counted + amount // 2)
            self.rates.sample()

    def document(self) -> dict[str, Any]:
        return self.rates.document()


def test_only_the_last_minute_counts() -> None:
    world = World()
    world.go_on(3600, stored=1 << 20)
    world.go_on(600)
    assert world.document()["bytes_per_second"]["stored"] == 0
    world.go_on(600, loaded=1000, read=10)
    told = world.document()
    assert told["bytes_per_second"] == {"stored": 0, "loaded": 1000, "written": 0, "read": 10}
    assert WINDOW_SECONDS <= told["seconds"] <= WINDOW_SECONDS + SAMPLE_SECONDS


def test_a_sidecar_that_has_just_started_says_over_how_long_it_counts() -> None:
    world = World()
    assert world.document()["bytes_per_second"] == dict.fromkeys(
        ("stored", "loaded", "written", "read"), 0
    )
    world.go_on(12, written=2000)
    told = world.document()
    assert told["seconds"] == 12
    assert told["bytes_per_second"]["written"] == pytest.approx(2000)


def test_memory_is_fixed_and_asking_changes_nothing() -> None:
    world = World()
    world.go_on(36_000, stored=2)
    kept = list(world.rates._samples)  # noqa: SLF001 (how much is kept has no public name)
    assert len(kept) == 1 + WINDOW_SECONDS / SAMPLE_SECONDS
    assert world.document() == world.document()
    assert list(world.rates._samples) == kept  # noqa: SLF001


def test_a_month_is_extrapolated() -> None:
    billed = Billed(UrlObjects("memory://bill"))
    billed.requests.update({"put": 1000, "get": 5000})
    billed.num_bytes.update({"get": GIGABYTE})
    prices = PriceSettings(list=1.0, get=0.5, put=2.0, gb_month=0.1, gb_read=3.0)
    items = monthly(prices, billed, stored_bytes=20 * GIGABYTE, seconds=MONTH_SECONDS / 2)
    assert (items["put_requests"], items["get_requests"]) == (4.0, 5.0)
    assert (items["read"], items["stored"], items["total"]) == (6.0, 2.0, 17.0)
    unused = Billed(UrlObjects("memory://bill"))
    assert monthly(prices, unused, stored_bytes=0, seconds=0.0)["total"] == 0.0

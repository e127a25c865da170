"""The status document: what a month costs."""

from __future__ import annotations

from sidecar.config.store import PriceSettings
from sidecar.observe.status import GIGABYTE, MONTH_SECONDS, monthly
from tiers.store.middleware import Billed
from tiers.store.object_tier import UrlObjects


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

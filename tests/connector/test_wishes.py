"""What a request's `kv_transfer_params` are taken for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from connector.request_params import NOTHING, OF_THE_CONNECTOR, Wishes, WishReader


def wishes_of(params: Any) -> Wishes:
    return WishReader().wishes_of(SimpleNamespace(kv_transfer_params=params))


@pytest.mark.parametrize("params", [None, {}, {"kvlake": {}}, {"do_remote_decode": True}, "odd"])
def test_who_says_nothing_gets_everything(params: Any) -> None:
    assert wishes_of(params) == Wishes()


@pytest.mark.parametrize(
    ("given", "wishes"),
    [
        ({"read": True, "write": True}, Wishes()),
        ({"read": False}, Wishes(reads=False)),
        ({"write": False}, Wishes(writes=False)),
        ({"read": "host"}, Wishes(asks_store=False)),
        ({"write": "host"}, Wishes(stays=True)),
        ({"ttl_seconds": 1.5, "pin_seconds": 60}, Wishes(ttl_ms=1500, pin_ms=60_000)),
        ({"ttl_seconds": 0.0001}, Wishes(ttl_ms=1)),
        ({"hand_over": True}, Wishes(hand_over=True)),
        ({"expect_tokens": 64}, Wishes(expects_tokens=64)),
        (
            {"expect_tokens": 64, "wait_seconds": 1.5},
            Wishes(expects_tokens=64, wait_ms=1500),
        ),
        ({"wait_seconds": 0}, Wishes(wait_ms=0)),
    ],
)
def test_each_word(given: dict[str, Any], wishes: Wishes) -> None:
    assert wishes_of({"kvlake": given}) == wishes


@pytest.mark.parametrize(
    ("given", "in_vain"),
    [
        ({"pin_seconds": 60}, "pin_seconds"),
        ({"hand_over": True, "ttl_seconds": 60}, "hand_over"),
        ({"expect_tokens": 64, "wait_seconds": 1}, "expect_tokens, wait_seconds"),
        ({"hand_over": False, "expect_tokens": 0, "wait_seconds": 0}, ""),
        ({"read": "host", "write": "host", "ttl_seconds": 60}, ""),
        ({}, ""),
    ],
)
def test_what_cannot_be_done_is_told_once(
    given: dict[str, Any], in_vain: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And costs nothing of what can."""
    reader = WishReader(cannot=OF_THE_CONNECTOR)
    for _ in range(2):
        request = SimpleNamespace(kv_transfer_params={"kvlake": given})
        assert reader.wishes_of(request) == wishes_of({"kvlake": given})
    assert caplog.text.count("in vain") == bool(in_vain)
    assert f"asks in vain for {in_vain}" in caplog.text or not in_vain


@pytest.mark.promise("malformed-params")
@pytest.mark.parametrize(
    ("given", "wishes"),
    [
        (None, NOTHING),
        ("no", NOTHING),
        ({"raed": False}, NOTHING),
        ({"read": True, "tier": "gpu"}, NOTHING),
        ({"read": "store"}, Wishes(reads=False)),
        ({"read": 1}, Wishes(reads=False)),
        ({"read": []}, Wishes(reads=False)),
        ({"write": "gpu"}, Wishes(writes=False)),
        ({"ttl_seconds": 0}, Wishes(writes=False)),
        ({"ttl_seconds": -1}, Wishes(writes=False)),
        ({"ttl_seconds": True}, Wishes(writes=False)),
        ({"ttl_seconds": "60"}, Wishes(writes=False)),
        ({"ttl_seconds": float("nan")}, Wishes(writes=False)),
        ({"ttl_seconds": 1e12}, Wishes(writes=False)),
        ({"pin_seconds": 0}, Wishes()),
        ({"hand_over": 1}, Wishes()),
        ({"expect_tokens": -1}, Wishes()),
        ({"expect_tokens": True}, Wishes()),
        ({"expect_tokens": "64"}, Wishes()),
        ({"expect_tokens": 64, "wait_seconds": 61}, Wishes(wait_ms=0)),
        ({"expect_tokens": 64, "wait_seconds": "1"}, Wishes(wait_ms=0)),
        ({"pin_seconds": float("inf")}, Wishes()),
        ({"pin_seconds": 1e6, "write": "host"}, Wishes(stays=True)),
    ],
)
def test_what_is_not_understood_is_taken_as_less(
    given: Any, wishes: Wishes, caplog: pytest.LogCaptureFixture
) -> None:
    reader = WishReader()
    for _ in range(2):
        request = SimpleNamespace(kv_transfer_params={"kvlake": given})
        assert reader.wishes_of(request) == wishes
    assert caplog.text.count("is not understood") == 1

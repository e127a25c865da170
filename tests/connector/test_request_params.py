"""How the parameters of a request are read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from connector.request_params import CONNECTOR_ONLY, NOTHING, RequestParams, RequestParamsReader


def params_of(params: Any) -> RequestParams:
    return RequestParamsReader().read(SimpleNamespace(kv_transfer_params=params))


@pytest.mark.parametrize("params", [None, {}, {"kvlake": {}}, {"do_remote_decode": True}, "odd"])
def test_the_defaults_are_full_caching(params: Any) -> None:
    assert params_of(params) == RequestParams()


@pytest.mark.parametrize(
    ("given", "request_params"),
    [
        ({"read": True, "write": True}, RequestParams()),
        ({"read": False}, RequestParams(reads=False)),
        ({"write": False}, RequestParams(writes=False)),
        ({"read": "host"}, RequestParams(asks_store=False)),
        ({"write": "host"}, RequestParams(stays=True)),
        ({"ttl_seconds": 1.5, "pin_seconds": 60}, RequestParams(ttl_ms=1500, pin_ms=60_000)),
        ({"ttl_seconds": 0.0001}, RequestParams(ttl_ms=1)),
        ({"hand_over": True}, RequestParams(hand_over=True)),
        ({"expect_tokens": 64}, RequestParams(expects_tokens=64)),
        (
            {"expect_tokens": 64, "wait_seconds": 1.5},
            RequestParams(expects_tokens=64, wait_ms=1500),
        ),
        ({"wait_seconds": 0}, RequestParams(wait_ms=0)),
    ],
)
def test_each_parameter(given: dict[str, Any], request_params: RequestParams) -> None:
    assert params_of({"kvlake": given}) == request_params


@pytest.mark.parametrize(
    ("given", "ignored"),
    [
        ({"pin_seconds": 60}, "pin_seconds"),
        ({"hand_over": True, "ttl_seconds": 60}, "hand_over"),
        ({"expect_tokens": 64, "wait_seconds": 1}, "expect_tokens, wait_seconds"),
        ({"hand_over": False, "expect_tokens": 0, "wait_seconds": 0}, ""),
        ({"read": "host", "write": "host", "ttl_seconds": 60}, ""),
        ({}, ""),
    ],
)
def test_an_unsupported_parameter_is_logged_once(
    given: dict[str, Any], ignored: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The others hold."""
    reader = RequestParamsReader(unsupported=CONNECTOR_ONLY)
    for _ in range(2):
        request = SimpleNamespace(kv_transfer_params={"kvlake": given})
        assert reader.read(request) == params_of({"kvlake": given})
    assert caplog.text.count("is ignored") == bool(ignored)
    assert f"{ignored} is ignored" in caplog.text or not ignored


@pytest.mark.promise("malformed-params")
@pytest.mark.parametrize(
    ("given", "request_params"),
    [
        (None, NOTHING),
        ("no", NOTHING),
        ({"raed": False}, NOTHING),
        ({"read": True, "tier": "gpu"}, NOTHING),
        ({"read": "store"}, RequestParams(reads=False)),
        ({"read": 1}, RequestParams(reads=False)),
        ({"read": []}, RequestParams(reads=False)),
        ({"write": "gpu"}, RequestParams(writes=False)),
        ({"ttl_seconds": 0}, RequestParams(writes=False)),
        ({"ttl_seconds": -1}, RequestParams(writes=False)),
        ({"ttl_seconds": True}, RequestParams(writes=False)),
        ({"ttl_seconds": "60"}, RequestParams(writes=False)),
        ({"ttl_seconds": float("nan")}, RequestParams(writes=False)),
        ({"ttl_seconds": 1e12}, RequestParams(writes=False)),
        ({"pin_seconds": 0}, RequestParams()),
        ({"hand_over": 1}, RequestParams()),
        ({"expect_tokens": -1}, RequestParams()),
        ({"expect_tokens": True}, RequestParams()),
        ({"expect_tokens": "64"}, RequestParams()),
        ({"expect_tokens": 64, "wait_seconds": 61}, RequestParams(wait_ms=0)),
        ({"expect_tokens": 64, "wait_seconds": "1"}, RequestParams(wait_ms=0)),
        ({"pin_seconds": float("inf")}, RequestParams()),
        ({"pin_seconds": 1e6, "write": "host"}, RequestParams(stays=True)),
    ],
)
def test_what_is_not_understood_means_less_caching(
    given: Any, request_params: RequestParams, caplog: pytest.LogCaptureFixture
) -> None:
    reader = RequestParamsReader()
    for _ in range(2):
        request = SimpleNamespace(kv_transfer_params={"kvlake": given})
        assert reader.read(request) == request_params
    assert caplog.text.count("is not understood") == 1

"""What one request asks of the cache: `kv_transfer_params={"kvlake": {...}}`.

Owns the words and what they mean. Does not own what is done about them (`scheduler.py`), nor the
operator's limits.

Invariant: whoever asks for something that is not understood gets less caching than usual, never
more, and no error: a value that is not understood turns off what it is about, and an unknown word,
which may be about anything, turns off everything.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from sidecar.protocol import PIN_MS_MAX, TTL_MS_MAX

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

logger = logging.getLogger("vllm.kvlake")

PARAMS: Final = "kvlake"
"""Our part of a request's `kv_transfer_params`."""

HOST: Final = "host"
EXPECT: Final = "expect_tokens"
WAIT_MS_MAX: Final = 60_000


@dataclass(frozen=True, slots=True)
class RequestParams:
    """What a request wants of the cache; as it stands here, what one gets that says nothing."""

    reads: bool = True
    """Chunks may be loaded for it."""
    asks_store: bool = True
    """Also such that only the object store holds."""
    writes: bool = True
    """Its chunks may be stored."""
    stays: bool = False
    """They may not be written to the object store."""
    ttl_ms: int = 0
    """After so long they are forgotten; 0: never."""
    pin_ms: int = 0
    """For so long after its end its prompt is kept in host memory."""
    hand_over: bool = False
    """Its answer says how much of its prompt another engine can expect to find."""
    expects_tokens: int = 0
    """So much of its prompt another engine has stored, or is storing: worth waiting for."""
    wait_ms: int = -1
    """For so long; -1: as long as for the object store."""


NOTHING: Final = RequestParams(reads=False, writes=False)


class RequestParamsReader:
    """Reads the parameters of requests, and complains once of those that it does not understand.

    Args:
        cannot: words that whoever asks can do nothing about. A request that asks for one is
            complained of once, too, and gets the rest.
    """

    def __init__(self, cannot: Collection[str] = ()) -> None:
        self._told = False
        self._cannot = cannot
        self._told_cannot = False

    def wishes_of(self, request: Any) -> RequestParams:
        """The wishes of a request of vLLM."""
        params = getattr(request, "kv_transfer_params", None)
        given = params.get(PARAMS, {}) if isinstance(params, dict) else {}
        if not isinstance(given, dict) or not given.keys() <= _WORDS.keys():
            self._complain(given)
            return NOTHING
        if not given:
            return RequestParams()
        bad = [word for word, value in given.items() if not _WORDS[word](value)]
        if bad:
            self._complain(given)
        # What is false or nothing is what it gets.
        if in_vain := [word for word in given if word in self._cannot and given[word]]:
            self._complain_in_vain(given, in_vain)
        return _request_params(given, frozenset(bad))

    def _complain(self, given: object) -> None:
        if self._told:
            return
        self._told = True
        logger.warning(
            "kvlake: kv_transfer_params[%r]=%r of a request is not understood, which is taken as "
            'less caching; it may hold read and write (true, false or "host"), ttl_seconds (up to '
            "%d), pin_seconds (up to %d), hand_over (true or false), %s (0 or more) and "
            "wait_seconds (up to %d) (told once)",
            PARAMS,
            given,
            TTL_MS_MAX // 1000,
            PIN_MS_MAX // 1000,
            EXPECT,
            WAIT_MS_MAX // 1000,
        )

    def _complain_in_vain(self, given: object, in_vain: list[str]) -> None:
        if self._told_cannot:
            return
        self._told_cannot = True
        logger.warning(
            "kvlake: kv_transfer_params[%r]=%r of a request asks in vain for %s, which "
            "KVLakeConnector alone can do; the rest of it holds (told once)",
            PARAMS,
            given,
            ", ".join(in_vain),
        )


def _request_params(given: Mapping[str, Any], bad: frozenset[str]) -> RequestParams:
    read, write = given.get("read", True), given.get("write", True)
    return RequestParams(
        reads="read" not in bad and read is not False,
        asks_store=read != HOST,
        # What should be forgotten at a time that is not known is better not stored.
        writes=not bad & {"write", "ttl_seconds"} and write is not False,
        stays=write == HOST,
        ttl_ms=0 if "ttl_seconds" in bad else _ms(given.get("ttl_seconds", 0)),
        pin_ms=0 if "pin_seconds" in bad else _ms(given.get("pin_seconds", 0)),
        hand_over=given.get("hand_over") is True,
        # What is not said rightly is not waited for.
        expects_tokens=0 if bad & {EXPECT, "wait_seconds"} else given.get(EXPECT, 0),
        wait_ms=_wait_ms(given["wait_seconds"]) if "wait_seconds" in given else -1,
    )


def _ms(seconds: float) -> int:
    # Short of a millisecond is not for ever.
    return max(1, int(seconds * 1000)) if seconds else 0


def _wait_ms(seconds: object) -> int:
    return int(seconds * 1000) if isinstance(seconds, int | float) and _is_wait(seconds) else 0


def _is_tiers(value: object) -> bool:
    return isinstance(value, bool) or value == HOST


def _is_ttl(value: object) -> bool:
    return _is_seconds(value, TTL_MS_MAX)


def _is_pin(value: object) -> bool:
    return _is_seconds(value, PIN_MS_MAX)


def _is_wait(value: object) -> bool:
    return value == 0 or _is_seconds(value, WAIT_MS_MAX)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_seconds(value: object, ms_max: int) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    # Written so that NaN fails too.
    return 0 < value <= ms_max / 1000


_WORDS: Final = {
    "read": _is_tiers,
    "write": _is_tiers,
    "ttl_seconds": _is_ttl,
    "pin_seconds": _is_pin,
    "hand_over": _is_flag,
    EXPECT: _is_count,
    "wait_seconds": _is_wait,
}
"""Each word, and what a value of it has to be."""

OF_THE_CONNECTOR: Final = ("pin_seconds", "hand_over", EXPECT, "wait_seconds")
"""Words that a tier of vLLM's own offloading does nothing about: vLLM shows it chunks, and neither
a request's prompt nor its answer."""

"""What a request asks of the cache: `kv_transfer_params={"kvlake": {...}}`.

Invariant: a parameter that is not understood means less caching, never more and never an error. An
invalid value turns off what it is about. An unknown parameter, which may be about anything, turns
off everything.
"""

import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec

from sidecar.protocol import PIN_MS_MAX, TTL_MS_MAX

logger = logging.getLogger("vllm.kvlake")

PARAMS: Final = "kvlake"
"""Our part of a request's `kv_transfer_params`."""
EXPECT: Final = "expect_tokens"
WAIT_MS_MAX: Final = 60_000

_TYPES: Final[dict[str, Any]] = {
    "read": bool | Literal["host"],
    "write": bool | Literal["host"],
    "ttl_seconds": Annotated[float, msgspec.Meta(gt=0, le=TTL_MS_MAX / 1000)],
    "pin_seconds": Annotated[float, msgspec.Meta(gt=0, le=PIN_MS_MAX / 1000)],
    "hand_over": bool,
    EXPECT: Annotated[int, msgspec.Meta(ge=0)],
    "wait_seconds": Annotated[float, msgspec.Meta(ge=0, le=WAIT_MS_MAX / 1000)],
}
_INVALID: Final = (
    "it is not understood and means less caching; valid are read and write (true, false or "
    f'"host"), ttl_seconds (up to {TTL_MS_MAX // 1000}), pin_seconds (up to {PIN_MS_MAX // 1000}), '
    f"hand_over (true or false), {EXPECT} (0 or more) and wait_seconds (up to "
    f"{WAIT_MS_MAX // 1000})"
)
CONNECTOR_ONLY: Final = ("pin_seconds", "hand_over", EXPECT, "wait_seconds")
"""Parameters that a tier of vLLM's own offloading cannot serve: vLLM shows it chunks, and neither a
request's prompt nor its answer."""


@dataclass(frozen=True, slots=True)
class RequestParams:
    """What a request asks for; the defaults are those of a request without parameters."""

    reads: bool = True
    """Chunks may be loaded for it."""
    asks_store: bool = True
    """Chunks that only the object store has, too."""
    writes: bool = True
    """Its chunks may be stored."""
    stays: bool = False
    """Its chunks must not be written to the object store."""
    ttl_ms: int = 0
    """When its chunks expire; 0: never."""
    pin_ms: int = 0
    """For how long after its end its prompt stays in host memory."""
    hand_over: bool = False
    """Its answer says how much of its prompt another engine can expect to find."""
    expects_tokens: int = 0
    """How much of its prompt another engine has stored, or is storing; worth waiting for."""
    wait_ms: int = -1
    """For how long; -1: as long as for the object store."""


NOTHING: Final = RequestParams(reads=False, writes=False)


class RequestParamsReader:
    """Reads parameters of requests. Logs the first that is invalid, and the first `unsupported`."""

    def __init__(self, unsupported: Collection[str] = ()) -> None:
        self._unsupported = unsupported
        self._logged: set[str] = set()

    def read(self, request: Any) -> RequestParams:
        """The parameters of a request of vLLM."""
        params = getattr(request, "kv_transfer_params", None)
        given = params.get(PARAMS, {}) if isinstance(params, dict) else {}
        if not isinstance(given, dict) or not given.keys() <= _TYPES.keys():
            self._log_once("invalid", given, _INVALID)
            return NOTHING
        if not given:
            return RequestParams()
        valid: dict[str, Any] = {}
        for name, value in given.items():
            try:
                valid[name] = msgspec.convert(value, _TYPES[name])
            except msgspec.ValidationError:
                self._log_once("invalid", given, _INVALID)
        # A false or empty value asks for nothing.
        if ignored := [name for name in given if name in self._unsupported and given[name]]:
            names = ", ".join(ignored)
            fault = f"{names} is ignored, because only KVLakeConnector supports it"
            self._log_once("unsupported", given, fault)
        return _request_params(valid, invalid=given.keys() - valid.keys())

    def _log_once(self, kind: str, given: object, fault: str) -> None:
        if kind not in self._logged:
            self._logged.add(kind)
            text = "kvlake: kv_transfer_params[%r]=%r of a request: %s. Logged once"
            logger.warning(text, PARAMS, given, fault)


def _request_params(valid: dict[str, Any], invalid: Collection[str]) -> RequestParams:
    read, write = valid.get("read", True), valid.get("write", True)
    wait_ms = int(valid["wait_seconds"] * 1000) if "wait_seconds" in valid else -1
    waits = EXPECT not in invalid and "wait_seconds" not in invalid
    return RequestParams(
        reads="read" not in invalid and read is not False,
        asks_store=read != "host",
        # Chunks that must expire at an unknown time are better not stored.
        writes="write" not in invalid and "ttl_seconds" not in invalid and write is not False,
        stays=write == "host",
        ttl_ms=_ms(valid.get("ttl_seconds", 0)),
        pin_ms=_ms(valid.get("pin_seconds", 0)),
        hand_over=valid.get("hand_over", False),
        expects_tokens=valid.get(EXPECT, 0) if waits else 0,
        wait_ms=0 if "wait_seconds" in invalid else wait_ms,
    )


def _ms(seconds: float) -> int:
    # Less than a millisecond must not become 0, which means never.
    return max(1, int(seconds * 1000)) if seconds else 0

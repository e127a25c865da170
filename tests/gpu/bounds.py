"""What one sidecar may have at most, as an observer sees it, and what is left when all is over.

`Watch` compares what a sidecar says of itself, and what the double saw it copy, with limits that
the test names: those of the sidecar's configuration, or, for a control, those of another.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.gpu.double.control import Double
from tests.gpu.sidecars import SidecarProcess

WAITING = (
    "memory_bytes", "copies", "storing_bytes", "pinned_bytes", "kept_bytes", "lookups", "leases",
)  # fmt: skip
WAYS = ("loads_inflight_bytes", "stores_inflight_bytes")
"""As the double counts: to the device, to host memory."""


class Watch:
    """Looks at sidecars, and keeps the most that each quantity ever was."""

    def __init__(self, double: Double, limits: dict[str, int]) -> None:
        self._double = double
        self._limits = limits
        self._pids: set[int] = set()
        self.most = dict.fromkeys(limits, 0)
        self.refused: set[str] = set()
        """What was refused for want of room."""

    def look(self, sidecar: SidecarProcess) -> dict[str, Any]:
        """Take note of what it has now; returns its status."""
        self._pids.add(sidecar.pid)
        status = sidecar.status()
        for name, value in self._had(status):
            self.most[name] = max(self.most[name], value)
        self.refused |= status["refused"].keys()
        return status

    @staticmethod
    def _had(status: dict[str, Any]) -> Iterator[tuple[str, int]]:
        for name in WAITING:
            yield name, status["waiting"][name]["used"]
        host = status["tiers"]["host"]
        slots_bytes = sum(one["slots_used"] * one["slot_bytes"] for one in host["classes"])
        yield "host_bytes", max(host["used_bytes"], host["slab_bytes"], slots_bytes)
        yield "sessions", len(status["sessions"])

    @property
    def exceeded(self) -> set[str]:
        """What was ever more than its limit."""
        for pid in self._pids:
            # The double keeps the most that was in flight, whether or not somebody looked.
            for name, most in zip(WAYS, self._double.process(pid).inflight_bytes_max, strict=True):
                self.most[name] = max(self.most[name], most)
        return {name for name, limit in self._limits.items() if self.most[name] > limit}


def left_over(status: dict[str, Any]) -> dict[str, int]:
    """What a sidecar still has that nobody waits for any more; nothing that is zero."""
    counts = {name: status["waiting"][name]["used"] for name in WAITING}
    counts |= status["pending"] | {"sessions": len(status["sessions"])}
    counts |= {"leases held": status["leases"], "lookups open": status["lookups"]}
    return {name: count for name, count in counts.items() if count}

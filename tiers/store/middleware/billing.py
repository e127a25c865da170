"""What a store charges for: requests and bytes by operation.

Owns `Billed`, which counts every request that reaches the store, retries included, and the monthly
estimate. Does not own prices (the configuration) or what callers see (`metering.py`).

Invariant: a verb counts as the requests that S3 needs for it: a listing is one for each 1000 names,
a deletion one for each 1000 objects, a move a copy and a deletion. A request that failed counts
too: most stores charge for it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeVar

from tiers.store.middleware.wrapper import Verb, Wrapper

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from tiers.store.client import Bytes, Listing, Seen
    from tiers.store.object_tier import ObjectTier

T = TypeVar("T")
Operation = Literal["list", "get", "put", "delete", "head"]
OPERATIONS: Final[tuple[Operation, ...]] = ("list", "get", "put", "delete", "head")
PAGE_NAMES: Final = 1000
MONTH_SECONDS: Final = 30 * 86_400.0
GIGABYTE: Final = 10**9
_REQUESTS: Final[Mapping[Verb, tuple[Operation, ...]]] = {
    "probe": ("put", "get", "put", "list", "delete"),
    "write": ("put",),
    "read": ("get",),
    "quarantine": ("put", "delete"),
}


class Billed(Wrapper):
    """Counts requests and bytes by operation. Put it right around the store."""

    def __init__(self, inner: ObjectTier) -> None:
        super().__init__(inner)
        self.requests: Counter[Operation] = Counter()
        self.num_bytes: Counter[Operation] = Counter()

    async def write(self, name: str, image: Bytes, *, create: bool = False) -> None:
        """See `ObjectTier.write`."""
        self.num_bytes["put"] += image.nbytes
        await super().write(name, image, create=create)

    async def read(self, name: str, into: Bytes, *, seen: Seen | None = None) -> int:
        """See `ObjectTier.read`."""
        num_bytes = await super().read(name, into, seen=seen)
        self.num_bytes["get"] += num_bytes
        return num_bytes

    async def list(
        self, prefix: str, *, start_after: str = "", deep: bool = True, names_max: int | None = None
    ) -> Listing:
        """See `ObjectTier.list`."""
        self.requests["list"] += 1
        found = await super().list(prefix, start_after=start_after, deep=deep, names_max=names_max)
        self.requests["list"] += max(0, len(found) - 1) // PAGE_NAMES
        return found

    async def delete(self, names: Sequence[str]) -> None:
        """See `ObjectTier.delete`."""
        self.requests["delete"] += -(-len(names) // PAGE_NAMES)
        await super().delete(names)

    async def _around(self, verb: Verb, name: str, call: Callable[[], Awaitable[T]]) -> T:  # noqa: ARG002
        for operation in _REQUESTS.get(verb, ()):
            self.requests[operation] += 1
        return await call()


@dataclass(frozen=True, slots=True)
class PriceTable:
    """Prices in one currency: per 1000 requests, and per 10^9 bytes."""

    per_1000: Mapping[Operation, float]
    per_gb_month: float
    per_gb_read: float
    per_gb_written: float


def monthly(
    prices: PriceTable, billed: Billed, *, stored_bytes: int, seconds: float
) -> dict[str, float]:
    """Costs of a month that goes on like the last `seconds`, by item, with their `total`.

    Requests are this sidecar's; stored bytes are those of all sidecars.
    """
    scale = MONTH_SECONDS / max(seconds, 1.0)
    items = {
        f"{name}_requests": billed.requests[name] / 1000 * prices.per_1000[name] * scale
        for name in OPERATIONS
    }
    items["read"] = billed.num_bytes["get"] / GIGABYTE * prices.per_gb_read * scale
    items["written"] = billed.num_bytes["put"] / GIGABYTE * prices.per_gb_written * scale
    items["stored"] = stored_bytes / GIGABYTE * prices.per_gb_month
    items["total"] = sum(items.values())
    return {name: round(value, 4) for name, value in items.items()}

"""The store as the sidecar uses it: the tier inside its wrappers, from the configuration.

Owns the order of the wrappers. Does not own the wrappers (`tiers/store/middleware.py`).

Invariant: from the outside in, the order is Metered, Deadline, Retrying, ConcurrencyLimited,
RateLimited, Billed. The deadline (`store.deadline_seconds_max`) includes retries and the wait for a
turn; every attempt counts for the rate and the bill; the counters see what the callers see.
"""

from collections.abc import Callable
from typing import Final

from sidecar.config.store import StoreSettings
from sidecar.errors import StartError
from tiers.errors import TierError
from tiers.store.middleware import (
    DELETED_TOGETHER_MAX,
    Billed,
    ConcurrencyLimited,
    Deadline,
    Metered,
    RateLimited,
    Retrying,
)
from tiers.store.object_tier import ObjectTier, UrlObjects

REMOVAL_TURNS_SHARE: Final = 1 / 4
"""The share of the turns within a deadline that one removal may use."""

WrapStore = Callable[[ObjectTier], ObjectTier]
"""Wraps the store itself, inside all wrappers: tests inject faults with it."""


def open_store(settings: StoreSettings, wrap_store: WrapStore | None = None) -> Metered:
    """The configured store. Raises `StartError` where its URL or options are invalid.

    Sends nothing: whether the store answers is found out while serving.
    """
    url = f"{settings.url.rstrip('/')}/{settings.prefix}" if settings.prefix else settings.url
    try:
        objects = UrlObjects(url, settings)
    except TierError as error:
        raise StartError(f"store: {error}") from error
    tier: ObjectTier = objects if wrap_store is None else wrap_store(objects)
    tier = billed = Billed(tier)
    together = DELETED_TOGETHER_MAX
    if (rate := settings.requests_per_second_max) is not None:
        step = objects.names_per_removal
        tier = RateLimited(tier, requests_per_second_max=rate, names_per_removal=step)
        # Others take turns in between, and a removal that waits for all of its own has a deadline.
        requests = int(rate * settings.deadline_seconds_max * REMOVAL_TURNS_SHARE)
        together = min(together, max(1, requests) * step)
    tier = ConcurrencyLimited(
        tier,
        writes_max=settings.writes_inflight_max,
        reads_max=settings.reads_inflight_max,
    )
    retrying = Retrying(tier, attempts_max=settings.retries_max + 1)
    deadline = Deadline(
        retrying, seconds_max=settings.deadline_seconds_max, deleted_together_max=together
    )
    return Metered(deadline, retried=retrying.retried, billed=billed, objects=objects)

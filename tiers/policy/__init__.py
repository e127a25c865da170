"""Eviction policies: one file each. A policy only names victims; the engine evicts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiers.policy.fifo import FifoPolicy
from tiers.policy.lru import LruPolicy

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiers.policy.policy import Policy

POLICIES: dict[str, Callable[[], Policy]] = {"lru": LruPolicy, "fifo": FifoPolicy}
"""Name in the configuration (`host.policy`) -> a policy."""


def make(name: str) -> Policy:
    """A new, empty policy of that name."""
    return POLICIES[name]()

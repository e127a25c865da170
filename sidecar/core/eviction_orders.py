"""The orders in which chunks are evicted: everybody's, and that of each tenant with a limit.

Owns which chunks are in them. Does not own the orders themselves (`tiers/policy/`, `tenants.py`),
nor who is evicted when (`host_tier.py`).

Invariant: both orders hold the same chunks of a tenant, and one that somebody keeps is in neither:
it is no victim, and a search would only step over it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sidecar.core.directory import Chunk, Directory
    from sidecar.core.tenants import Tenants
    from tiers.policy.policy import Policy


class EvictionOrders:
    """Where each chunk stands among those that could be evicted."""

    def __init__(self, directory: Directory, policy: Policy, tenants: Tenants) -> None:
        self._directory = directory
        self._policy = policy
        self._tenants = tenants

    def enter(self, chunk: Chunk) -> None:
        """Put a chunk last into the orders of eviction, unless somebody keeps it."""
        if chunk.kept:
            return
        realm_id = chunk.realm.realm_id
        name, before = (realm_id, chunk.key), (realm_id, chunk.parent)
        self._policy.add(name, before)
        own = self._tenants.order(chunk.tenant)
        if own is not None:
            own.add(name, before)

    def freshen(self, chunk: Chunk) -> None:
        """Make a chunk the last in the orders of eviction that go by use."""
        if chunk.kept:
            return
        name = (chunk.realm.realm_id, chunk.key)
        self._policy.touch(name)
        own = self._tenants.order(chunk.tenant)
        if own is not None:
            own.touch(name)

    def forget(self, chunk: Chunk) -> None:
        """Take a chunk out of the orders of eviction, where it is in them."""
        if chunk.kept:
            return
        name = (chunk.realm.realm_id, chunk.key)
        self._policy.remove(name)
        own = self._tenants.order(chunk.tenant)
        if own is not None:
            own.remove(name)

    def coldest(self, order: Policy | None = None) -> Iterator[Chunk]:
        """Chunks in the order in which they would be evicted, pinned ones too.

        Of all tenants, or of the one whose order is given.
        """
        victims = (self._policy if order is None else order).victims()
        for realm_id, key in cast("Iterator[tuple[int, bytes]]", victims):
            yield self._directory.realms[realm_id].chunks[key]

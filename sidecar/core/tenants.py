"""Tenants: who holds how much of host memory, under which limit, and what was done for whom.

A tenant is eight bytes, made from a request's cache salt (`protocol.tenant_id`); requests without
a salt are together one tenant, `b""`. Owns the limits, the account of each tenant's slots, and for
a tenant with a limit its own order of eviction. Does not own slots or chunks (`host_tier.py`), nor
what the store holds for whom.

Invariants: an account lives while its tenant holds a slot, or for ever if the tenant is named, so
there are never more accounts than slots and names; what is counted for metrics has a fixed number
of labels, however many salts there are: the named tenants, `unsalted`, and `other` for the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, cast

from tiers.policy.lru import LruPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from sidecar.core.directory import Chunk, Directory
    from tiers.policy.policy import Policy

UNSALTED: Final = "unsalted"
OTHER: Final = "other"
NO_TENANT: Final = b""

WRITERS_KEPT_MAX: Final = 65_536
"""Tenants whose written bytes are remembered; beyond it, who wrote longest ago is forgotten."""


@dataclass(frozen=True, slots=True)
class Quota:
    """What one tenant may hold. None: no limit of its own, it shares what there is."""

    host_bytes_max: int | None = None
    store_bytes_max: int | None = None
    """In one namespace of the store, as the two below."""
    store_objects_max: int | None = None
    store_ttl_seconds: float | None = None

    @property
    def store_capped(self) -> bool:
        """Whether it says how much may be in the store."""
        return self.store_bytes_max is not None or self.store_objects_max is not None

    def admits(self, num_bytes: int, objects: int) -> bool:
        """Whether so much may be in the store."""
        if self.store_bytes_max is not None and num_bytes > self.store_bytes_max:
            return False
        return self.store_objects_max is None or objects <= self.store_objects_max


@dataclass(frozen=True, slots=True)
class TenantRules:
    """Limits as the operator set them: of every tenant, and of those that have a name."""

    default: Quota = Quota()
    named: Mapping[bytes, tuple[str, Quota]] = field(default_factory=dict[bytes, tuple[str, Quota]])


@dataclass(slots=True)
class TenantCounters:
    """What was done for a tenant, or for all of one label. Never decreases."""

    chunks_stored: int = 0
    chunks_loaded: int = 0
    chunks_evicted: int = 0
    bytes_stored: int = 0
    bytes_loaded: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    leases: int = 0
    lookups: int = 0
    dropped_quota: int = 0
    """Stores and reads for which the tenant's own limit left no room."""
    writes_refused: int = 0
    """Writes that would have gone over the tenant's limit in the store."""


class Account:
    """One tenant's slots. `order` is its own order of eviction, where it has a limit."""

    __slots__ = ("counters", "host_bytes", "order", "quota", "tenant")

    def __init__(
        self, tenant: bytes, quota: Quota, counters: TenantCounters, order: Policy | None
    ) -> None:
        self.tenant = tenant
        self.quota = quota
        self.counters = counters
        self.order = order
        self.host_bytes = 0


@dataclass(frozen=True, slots=True)
class TenantSnapshot:
    """One label's part of the status."""

    name: str
    host_bytes: int
    host_bytes_max: int | None
    store_bytes_max: int | None
    store_objects_max: int | None
    store_ttl_seconds: float | None
    counters: TenantCounters


class Tenants:
    """All accounts. `new_order` makes a policy for a tenant that has a limit."""

    def __init__(
        self, rules: TenantRules | None = None, new_order: Callable[[], Policy] = LruPolicy
    ) -> None:
        self._rules = rules = TenantRules() if rules is None else rules
        self._new_order = new_order
        self._labels: dict[bytes, TenantCounters] = {
            tenant: TenantCounters() for tenant in (NO_TENANT, *rules.named)
        }
        self._others = TenantCounters()
        self._accounts: dict[bytes, Account] = {}
        self._written: dict[bytes, int] = {}

    def __iter__(self) -> Iterator[Account]:
        return iter(self._accounts.values())

    def quota(self, tenant: bytes) -> Quota:
        """The limits that hold for a tenant."""
        named = self._rules.named.get(tenant)
        return self._rules.default if named is None else named[1]

    def counters(self, tenant: bytes) -> TenantCounters:
        """The counters of the tenant's label."""
        return self._labels.get(tenant, self._others)

    def account(self, tenant: bytes) -> Account:
        """The tenant's account, opened at its first use."""
        account = self._accounts.get(tenant)
        if account is None:
            quota = self.quota(tenant)
            order = None if quota.host_bytes_max is None else self._new_order()
            account = Account(tenant, quota, self.counters(tenant), order)
            self._accounts[tenant] = account
        return account

    def order(self, tenant: bytes) -> Policy | None:
        """The tenant's own order of eviction, if it has a limit and holds anything."""
        account = self._accounts.get(tenant)
        return None if account is None else account.order

    def charge(self, tenant: bytes, num_bytes: int) -> None:
        """The tenant got a slot."""
        self.account(tenant).host_bytes += num_bytes

    def credit(self, tenant: bytes, num_bytes: int) -> None:
        """The tenant gave a slot back."""
        account = self._accounts[tenant]
        account.host_bytes -= num_bytes
        self.settle(tenant)

    def settle(self, tenant: bytes) -> None:
        """Close an account that holds nothing, unless its tenant has a name."""
        account = self._accounts.get(tenant)
        if account is not None and not account.host_bytes and tenant not in self._rules.named:
            del self._accounts[tenant]

    def wrote(self, tenant: bytes, num_bytes: int) -> None:
        """This sidecar wrote so much to the store for a tenant."""
        self.counters(tenant).bytes_written += num_bytes
        # Taken out first, so that it is the newest again.
        self._written[tenant] = self._written.pop(tenant, 0) + num_bytes
        if len(self._written) > WRITERS_KEPT_MAX:
            del self._written[next(iter(self._written))]

    def written_bytes(self, tenant: bytes) -> int:
        """What this sidecar wrote to the store for a tenant in its life."""
        return self._written.get(tenant, 0)

    @property
    def names(self) -> dict[bytes, str]:
        """The tenants that have a label of their own, and the labels."""
        named = {tenant: name for tenant, (name, _) in self._rules.named.items()}
        return {NO_TENANT: UNSALTED} | named

    def snapshot(self) -> tuple[TenantSnapshot, ...]:
        """Every label: the named tenants, those without a salt, all others together."""
        names = self.names
        told = [
            self._label(name, self.quota(tenant), self._held(tenant), self.counters(tenant))
            for tenant, name in names.items()
        ]
        others = sum(one.host_bytes for one in self if one.tenant not in names)
        return (*told, self._label(OTHER, self._rules.default, others, self._others))

    def _held(self, tenant: bytes) -> int:
        account = self._accounts.get(tenant)
        return 0 if account is None else account.host_bytes

    @staticmethod
    def _label(
        name: str, quota: Quota, host_bytes: int, counters: TenantCounters
    ) -> TenantSnapshot:
        return TenantSnapshot(
            name,
            host_bytes,
            quota.host_bytes_max,
            quota.store_bytes_max,
            quota.store_objects_max,
            quota.store_ttl_seconds,
            counters,
        )


class EvictionOrders:
    """The orders in which chunks are evicted: that of all, and that of each tenant with a limit.

    Which victim is evicted when is not decided here (`host_tier.py`).

    Invariant: both orders hold the same chunks of a tenant, and one that a request keeps is in
    neither: it is no victim, and a search would only step over it.
    """

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

"""Tenants: how much host memory each one holds, its limits, and its counters.

A tenant is eight bytes derived from the cache salt of a request (`protocol.tenant_id`); requests
without a salt are one tenant, `b""`. Does not own slots or chunks (`host_tier.py`), nor what the
store holds of a tenant.

Invariants: an account exists while its tenant holds a slot, or is named in the configuration, so
there are never more accounts than slots and names; metrics have a fixed number of labels: the named
tenants, `unsalted`, and `other`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from tiers.policy import Policy
from tiers.policy.lru import LruPolicy

UNSALTED: Final = "unsalted"
OTHER: Final = "other"
NO_TENANT: Final = b""


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of one tenant; None: no limit."""

    host_bytes_max: int | None = None
    store_bytes_max: int | None = None
    """In one namespace of the store, as the two below."""
    store_objects_max: int | None = None
    store_ttl_seconds: float | None = None

    @property
    def store_capped(self) -> bool:
        """Whether it limits what may be in the store."""
        return self.store_bytes_max is not None or self.store_objects_max is not None

    def admits(self, num_bytes: int, objects: int) -> bool:
        """Whether this much may be in the store."""
        if self.store_bytes_max is not None and num_bytes > self.store_bytes_max:
            return False
        return self.store_objects_max is None or objects <= self.store_objects_max


@dataclass(frozen=True, slots=True)
class TenantRules:
    """Limits from the configuration: of every tenant, and of named ones."""

    default: Quota = Quota()
    named: Mapping[bytes, tuple[str, Quota]] = field(default_factory=dict[bytes, tuple[str, Quota]])


@dataclass(slots=True)
class TenantCounters:
    """Counters of one label. They never decrease."""

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
    """Stores and reads for which the tenant's limit left no room."""
    writes_refused: int = 0
    """Writes that would have exceeded the tenant's limit in the store."""


@dataclass(slots=True)
class Account:
    """One tenant's slots."""

    tenant: bytes
    quota: Quota
    order: Policy | None
    """Its own order of eviction, an LRU, if it has a limit."""
    host_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TenantSnapshot:
    """The status of one label."""

    name: str
    host_bytes: int
    quota: Quota
    counters: TenantCounters


class Tenants:
    """All accounts."""

    def __init__(self, rules: TenantRules | None = None) -> None:
        self._rules = TenantRules() if rules is None else rules
        self._labels = {tenant: TenantCounters() for tenant in self.names}
        self._others = TenantCounters()
        self._accounts: dict[bytes, Account] = {}

    def __iter__(self) -> Iterator[Account]:
        return iter(self._accounts.values())

    def quota(self, tenant: bytes) -> Quota:
        """The limits of a tenant."""
        named = self._rules.named.get(tenant)
        return self._rules.default if named is None else named[1]

    def counters(self, tenant: bytes) -> TenantCounters:
        """The counters of the tenant's label."""
        return self._labels.get(tenant, self._others)

    def account(self, tenant: bytes) -> Account:
        """The tenant's account, created on first use."""
        account = self._accounts.get(tenant)
        if account is None:
            quota = self.quota(tenant)
            order = None if quota.host_bytes_max is None else LruPolicy()
            account = self._accounts[tenant] = Account(tenant, quota, order)
        return account

    def order(self, tenant: bytes) -> Policy | None:
        """The tenant's own order of eviction, if it has a limit and an account."""
        account = self._accounts.get(tenant)
        return None if account is None else account.order

    def full(self, tenant: bytes, num_bytes: int) -> Policy | None:
        """Its own order, if a tenant has to give something up to have `num_bytes` more."""
        account = self._accounts.get(tenant)
        limit = None if account is None else account.quota.host_bytes_max
        if account is None or limit is None or account.host_bytes + num_bytes <= limit:
            return None
        return account.order

    def charge(self, tenant: bytes, num_bytes: int) -> None:
        """The tenant got a slot."""
        self.account(tenant).host_bytes += num_bytes

    def credit(self, tenant: bytes, num_bytes: int) -> None:
        """The tenant freed a slot."""
        self._accounts[tenant].host_bytes -= num_bytes
        self.close_if_unused(tenant)

    def close_if_unused(self, tenant: bytes) -> None:
        """Delete an account that holds nothing, unless its tenant is named."""
        account = self._accounts.get(tenant)
        if account is not None and not account.host_bytes and tenant not in self._rules.named:
            del self._accounts[tenant]

    @property
    def names(self) -> dict[bytes, str]:
        """The labels of tenants that have their own."""
        named = {tenant: name for tenant, (name, _) in self._rules.named.items()}
        return {NO_TENANT: UNSALTED} | named

    def snapshot(self) -> tuple[TenantSnapshot, ...]:
        """Every label: named tenants, requests without a salt, all others together."""
        held = {account.tenant: account.host_bytes for account in self}
        labels = [
            TenantSnapshot(name, held.pop(tenant, 0), self.quota(tenant), self.counters(tenant))
            for tenant, name in self.names.items()
        ]
        others = TenantSnapshot(OTHER, sum(held.values()), self._rules.default, self._others)
        return (*labels, others)

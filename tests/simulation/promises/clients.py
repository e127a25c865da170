"""Promises about what clients share: the index, sessions, limits, tenants, wishes, groups."""

from __future__ import annotations

from tests.simulation.mutation import Mutation

CLIENTS = (
    # The index.
    Mutation(
        "the index is not told of an eviction",
        "Directory.move",
        "if hosted and not chunk.detached:",
        "if hosted and not chunk.detached and cause is not Cause.EVICTED:",
    ),
    Mutation(
        "the index is told last",
        "Outbox.take",
        "[*self._index, *self._work, *done, *self._replies]",
        "[*self._work, *done, *self._replies, *self._index]",
    ),
    Mutation(
        "an index entry is lost when the index grows",
        "IndexGrowth.finish",
        "(*self._smaller.overflow.items(), *self._changes)",
        "()",
        seed=15,
    ),
    # Sessions, epochs, shares.
    Mutation(
        "epochs are not compared",
        "Session.event_of",
        "if message.epoch != epoch:",
        "if False:",
        ("message of another life",),
    ),
    Mutation(
        "a client may have any number of leases",
        "Engine._lease",
        "self.shares.leases.of(session_id) >= self.limits.leases_max_per_session",
        "False",
        ("leases without a load",),
        seed=8,
    ),
    Mutation(
        "shares are not bounded",
        "Share.fits",
        "self._alpha * left",
        "UNLIMITED",
        seed=1,
    ),
    Mutation(
        "a share is not given back when a lease ends",
        "Leases._end",
        "self._shares.memory.give(lease.session_id, lease.cost)",
        "pass",
    ),
    Mutation(
        "a client may have any number of jobs",
        "Share.fits",
        "self._session_max",
        "UNLIMITED",
        ("flood of loads",),
    ),
    # Tenants.
    Mutation(
        "a tenant's slot is not charged",
        "HostTier.reserve",
        "self._tenants.charge(chunk.tenant, segment.slot_bytes)",
        "pass",
    ),
    Mutation(
        "a tenant's slot is not credited",
        "HostTier._free",
        "self._tenants.credit(segment.chunk.tenant, segment.slot_bytes)",
        "pass",
    ),
    Mutation(
        "a tenant's limit is not kept",
        "HostTier._make_room",
        "fits = account.host_bytes <= left",
        "fits = True",
    ),
    Mutation(
        "a tenant at its limit pushes out others",
        "HostTier._make_room",
        "self._victim(account.order)",
        "self._victim()",
        seed=5,
    ),
    Mutation(
        "tenants share keys",
        "Requests._group_states",
        'salt, generation = request.cache_salt or "", self.generation',
        'salt, generation = "", self.generation',
    ),
    # What requests ask for.
    Mutation(
        "a chunk is served after its time",
        "HostTier.expire",
        "self._remove(due, Gone.EXPIRED)",
        "pass",
    ),
    Mutation(
        "a restart forgets until when a chunk is kept",
        "_images",
        "retention=retention,",
        "retention=retention._replace(expires_at=float('inf')),",
        ("sidecar killed",),
    ),
    Mutation(
        "what is to stay on the node is written",
        "Writes._enqueue",
        " or chunk.retention.stays",
        "",
    ),
    Mutation(
        "a pin ends too early",
        "RequestPins.pin",
        "deadline = now + message.duration_ms / 1000",
        "deadline = now",
    ),
    Mutation(
        "a pinned chunk can be evicted",
        "HostTier.request_pin",
        "chunk.request_pins += 1",
        "chunk.request_pins += 1; chunk.pins -= 1",
    ),
    Mutation(
        "a reset keeps old keys",
        "SchedulerRole.reset",
        "self.requests.generation = os.urandom(16)",
        "pass",
        ("reset",),
        seed=4,
    ),
    # Several KV cache groups.
    Mutation(
        "a store takes blocks that a window gave back",
        "Stores._chunks",
        " or gone",
        "",
        ("several groups",),
    ),
    Mutation(
        "a window is taken for shorter than it is",
        "Attention.unread",
        "self.window + 1",
        "self.window + 5",
        ("several groups",),
        seed=8,
    ),
    Mutation(
        "a load looks for all chunks in the first group",
        "Jobs.load",
        "realms[piece.group].chunks",
        "realms[0].chunks",
        ("several groups",),
    ),
    Mutation(
        "a store puts all chunks into the first group",
        "Jobs.store",
        "realm = realms[piece.group]",
        "realm = realms[0]",
        ("several groups",),
    ),
    Mutation(
        "a lease pins chunks of the first group alone",
        "Engine._lease",
        "for realm in realms",
        "for realm in realms[:1]",
        ("several groups",),
        seed=2,
    ),
    Mutation(
        "a pin keeps chunks in the first group alone",
        "RequestPins.pin",
        "realm = realms[group]",
        "realm = realms[0]",
        ("several groups",),
    ),
    Mutation(
        "a copy takes the first group's pages",
        "CopyGroup.region",
        "self.memory.regions[self.part]",
        "self.memory.regions[0]",
        ("several groups",),
    ),
)

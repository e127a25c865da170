"""The invariants of the sidecar's engine between two events.

Owns what must hold between its parts: every allocated slot is in one place, every pin has an owner,
every share holds the queued work, queued writes are counted, and what runs on a slot is what the
parts say is running.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from sidecar.core.directory import SegmentState

if TYPE_CHECKING:
    from sidecar.core.directory import Chunk, HostSegment
    from sidecar.core.engine import Engine
    from sidecar.core.pins import Pins
    from sidecar.core.reads import ReadQueue
    from sidecar.core.writes import Writes


def _check_shares(engine: Engine) -> None:
    """The shares hold exactly the queued work, and no more than they may."""
    held: dict[str, Counter[int]] = {name: Counter() for name in engine.shares.shares}
    for copy in engine.jobs.running():
        session_id = copy.job.session.session_id
        held["memory_bytes"][session_id] += copy.cost
        held["copies"][session_id] += 1
        held["storing_bytes"][session_id] += copy.storing
    for lookup in engine.lookups:
        held["memory_bytes"][lookup.session_id] += lookup.cost
        held["lookups"][lookup.session_id] += 1
    for lease in engine.leases:
        held["memory_bytes"][lease.session_id] += lease.cost
        held["leases"][lease.session_id] += 1
    for kept in engine.request_pins:
        held["memory_bytes"][kept.session_id] += kept.cost
        held["kept_bytes"][kept.session_id] += kept.size_bytes
    for session_id, pinned in engine.pins.by_session.items():
        held["pinned_bytes"][session_id] = sum(one.size_bytes for one in pinned.values())
    for name, share in engine.shares.shares.items():
        assert dict(share.by_session) == dict(+held[name]), f"{name} is miscounted"
        assert share.used == sum(share.by_session.values()) <= share.limit, name


def pin_counts(pins: Pins) -> Counter[Chunk]:
    """The number of pins of each pinned chunk."""
    counts: Counter[Chunk] = Counter()
    for own in pins.by_session.values():
        counts.update({chunk: pinned.count for chunk, pinned in own.items()})
    return counts


def check_queue(queue: ReadQueue) -> None:
    """Verify that a queue of reads lists each one by session and by segment."""
    sessions_of: dict[HostSegment, set[int]] = {}
    for session_id, queued in queue.by_session.items():
        assert queued, f"session {session_id} has an empty queue"
        for segment in queued:
            sessions_of.setdefault(segment, set()).add(session_id)
    assert sessions_of == queue.sessions_of, "a queued read is miscounted"


def _check_writes(writes: Writes) -> None:
    """The queue of writes holds as many ranks and bytes as it says."""
    queued = writes.pending.values()
    assert writes.pending_ranks == sum(len(one.ranks) for one in queued), "ranks are miscounted"
    assert writes.pending_bytes == sum(one.num_bytes for one in queued), "bytes are miscounted"


def check(engine: Engine) -> None:
    """Verify the invariants; raises AssertionError. Costs time linear in what is held."""
    chunks = [c for realm in engine.directory.realms.values() for c in realm.chunks.values()]
    segments = [segment for chunk in chunks for segment in chunk.segments]
    everything = segments + list(engine.host.zombies)
    slots = [segment.slot for segment in everything if segment.slot >= 0]
    slots += list(engine.host.restored_slots.by_offset)
    assert len(slots) == len(set(slots)), "a slot is used twice"
    assert set(slots) == engine.host.allocated, "a slot is lost or unknown to the ledger"
    charged: Counter[bytes] = Counter()
    for segment in everything:
        if segment.slot >= 0:
            charged[segment.chunk.tenant] += segment.slot_bytes
    for account in engine.tenants:
        assert account.host_bytes == charged.pop(account.tenant, 0), "a tenant is mischarged"
    assert not charged, "slots of a tenant without an account"
    _check_shares(engine)
    running = Counter(copy.segment for copy in engine.jobs.running())
    running.update(engine.writes.running())
    running.update(engine.reads.running())
    known = set(everything)
    assert known.issuperset(running), "something runs on a slot that nobody holds"
    for segment in everything:
        assert segment.running == running[segment], "a slot's use is miscounted"
        assert (segment.slot >= 0) == (segment.state is not SegmentState.ABSENT)
    pins: Counter[Chunk] = Counter()
    for owner in (*engine.leases, *engine.lookups):
        pins.update(owner.chunks)
    kept = Counter(one.chunk for one in engine.request_pins)
    pins.update(kept)
    assert pins == pin_counts(engine.pins), "a pin of no lease and no lookup, or one that is lost"
    _check_writes(engine.writes)
    check_queue(engine.reads.queue)
    for segment in engine.reads.queue.sessions_of:
        assert segment.chunk in engine.lookups.waiters, "a read is queued that nobody waits for"
    for chunk in {*chunks, *pins}:
        assert chunk.pins == pins[chunk], "a pin without an owner, or an owner without a pin"
        assert chunk.request_pins == kept[chunk], "kept for nobody, or not at all"
    for chunk in chunks:
        assert chunk.pins or not chunk.empty, "an empty chunk was left behind"
        hosted = sum(segment.state is SegmentState.HOST for segment in chunk.segments)
        assert hosted == chunk.hosted, "HOST segments are miscounted"
    for realm in engine.directory.realms.values():
        flags = [realm.flags(key) for key in realm.chunks]
        assert sum(in_host for in_host, _ in flags) == realm.hosted_chunks
        in_store = sum(
            realm.segment_sources.obtainable(mask) == realm.full_mask
            for _, mask in realm.stored.names()
        )
        assert in_store * realm.readable == realm.stored_chunks

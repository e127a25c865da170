"""Slots of the host tier: who has one, when it is freed, what is evicted to get one.

Owns the ledger of slots between the pool (which hands them out) and the directory (which says
what they hold), when a chunk enters and leaves the orders of eviction, and zombies: slots of chunks
that were removed while a copy, read or write still ran on them. It does not decide what to store,
read or write.

What an earlier life of the sidecar left in slots that it had sealed waits in the inventory until a
worker attaches whose rank it is of; then those slots are its chunks' segments. The pool is told
when a slot is sealed, used, or not to come back, so that the next life finds what this one had.

A tenant at its limit makes room among its own chunks first, and only there; what it may have then
competes with everybody's for free slots.

Invariants: a slot is freed only when nothing runs on it; the slots that were allocated are those
of the directory's segments, those of the zombies and the inventory, and a tenant is charged for
exactly the slots of its chunks; a slot is sealed in the pool exactly while its segment is HOST or
it is in the inventory; a chunk is known to the policy exactly while one of its segments is HOST,
it is in the directory, and nobody keeps it. (From its first segment, not its last: a chunk whose
other ranks never come must be evictable, or it would stay for ever.) A chunk that is past its time
is in nobody's sight, whatever pins it.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from sidecar.core.commands import RestoredSlot
from sidecar.core.directory import Cause, Chunk, Directory, HostSegment, Realm, SegmentState
from sidecar.core.restored import RestoredSlots
from sidecar.core.retention import FOR_EVER, Expiries, Retention, slot_tag
from sidecar.core.tenants import EvictionOrders

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sidecar.core.commands import Counters
    from sidecar.core.restored import SlotAllocator
    from sidecar.core.tenants import Tenants
    from tiers.kv.layout import ChunkLayout
    from tiers.policy.policy import Policy


VICTIMS_SCANNED_MAX: Final = 1024
"""Entries of the eviction order that one search looks at before it gives up."""

EVICTIONS_PER_SLOT_MAX: Final = 64
"""Chunks of other slot classes that are given up for one slot, hoping that a slab gets empty."""


class _Moment(NamedTuple):
    """When a restored slot was stored, or last used."""

    when: int
    was_use: bool
    found: RestoredSlot


class HostChange(enum.Enum):
    """What happened to a chunk of the host tier."""

    COMPLETE = "complete"
    """It has the segments of all ranks."""
    RESTORED = "restored"
    """It has them again, after a restart."""
    USED = "used"
    """It was asked for again."""
    REMOVED = "removed"


class HostTier:
    """Slots, and the chunks that they hold.

    It calls no other part: what the others need to know is in `changes`, oldest first, until the
    engine takes it from there.
    """

    def __init__(
        self,
        directory: Directory,
        slots: SlotAllocator,
        policy: Policy,
        counters: Counters,
        tenants: Tenants,
    ) -> None:
        self._directory = directory
        self._slots = slots
        self._policy = policy
        self._orders = EvictionOrders(directory, policy, tenants)
        self._counters = counters
        self._tenants = tenants
        self.changes: deque[tuple[HostChange, Chunk]] = deque()
        self.allocated: set[int] = set()
        self.zombies: set[HostSegment] = set()
        self.restored_slots = RestoredSlots(slots)
        self._expiries = Expiries()
        self._adoptions: deque[tuple[Realm, int, Iterator[_Moment]]] = deque()
        """What is left to adopt, by realm and rank."""

    def learn_layout(self, realm: Realm, rank: int, layout: ChunkLayout) -> None:
        """Note a rank's geometry. The engine has refused one that contradicts an earlier one."""
        realm.layouts[rank] = layout
        realm.segment_sources.learn(rank, layout.segment)
        realm.slot_classes[rank] = self._slots.slot_class(layout)

    def touch(self, chunk: Chunk) -> None:
        """Tell the policy that a chunk was wanted."""
        if chunk.hosted and not chunk.detached:
            self._orders.freshen(chunk)
            for segment in chunk.segments:
                if segment.state is SegmentState.HOST:
                    self._slots.touch(segment.slot)
            self.changes.append((HostChange.USED, chunk))

    @property
    def size_bytes(self) -> int:
        """Bytes of all slots together."""
        return self._slots.size_bytes

    def free_bytes(self) -> int:
        """Bytes of the slots that could be allocated now."""
        return self._slots.free_bytes()

    def coldest(self, order: Policy | None = None) -> Iterator[Chunk]:
        """Chunks in the order in which they would be evicted: of all tenants, or by `order`."""
        return self._orders.coldest(order)

    def slot_bytes(self, segment: HostSegment) -> int:
        """Bytes of the slot that this segment has or would get."""
        return self._slots.slot_bytes(segment.chunk.realm.slot_classes[segment.rank])

    def chunk_bytes(self, chunk: Chunk) -> int:
        """Bytes of the slots of all ranks that are known."""
        return self.full_bytes(chunk.realm)

    def full_bytes(self, realm: Realm) -> int:
        """Bytes of one chunk's slots, of all ranks that are known."""
        classes = realm.slot_classes
        return sum(self._slots.slot_bytes(class_id) for class_id in classes if class_id >= 0)

    def reserve(self, segment: HostSegment, cause: Cause, retention: Retention = FOR_EVER) -> bool:
        """Give an absent segment a slot to be filled (GATHER or READ). False if there is none."""
        chunk = segment.chunk
        # Its other ranks' segments may be evictable; they are no price for this one's slot.
        self._directory.pin(chunk)
        num_bytes = self.slot_bytes(segment)
        within = self._make_room(chunk.tenant, num_bytes)
        slot = self._allocate(chunk.realm.slot_classes[segment.rank]) if within else None
        chunk.pins -= 1
        if slot is None:
            self._count_dropped(chunk.tenant, cause, within=within)
            return False
        self._apply(chunk, retention)
        tag = slot_tag(chunk.tenant, Retention(chunk.expires_at, stays=chunk.stays))
        if any(tag):
            self._slots.set_tag(slot, tag)
        self._tenants.charge(chunk.tenant, num_bytes)
        self._directory.move(segment, cause)
        segment.slot = slot
        segment.running = 1
        return True

    def _apply(self, chunk: Chunk, retention: Retention) -> None:
        """A segment of a chunk comes, with what was said of it: the least of all holds."""
        if chunk.vacant:
            # What was said of an earlier filling went with it.
            chunk.expires_at, chunk.stays = math.inf, False
        chunk.stays |= retention.stays
        if retention.expires_at < chunk.expires_at:
            chunk.expires_at = retention.expires_at
            self._expiries.add(chunk.expires_at, chunk)

    def expire(self, now: float) -> None:
        """Forget what is past its time: from now on nobody finds it."""
        for due in self._expiries.due(now):
            if isinstance(due, RestoredSlot):
                self._expire_unclaimed(due)
            elif not due.detached and not due.vacant and due.expires_at <= now:
                self._counters.chunks_expired += 1
                self._remove(due)

    def _expire_unclaimed(self, found: RestoredSlot) -> None:
        if self.restored_slots.holds(found):
            self.restored_slots.claim(found)
            self._give_back(found.slot)

    def arrived(self, segment: HostSegment, num_blocks: int, parent: bytes) -> bool:
        """The slot was filled and sealed. False if its chunk was removed in the meantime."""
        if segment.state is SegmentState.ZOMBIE:
            self.release(segment)
            return False
        segment.running -= 1
        self._slots.seal(segment.slot)
        self._has_come(segment, Cause.ARRIVED, num_blocks, parent)
        if segment.chunk.loadable:
            self.changes.append((HostChange.COMPLETE, segment.chunk))
        return True

    def _has_come(self, segment: HostSegment, cause: Cause, num_blocks: int, parent: bytes) -> None:
        chunk = segment.chunk
        segment.num_blocks = num_blocks
        segment.verified = cause is not Cause.RESTORED
        chunk.parent = parent
        self._directory.move(segment, cause)
        if chunk.hosted == 1:
            self._orders.enter(chunk)

    def keep(self, chunk: Chunk) -> None:
        """One more session keeps a chunk. It is no victim: a search would only step over it."""
        if chunk.hosted and not chunk.detached:
            self._orders.forget(chunk)
        chunk.kept += 1

    def let_go(self, chunk: Chunk) -> None:
        """One session less keeps it; with the last one it may be evicted again, as if used now."""
        chunk.kept -= 1
        if chunk.hosted and not chunk.detached:
            self._orders.enter(chunk)

    def holds(self, realm: Realm) -> bool:
        """Whether a realm has slots beside those of its chunks: zombies, or some to adopt."""
        return any(zombie.chunk.realm is realm for zombie in self.zombies) or any(
            adopting is realm for adopting, _, _ in self._adoptions
        )

    def give_up(self, realm: Realm, chunks_max: int) -> int:
        """Evict up to so many chunks of a realm; returns how many that were."""
        victims = [
            chunk
            for chunk in islice(realm.chunks.values(), chunks_max)
            if chunk.pins == 0 and not chunk.busy
        ]
        for chunk in victims:
            self._evict(chunk)
        return len(victims)

    # --- after a restart -----------------------------------------------------------------------

    def restore(self, found: tuple[RestoredSlot, ...]) -> None:
        """Take in what the pool still held at the start, for whoever comes for it."""
        self.allocated.update(one.slot for one in found)
        self.restored_slots.restore(found)
        self._counters.slots_restored += len(found)
        for one in found:
            if one.expires_at < math.inf:
                self._expiries.add(one.expires_at, one)

    def adopt(self, realm: Realm, rank: int, namespace: bytes) -> None:
        """Have the slots that a rank, whose layout was just learnt, stored earlier become segments.

        They do when `adopt_some` is called, in the order in which they were stored and used.
        """
        layout = realm.layouts[rank]
        assert layout is not None, "just learnt"
        found = self.restored_slots.matching(namespace, layout, realm.slot_classes[rank])
        sealed = sorted(found, key=lambda one: one.sealed)
        used = sorted((one for one in found if one.used > one.sealed), key=lambda one: one.used)
        history = heapq.merge(
            (_Moment(one.sealed, False, one) for one in sealed),
            (_Moment(one.used, True, one) for one in used),
            key=lambda moment: moment[:2],
        )
        if found:
            self._adoptions.append((realm, rank, history))

    @property
    def adopting(self) -> bool:
        """Whether there is more to adopt."""
        return bool(self._adoptions)

    def adopt_some(self, moments_max: int) -> bool:
        """Go on with so much of what was to be adopted; whether there is more.

        The history of slots is told to the policy as it was, so that it orders their chunks as
        before. Between two calls a slot may have been given up, or its segment filled anew.
        """
        left = moments_max
        while self._adoptions and left:
            realm, rank, history = self._adoptions[0]
            for moment in history:
                self._relive(realm, rank, moment)
                left -= 1
                if not left:
                    break
            else:
                self._adoptions.popleft()
        return self.adopting

    def _relive(self, realm: Realm, rank: int, moment: _Moment) -> None:
        found = moment.found
        if not moment.was_use:
            if self.restored_slots.holds(found):
                self._adopt(realm, rank, found)
            return
        chunk = realm.chunks.get(found.key)
        if chunk is None:
            return
        segment = chunk.segments[rank]
        if segment.slot == found.slot and segment.state is SegmentState.HOST:
            self._orders.freshen(chunk)

    def _adopt(self, realm: Realm, rank: int, found: RestoredSlot) -> None:
        chunk = self._directory.open_chunk(realm, found.key, found.tenant)
        segment = chunk.segments[rank]
        if segment.state is not SegmentState.ABSENT:
            # Another slot has it: two ranks, or two realms, of one segment. This one stays here.
            return
        self.restored_slots.claim(found)
        self._directory.pin(chunk)
        num_bytes = self.slot_bytes(segment)
        within = self._make_room(chunk.tenant, num_bytes)
        chunk.pins -= 1
        if not within:
            # Its tenant's limit is lower than it was.
            self._give_back(found.slot)
            self._directory.settle(chunk)
            return
        self._apply(chunk, Retention(found.expires_at, stays=found.stays))
        self._tenants.charge(chunk.tenant, num_bytes)
        segment.slot = found.slot
        self._has_come(segment, Cause.RESTORED, found.num_blocks, found.parent)
        if chunk.loadable:
            self._counters.chunks_restored += 1
            self.changes.append((HostChange.RESTORED, chunk))

    def _give_back(self, slot: int) -> None:
        self._counters.slots_unclaimed_dropped += 1
        self.allocated.remove(slot)
        self._slots.free(slot)

    # --- endings -------------------------------------------------------------------------------

    def failed(self, segment: HostSegment) -> None:
        """The slot was not filled; it is free again."""
        if segment.state is SegmentState.ZOMBIE:
            self.release(segment)
            return
        segment.running -= 1
        self._directory.move(segment, Cause.FAILED)
        self._free(segment)
        self._directory.settle(segment.chunk)

    def hold(self, segment: HostSegment) -> None:
        """A scatter or write starts on a sealed slot."""
        assert segment.state is SegmentState.HOST, segment.state
        segment.running += 1

    def release(self, segment: HostSegment) -> None:
        """What was held, or still ran on a zombie, has ended."""
        segment.running -= 1
        if segment.state is SegmentState.ZOMBIE and segment.running == 0:
            self._bury(segment)

    def quarantine(self, chunk: Chunk) -> None:
        """Remove a chunk with a corrupt slot from sight, at once and whole."""
        if chunk.detached:
            return
        self._counters.quarantined_host += 1
        self._remove(chunk)

    def _remove(self, chunk: Chunk) -> None:
        """Take a chunk out of sight; what runs on its slots ends first."""
        if chunk.hosted:
            self._orders.forget(chunk)
        self._directory.detach(chunk)
        for segment in chunk.segments:
            if segment.state is SegmentState.ZOMBIE:
                self._slots.unseal(segment.slot)
                self.zombies.add(segment)
                if segment.running == 0:
                    self._bury(segment)
        self.changes.append((HostChange.REMOVED, chunk))

    def clear(self) -> None:
        """Evict every chunk that may be evicted, and give up what nobody claimed."""
        self._adoptions.clear()
        while (slot := self.restored_slots.give_up(-1)) is not None:
            self._give_back(slot)
        for realm in self._directory.realms.values():
            for chunk in list(realm.chunks.values()):
                if chunk.hosted and chunk.pins == 0 and not chunk.busy:
                    self._evict(chunk)

    def _bury(self, zombie: HostSegment) -> None:
        self._directory.move(zombie, Cause.ENDED)
        self.zombies.remove(zombie)
        self._free(zombie)

    def _free(self, segment: HostSegment) -> None:
        slot, segment.slot = segment.slot, -1
        self.allocated.remove(slot)
        self._slots.free(slot)
        self._tenants.credit(segment.chunk.tenant, self.slot_bytes(segment))

    def _count_dropped(self, tenant: bytes, cause: Cause, *, within: bool) -> None:
        counters, storing = self._counters, cause is Cause.GATHER
        counters.stores_dropped_full += storing and within
        counters.reads_dropped_full += not storing and within
        counters.stores_dropped_quota += storing and not within
        counters.reads_dropped_quota += not storing and not within
        self._tenants.counters(tenant).dropped_quota += not within

    def _make_room(self, tenant: bytes, num_bytes: int) -> bool:
        """Have a tenant with a limit evict chunks of its own until it may have so much more."""
        if self._tenants.quota(tenant).host_bytes_max is None:
            return True
        account = self._tenants.account(tenant)
        assert account.quota.host_bytes_max is not None, "just looked up"
        assert account.order is not None, "a tenant with a limit has an order"
        left = account.quota.host_bytes_max - num_bytes
        tries = 0
        while 0 <= left < account.host_bytes and tries < EVICTIONS_PER_SLOT_MAX:
            victim = self._victim(account.order, lambda _: True)
            if victim is None:
                break
            self._evict(victim)
            tries += 1
        fits = account.host_bytes <= left
        self._tenants.settle(tenant)
        return fits

    def _allocate(self, class_id: int) -> int | None:
        slot = self._slots.allocate(class_id)
        tries = 0
        # What nobody has claimed goes first, also where it takes several for one slot.
        while slot is None and tries < EVICTIONS_PER_SLOT_MAX:
            given = self.restored_slots.give_up(class_id)
            if given is None:
                break
            self._give_back(given)
            slot = self._slots.allocate(class_id)
            tries += 1
        if slot is None:
            # A victim of the same class gives exactly what is needed, whatever else it holds.
            victim = self._victim(self._policy, lambda chunk: self._has_slot_of(chunk, class_id))
            if victim is not None:
                self._evict(victim)
                slot = self._slots.allocate(class_id)
        tries = 0
        while slot is None and tries < EVICTIONS_PER_SLOT_MAX:
            victim = self._victim(self._policy, lambda _: True)
            if victim is None:
                return None
            self._evict(victim)
            slot = self._slots.allocate(class_id)
            tries += 1
        if slot is not None:
            assert slot not in self.allocated, f"slot {slot} was given out twice"
            self.allocated.add(slot)
        return slot

    def _victim(self, order: Policy, fits: Callable[[Chunk], bool]) -> Chunk | None:
        for chunk in islice(self._orders.coldest(order), VICTIMS_SCANNED_MAX):
            if chunk.pins == 0 and not chunk.busy and fits(chunk):
                return chunk
        return None

    def _has_slot_of(self, chunk: Chunk, class_id: int) -> bool:
        return any(
            segment.state is SegmentState.HOST and self._slots.class_of(segment.slot) == class_id
            for segment in chunk.segments
        )

    def _evict(self, chunk: Chunk) -> None:
        self._counters.chunks_evicted += 1
        self._tenants.counters(chunk.tenant).chunks_evicted += 1
        self._orders.forget(chunk)
        for segment in chunk.segments:
            if segment.state is SegmentState.HOST:
                self._directory.move(segment, Cause.EVICTED)
                self._free(segment)
        self.changes.append((HostChange.REMOVED, chunk))
        self._directory.settle(chunk)

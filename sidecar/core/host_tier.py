"""Slots of the host tier: allocation, eviction, and adoption of restored slots.

Owns the ledger of slots between the pool (which allocates them) and the directory (which says what
they hold), the orders of eviction, and zombies: slots of detached chunks on which a copy, read or
write still runs. Does not decide what to store, read or write, nor what goes first (`eviction.py`).

Invariants:

* A slot is freed only when nothing runs on it. The allocated slots are those of segments, zombies
  and `RestoredSlots`.
* A tenant is charged for exactly the slots of its chunks.
* A slot is sealed in the pool while its segment is HOST, or it is unclaimed.
* A chunk is in the orders of eviction while one of its segments is HOST (otherwise a chunk whose
  other ranks never arrive could not be evicted), it is in the directory, and neither pinned by a
  request nor kept for the store: in the order of all tenants, and in that of its tenant if it has
  a limit.
* An expired chunk cannot be found, even if it is pinned.
"""

import enum
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

from sidecar.core.commands import Counters, RestoredSlot
from sidecar.core.directory import Cause, Chunk, Directory, HostSegment, Realm, SegmentState
from sidecar.core.eviction import EvictionOrders
from sidecar.core.restored import Moment, RestoredSlots, SlotAllocator
from sidecar.core.retention import FOR_EVER, USES_MAX, Expiries, Gone, Retention, slot_tag
from sidecar.core.tenants import Tenants
from sidecar.protocol import Use
from tiers.kv.layout import ChunkLayout
from tiers.policy import Policy
from tiers.policy.key import Left

VICTIMS_SCANNED_MAX: Final = 4096
"""Entries of the eviction order that one search examines, in up to 7 ms. The coldest chunks may be
leased by requests that wait: these are a million tokens in chunks of 256."""
EVICTIONS_PER_SLOT_MAX: Final = 64
"""Bound of each loop that makes room for one slot."""
UNUSABLE_SHARE_MAX: Final = 1 / 16
"""Part of the pool that may be free in slabs of other sizes before no more is freed in them."""
UNCLAIMED_PER_SLOT_MAX: Final = 1024
"""The same for slots of an earlier run, which cost nothing: a slab has up to hundreds."""


class HostChange(enum.Enum):
    """What happened to a chunk of the host tier."""

    COMPLETE = "complete"
    """The segments of all ranks are there."""
    RESTORED = "restored"
    """They are there again after a restart."""
    USED = "used"
    STORE_FAILED = "store_failed"
    """A worker's copy into a slot failed."""
    REMOVED = "removed"


class Reservation(enum.Enum):
    """Whether a segment got a slot."""

    MADE = "made"
    FULL = "full"
    """No slot could be freed, or its tenant is at its limit."""
    REFUSED = "refused"
    """The policy prefers every chunk that would have to go."""


class HostTier:
    """Slots, and the chunks in them. Other parts learn from `changes` what happened."""

    def __init__(
        self,
        directory: Directory,
        slots: SlotAllocator,
        policy: Policy,
        counters: Counters,
        tenants: Tenants,
        *,
        writes_all: bool = False,
        curve_keys_max: int = 0,
    ) -> None:
        self._writes_all = writes_all
        self._directory = directory
        self.slots = slots
        unwritten_in = slots if writes_all else None
        self.orders = EvictionOrders(directory, policy, tenants, curve_keys_max, unwritten_in)
        self._counters = counters
        self._tenants = tenants
        self.now = 0.0
        self.changes: deque[tuple[HostChange, Chunk]] = deque()
        """What happened, oldest first, until the engine has taken it."""
        self.allocated: set[int] = set()
        self.zombies: set[HostSegment] = set()
        self.restored_slots = RestoredSlots(slots)
        self._expiries = Expiries[Chunk | RestoredSlot](self._expires)
        self._searches: dict[tuple[Policy | None, int | None], Iterator[Chunk]] = {}
        """Searches for victims that this event began, by order and class of slots."""
        self.adoptions: deque[tuple[Realm, int, Iterator[Moment]]] = deque()
        """Slots to adopt, by realm and rank."""

    def register_layout(
        self, realm: Realm, rank: int, layout: ChunkLayout, namespace: bytes, slot_bytes: int
    ) -> None:
        """Set the geometry of a rank, once, and the size of its slots.

        The slots that this rank stored in an earlier run become segments with `adopt`.
        """
        realm.layouts[rank] = layout
        realm.segment_sources.register(rank, layout.segment)
        realm.slot_bytes[rank] = slot_bytes
        if history := self.restored_slots.history(namespace, layout):
            self.adoptions.append((realm, rank, iter(history)))

    def use(self, realms: Sequence[Realm], message: Use) -> None:
        """Note the prompt of a request, whether its chunks are here or not."""
        for chunk in self.orders.use(realms, message):
            chunk.uses = min(chunk.uses + 1, USES_MAX)
            if not chunk.hosted or chunk.detached:
                continue
            chunk.used_at = self.now
            for segment in chunk.segments:
                if segment.state is SegmentState.HOST:
                    self.slots.touch(segment.slot, chunk.uses)
            self.changes.append((HostChange.USED, chunk))

    def expected_hit_ratios(self) -> dict[float, float]:
        """Which part of the chunks of prompts an LRU would find, by multiple of this memory."""
        unclaimed_bytes = self.restored_slots.num_bytes
        used_bytes = self.slots.size_bytes - self.slots.free_bytes() - unclaimed_bytes
        chunks = self._directory.chunks_in_host
        if not chunks:
            return {}
        return self.orders.expected_hit_ratios(self.slots.size_bytes * chunks / used_bytes)

    def request_pin(self, chunk: Chunk) -> None:
        """A session keeps a chunk. It leaves the orders: a search would only step over it."""
        if chunk.hosted and not chunk.detached:
            self.orders.leave(chunk, Left.PINNED)
        chunk.request_pins += 1

    def request_unpin(self, chunk: Chunk) -> None:
        """A session keeps it no longer; after the last one it enters the orders as just used."""
        chunk.request_pins -= 1
        if chunk.hosted and not chunk.detached:
            self.orders.enter(chunk)

    # --- filling a slot ------------------------------------------------------------------------

    def reserve(
        self, segment: HostSegment, cause: Cause, retention: Retention = FOR_EVER
    ) -> Reservation:
        """Give an absent segment a slot to be filled (GATHER or READ), and set its retention.

        The chunk's parent is known, if it has one.
        """
        chunk = segment.chunk
        # Pinned, because other segments of this chunk must not be evicted for this slot.
        chunk.pins += 1
        new = retention if cause is Cause.GATHER else None
        own = self._tenants.full(chunk.tenant, segment.slot_bytes)
        refused = own is not None and self._refuses(chunk, new, own)
        within_limit = not refused and self._make_room(chunk.tenant, segment.slot_bytes)
        slot = None
        if within_limit:
            slot = self._allocate_free(segment)
            refused = slot is None and self._refuses(chunk, new)
            if slot is None and not refused:
                slot = self._evict_for(segment)
        chunk.pins -= 1
        if slot is None and cause is Cause.GATHER:
            self._directory.not_kept(chunk, Gone.EVICTED if within_limit else Gone.QUOTA)
        if refused:
            self._counters.stores_refused += 1
            return Reservation.REFUSED
        if slot is None:
            self._count_dropped(chunk.tenant, cause, within_limit=within_limit)
            return Reservation.FULL
        self._retain(chunk, retention)
        if chunk.tenant or chunk.retention != FOR_EVER:
            self.slots.set_tag(slot, slot_tag(chunk.tenant, chunk.retention))
        self._tenants.charge(chunk.tenant, segment.slot_bytes)
        assert slot not in self.allocated, f"slot {slot} was given out twice"
        self.allocated.add(slot)
        self._directory.move(segment, cause)
        segment.slot = slot
        segment.running = 1
        return Reservation.MADE

    def _refuses(self, chunk: Chunk, new: Retention | None, order: Policy | None = None) -> bool:
        """Whether an order has no room for a `new` chunk, and the store does not need it either."""
        if new is None or self.orders.admits(chunk, order):
            return False
        return new.stays or not self._writes_all

    def filled(self, segment: HostSegment, num_blocks: int, parent: bytes) -> bool:
        """The slot was filled and sealed. False if its chunk was removed in the meantime."""
        if segment.state is SegmentState.ZOMBIE:
            self.release(segment)
            return False
        segment.running -= 1
        self.slots.seal(segment.slot)
        self._publish(segment, Cause.FILLED, num_blocks, parent)
        if segment.chunk.loadable:
            self.changes.append((HostChange.COMPLETE, segment.chunk))
        return True

    def failed(self, segment: HostSegment) -> None:
        """The slot was not filled: free it."""
        if segment.state is SegmentState.ZOMBIE:
            self.release(segment)
            return
        if segment.state is SegmentState.STORING:
            self.changes.append((HostChange.STORE_FAILED, segment.chunk))
        segment.running -= 1
        self._directory.move(segment, Cause.FAILED)
        self._free(segment)
        self._directory.drop_if_unused(segment.chunk)

    def _publish(self, segment: HostSegment, cause: Cause, num_blocks: int, parent: bytes) -> None:
        chunk, new = segment.chunk, segment.state is SegmentState.STORING
        segment.num_blocks = num_blocks
        segment.verified = cause is not Cause.RESTORED
        chunk.parent = parent
        chunk.used_at = self.now
        self._directory.move(segment, cause)
        if chunk.hosted == 1:
            self.orders.enter(chunk, new=new)

    def _retain(self, chunk: Chunk, retention: Retention) -> None:
        """Apply the retention of one segment: the strictest of all segments counts."""
        # The retention of earlier contents left with them.
        before = FOR_EVER if chunk.empty else chunk.retention
        chunk.retention = before.stricter(retention)
        if retention.expires_at < before.expires_at:
            self._expiries.add(retention.expires_at, chunk)

    def _count_dropped(self, tenant: bytes, cause: Cause, *, within_limit: bool) -> None:
        counters, storing = self._counters, cause is Cause.GATHER
        counters.stores_dropped_full += storing and within_limit
        counters.reads_dropped_full += not storing and within_limit
        counters.stores_dropped_quota += storing and not within_limit
        counters.reads_dropped_quota += not storing and not within_limit
        self._tenants.counters(tenant).dropped_quota += not within_limit

    # --- using and freeing a slot --------------------------------------------------------------

    def hold(self, segment: HostSegment) -> None:
        """A scatter or write starts on a sealed slot."""
        assert segment.state is SegmentState.HOST, segment.state
        segment.running += 1

    def release(self, segment: HostSegment) -> None:
        """Work on a held slot, or on a zombie, ended."""
        segment.running -= 1
        if segment.state is SegmentState.ZOMBIE and segment.running == 0:
            self._free_zombie(segment)

    def quarantine(self, chunk: Chunk) -> None:
        """Remove a chunk with a corrupt slot, at once and with all segments."""
        if not chunk.detached:
            self._counters.quarantined_host += 1
            self._remove(chunk, None)

    def expire(self, now: float) -> None:
        """An event begins: remove the chunks and free the unclaimed slots whose time is over."""
        self._searches.clear()
        for due in self._expiries.due(now):
            if isinstance(due, RestoredSlot):
                self.restored_slots.claim(due)
                self._free_unclaimed(due.slot)
            else:
                self._counters.chunks_expired += 1
                self._remove(due, Gone.EXPIRED)

    def _expires(self, what: Chunk | RestoredSlot, expires_at: float) -> bool:
        if isinstance(what, RestoredSlot):
            return what in self.restored_slots
        return not what.detached and not what.empty and what.retention.expires_at == expires_at

    def _remove(self, chunk: Chunk, gone: Gone | None) -> None:
        """Detach a chunk. Work on its slots ends first."""
        self._directory.not_kept(chunk, gone)
        if chunk.hosted:
            self.orders.leave(chunk, Left.GONE)
        self._directory.detach(chunk)
        for segment in chunk.segments:
            if segment.state is SegmentState.ZOMBIE:
                self.slots.unseal(segment.slot)
                self.zombies.add(segment)
                if segment.running == 0:
                    self._free_zombie(segment)
        self.changes.append((HostChange.REMOVED, chunk))

    def _free_zombie(self, zombie: HostSegment) -> None:
        self._directory.move(zombie, Cause.ENDED)
        self.zombies.remove(zombie)
        self._free(zombie)

    def _free(self, segment: HostSegment) -> None:
        slot, segment.slot = segment.slot, -1
        self.allocated.remove(slot)
        self.slots.free(slot)
        self._tenants.credit(segment.chunk.tenant, segment.slot_bytes)

    def _free_unclaimed(self, slot: int) -> None:
        self._counters.slots_unclaimed_dropped += 1
        self.allocated.remove(slot)
        self.slots.free(slot)

    # --- eviction ------------------------------------------------------------------------------

    def busy(self, realm: Realm) -> bool:
        """Whether a realm has zombies, or slots to adopt."""
        return any(zombie.chunk.realm is realm for zombie in self.zombies) or any(
            adopting is realm for adopting, _, _ in self.adoptions
        )

    def evict_realm(self, realm: Realm, chunks_max: int) -> int:
        """Evict up to `chunks_max` chunks of a realm that may be evicted; returns how many."""
        victims = [
            chunk
            for chunk in islice(realm.chunks.values(), chunks_max)
            if chunk.pins == 0 and not chunk.busy
        ]
        for chunk in victims:
            self._evict(chunk, None)
        return len(victims)

    def clear(self) -> None:
        """Evict every chunk that may be evicted, and free all unclaimed slots."""
        self.adoptions.clear()
        while (slot := self.restored_slots.give_up(0)) is not None:
            self._free_unclaimed(slot)
        for realm in self._directory.realms.values():
            self.evict_realm(realm, len(realm.chunks))

    def _make_room(self, tenant: bytes, num_bytes: int) -> bool:
        """Evict chunks of a tenant with a limit until it may have `num_bytes` more."""
        limit = self._tenants.quota(tenant).host_bytes_max
        if limit is None:
            return True
        account = self._tenants.account(tenant)
        left = limit - num_bytes
        for _ in range(EVICTIONS_PER_SLOT_MAX):
            victim = self._victim(account.order) if 0 <= left < account.host_bytes else None
            if victim is None:
                break
            self._evict(victim, Gone.QUOTA)
        fits = account.host_bytes <= left
        self._tenants.close_if_unused(tenant)
        return fits

    def _allocate_free(self, segment: HostSegment) -> int | None:
        """A slot that is free, or that nobody has claimed since the restart."""
        slot_bytes = segment.slot_bytes
        slot = self.slots.allocate(slot_bytes)
        # Unclaimed slots go first, even several for one.
        for _ in range(UNCLAIMED_PER_SLOT_MAX):
            unclaimed = self.restored_slots.give_up(slot_bytes) if slot is None else None
            if unclaimed is None:
                break
            self._free_unclaimed(unclaimed)
            slot = self.slots.allocate(slot_bytes)
        return slot

    def _evict_for(self, segment: HostSegment) -> int | None:
        slot_bytes = segment.slot_bytes
        # It frees exactly what is needed. What is colder and of another size goes first, as many
        # bytes as the slot has: else the memory of a model that is not used any more would never
        # be another's. But not while much is free that is of no use, because a slot of its slab is
        # needed.
        moves = self.slots.free_bytes() < self.slots.size_bytes * UNUSABLE_SHARE_MAX
        left = slot_bytes if moves else 0
        for evictions_left in reversed(range(EVICTIONS_PER_SLOT_MAX)):
            of_the_size = left <= 0 or not evictions_left
            victim = (of_the_size and self._victim(slot_bytes=slot_bytes)) or self._victim()
            if victim is None:
                return None
            left -= victim.realm.chunk_bytes
            self._evict(victim, Gone.EVICTED)
            slot = self.slots.allocate(slot_bytes)
            if slot is not None:
                return slot
        return None

    def _victim(self, order: Policy | None = None, slot_bytes: int | None = None) -> Chunk | None:
        """A chunk of an order that may be evicted now, with a slot of a size if given.

        It is the coldest, or else the next that this event's search finds: one that began again for
        each slot would step over the same chunks each time.
        """
        coldest = next(self.orders.victims(order), None)
        if coldest is None or self._may_go(coldest, slot_bytes):
            return coldest
        search = self._searches.get((order, slot_bytes))
        if search is None:
            search = self._searches[order, slot_bytes] = self._search(order, slot_bytes)
        return next(search, None)

    def _search(self, order: Policy | None, slot_bytes: int | None) -> Iterator[Chunk]:
        left = VICTIMS_SCANNED_MAX
        for chunk in self.orders.victims(order):
            if self._may_go(chunk, slot_bytes):
                yield chunk
            elif not (left := left - 1):
                return

    def _may_go(self, chunk: Chunk, slot_bytes: int | None) -> bool:
        """Whether a chunk may be evicted now, and has a slot of a size if given."""
        return (chunk.pins == 0 and not chunk.busy) and (
            slot_bytes is None
            or any(
                segment.state is SegmentState.HOST
                and self.slots.class_of(segment.slot) == slot_bytes
                for segment in chunk.segments
            )
        )

    def _evict(self, chunk: Chunk, gone: Gone | None) -> None:
        self._directory.not_kept(chunk, gone)
        self._counters.chunks_evicted += 1
        self._tenants.counters(chunk.tenant).chunks_evicted += 1
        self.orders.leave(chunk, Left.GONE if gone is None else Left.EVICTED)
        for segment in chunk.segments:
            if segment.state is SegmentState.HOST:
                self._directory.move(segment, Cause.EVICTED)
                self._free(segment)
        self.changes.append((HostChange.REMOVED, chunk))
        self._directory.drop_if_unused(chunk)

    # --- after a restart -----------------------------------------------------------------------

    def restore(self, restored: tuple[RestoredSlot, ...]) -> None:
        """Take over the slots that the pool still held at the start."""
        self.allocated.update(one.slot for one in restored)
        self.restored_slots.restore(restored)
        self._counters.slots_restored += len(restored)
        for one in restored:
            if one.retention.expires_at < FOR_EVER.expires_at:
                self._expiries.add(one.retention.expires_at, one)

    def adopt(self, moments_max: int) -> bool:
        """Replay up to `moments_max` stores and uses of queued slots; returns whether more remain.

        The replay gives the policy the same order as before the restart. Between two calls a slot
        may have been given up, or its segment filled again.
        """
        left = moments_max
        while self.adoptions and left:
            realm, rank, history = self.adoptions[0]
            layout, slot_bytes = realm.layouts[rank], realm.slot_bytes[rank]
            assert layout is not None, "it was registered"
            for _, was_use, restored in islice(history, left):
                left -= 1
                if was_use:
                    self._replay_use(realm, rank, restored)
                elif self.restored_slots.fits(restored, layout, slot_bytes):
                    self._adopt(realm, rank, restored)
            if left:
                self.adoptions.popleft()
        return bool(self.adoptions)

    def _replay_use(self, realm: Realm, rank: int, restored: RestoredSlot) -> None:
        chunk = realm.chunks.get(restored.key)
        if chunk is not None and chunk.hosted == 1:
            # The slots of further ranks tell of the same use.
            segment = chunk.segments[rank]
            if segment.slot == restored.slot and segment.state is SegmentState.HOST:
                self.orders.replay_use(chunk)
                chunk.uses = restored.uses

    def _adopt(self, realm: Realm, rank: int, restored: RestoredSlot) -> None:
        chunk = self._directory.open_chunk(realm, restored.key, restored.tenant)
        segment = chunk.segments[rank]
        if segment.state is not SegmentState.ABSENT:
            # Another slot holds this segment, of another rank or realm. This one stays unclaimed.
            return
        self.restored_slots.claim(restored)
        chunk.pins += 1
        within_limit = self._make_room(chunk.tenant, segment.slot_bytes)
        chunk.pins -= 1
        if not within_limit:
            # The limit of its tenant was lowered.
            self._free_unclaimed(restored.slot)
            self._directory.drop_if_unused(chunk)
            return
        self._retain(chunk, restored.retention)
        self._tenants.charge(chunk.tenant, segment.slot_bytes)
        segment.slot = restored.slot
        if not chunk.hosted:
            # Without the last use, which is replayed.
            chunk.uses = max(0, restored.uses - (restored.used > restored.sealed))
        self._publish(segment, Cause.RESTORED, restored.num_blocks, restored.parent)
        if chunk.loadable:
            self._counters.chunks_restored += 1
            self.changes.append((HostChange.RESTORED, chunk))

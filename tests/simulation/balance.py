"""Rules over the whole of a sidecar, compared after every event: slots, pins, queues, the index.

Owns the comparison, and the shadow of whose each slot is. What was asked and how it ended is
`conduct.py`'s, which bytes are where is `images.py`'s.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sidecar.core.commands import Event, ForgetRealms, Gather, Read, RestoredSlot, Tick
from sidecar.core.directory import Chunk, Directory, SegmentState
from sidecar.core.lookups import OpenLookup
from sidecar.core.tenants import TenantRules
from tests.engine_invariants import check
from tests.simulation.clock import Violation, World
from tests.simulation.content import Model, Truth
from tiers.kv.index import ANYWHERE, FLAG_HOST, FLAG_STORE, IndexReader, tag_of, tags_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from sidecar.core.engine import Engine
    from sidecar.sessions.namespaces import RealmLayout
    from tests.simulation.process import SidecarProcess

Sealed = tuple[Model, bytes, int, int]
"""What a slot was sealed with: (model, key, rank, num_blocks)."""


class Balance:
    """The rules of one life of a sidecar. `sealed` is kept by the code that sees copies end."""

    def __init__(
        self,
        world: World,
        truth: Truth,
        rules: TenantRules,
        sealed: dict[int, Sealed],
        model_of: Callable[[RealmLayout], Model],
    ) -> None:
        self._world = world
        self._truth = truth
        self._rules = rules
        self._sealed = sealed
        self._model_of = model_of
        self.tenants: dict[int, bytes] = {}
        """Whose each slot is."""
        self._models: dict[int, Model] = {}
        self._short = False
        self._giving_up: set[int] = set()
        """Realms that are to be forgotten."""
        self._held: dict[Chunk, int] = {}
        self._answered: set[OpenLookup] = set()
        self._readers: dict[int, tuple[Any, IndexReader]] = {}
        self._known_tags: dict[bytes, Any] = {}

    def close(self) -> None:
        """Give back the mappings."""
        for _, reader in self._readers.values():
            reader.close()
        self._readers.clear()

    def is_there(self, chunk: Chunk) -> bool:
        """Whether every rank's slot was sealed with this chunk, as far as anybody could see."""
        model = self._models[chunk.realm.realm_id]
        return not chunk.detached and all(
            self._sealed.get(segment.slot, ())[:3] == (model, chunk.key, segment.rank)
            for segment in chunk.segments
        )

    # --- slots ---------------------------------------------------------------------------------

    def begins(self, process: SidecarProcess, event: Event) -> None:
        """An event is about to be handled."""
        self._short = False
        self._giving_up = set(event.realm_ids) if isinstance(event, ForgetRealms) else set()
        if self._giving_up.intersection(
            group.realm_id
            for one in process.dispatcher.engine.sessions.values()
            for group in one.groups
        ):
            raise Violation("a realm with a session is not given up", f"{event}")
        for realm in process.dispatcher.realms.all():
            if realm.realm_id not in self._models:
                self._models[realm.realm_id] = self._model_of(realm)

    def allocated(self, offset: int | None) -> None:
        """The pool was asked for a slot."""
        self._short = self._short or offset is None

    def filled(self, work: Gather | Read | RestoredSlot) -> None:
        """A slot is being filled for somebody, or was in an earlier life."""
        self.tenants[work.slot] = work.tenant

    def freed(self, offset: int) -> None:
        """A slot went back to the pool."""
        self._sealed.pop(offset, None)
        self.tenants.pop(offset, None)

    def evicted(self, chunk: Chunk) -> None:
        """A chunk leaves for another. Where slots are left, only for its tenant's own."""
        forgotten = chunk.realm.realm_id in self._giving_up
        if not (self._short or forgotten) and self._limit_of(chunk.tenant) is None:
            raise Violation("a tenant at its limit pushes out nobody else", chunk.key.hex()[:12])

    def _limit_of(self, tenant: bytes) -> int | None:
        named = self._rules.named.get(tenant)
        return (self._rules.default if named is None else named[1]).host_bytes_max

    def check(self, process: SidecarProcess, event: Event, now: float) -> None:
        """All rules but those of the index."""
        try:
            check(process.dispatcher.engine)
        except AssertionError as error:
            raise Violation("Engine.check", str(error)) from error
        self._ledger_is_balanced(process)
        self._tenants_keep_to_their_limits(process)
        self._pinned_stays(process)
        self._leases_end(process, event, now)
        self._lookups_end(process, event, now)
        self._queues_are_bounded(process)

    def _ledger_is_balanced(self, process: SidecarProcess) -> None:
        used = sum(one.slots_used for one in process.pool.stats().classes)
        allocated = process.dispatcher.engine.host.allocated
        if used != len(allocated) or allocated != self.tenants.keys():
            raise Violation(
                "the ledger of slots is balanced",
                f"pool {used}, engine {sorted(allocated)}, seen {sorted(self.tenants)}",
            )

    def _tenants_keep_to_their_limits(self, process: SidecarProcess) -> None:
        if self._rules.default.host_bytes_max is None and not self._rules.named:
            return
        held: Counter[bytes] = Counter()
        pool = process.pool
        # What nobody has come for yet is nobody's.
        unclaimed = set(process.dispatcher.engine.host.restored_slots.by_offset)
        for slot, tenant in self.tenants.items():
            if slot in unclaimed:
                continue
            held[tenant] += pool.class_of(slot)
        for tenant, num_bytes in held.items():
            limit = self._limit_of(tenant)
            if limit is not None and num_bytes > limit:
                raise Violation("a tenant keeps to its limit", f"{num_bytes} bytes of {limit}")

    def _pinned_stays(self, process: SidecarProcess) -> None:
        """A chunk that was pinned and loadable stays so, unless it is corrupt."""
        for chunk in self._held:
            if chunk.pins and not chunk.loadable and not chunk.detached:
                raise Violation("a pinned chunk stays", chunk.key.hex()[:12])
        self._held = {
            chunk: chunk.pins
            for realm in process.dispatcher.engine.directory.realms.values()
            for chunk in realm.chunks.values()
            if chunk.pins and chunk.loadable
        }

    # --- what ends -----------------------------------------------------------------------------

    def _leases_end(self, process: SidecarProcess, event: Event, now: float) -> None:
        engine = process.dispatcher.engine
        for lease in engine.leases:
            if lease.session_id not in engine.sessions:
                raise Violation("a lease ends with its session", f"lease {lease.lease_id}")
            if isinstance(event, Tick) and lease.deadline <= now:
                raise Violation("a lease ends at its deadline", f"lease {lease.lease_id}")

    def _lookups_end(self, process: SidecarProcess, event: Event, now: float) -> None:
        engine = process.dispatcher.engine
        for lookup in engine.lookups:
            name = f"lookup {lookup.lookup_id}"
            if lookup.session_id not in engine.sessions:
                raise Violation("a lookup ends with its session", name)
            if lookup.answered:
                # Where time jumped, it is answered by one tick and ended by the next.
                if isinstance(event, Tick) and lookup.expires <= now and lookup in self._answered:
                    raise Violation("pins of a lookup end at their time", name)
                continue
            if isinstance(event, Tick) and lookup.deadline <= now:
                raise Violation("a lookup ends at its deadline", name)
            for chunk in lookup.waits:
                self._comes(engine, chunk)
            if all(self.is_there(chunk) for chunk in lookup.chunks):
                raise Violation("a lookup is answered when all is there", name)
        self._answered = {lookup for lookup in engine.lookups if lookup.answered}

    @staticmethod
    def _comes(engine: Engine, chunk: Chunk) -> None:
        for segment in chunk.segments:
            absent = segment.state is SegmentState.ABSENT
            if chunk.detached or (absent and segment not in engine.reads.queue.sessions_of):
                raise Violation("a lookup waits only for what comes", chunk.key.hex()[:12])

    def _queues_are_bounded(self, process: SidecarProcess) -> None:
        engine = process.dispatcher.engine
        limits, work = engine.limits, engine.pending_work()
        held = Counter(lease.session_id for lease in engine.leases)
        asked = Counter(lookup.session_id for lookup in engine.lookups)
        writes = engine.writes
        over = writes.pending_bytes > limits.write_queue_bytes_max
        # One chunk may wait in any case, and at the end everything.
        if over and len(writes.pending) > 1 and not engine.draining:
            raise Violation("queues are bounded", f"writes: {writes.pending_bytes} bytes")
        for name, value, most in (
            ("writes running", work.writes_running, limits.writes_inflight_max),
            ("reads running", work.reads_running, limits.reads_inflight_max),
            ("gone", len(engine.store.withdrawn), limits.quarantine_keys_max),
            ("leases", max(held.values(), default=0), limits.leases_max_per_session),
            ("lookups", max(asked.values(), default=0), limits.lookups_max_per_session),
            ("all leases", len(engine.leases), limits.shares.leases_max),
            ("all lookups", asked.total(), limits.shares.lookups_max),
            ("copies", work.copies_running, limits.shares.copies_queued_max),
            ("sessions", len(process.dispatcher.sessions), process.config.limits.sessions_max),
            ("realms", len(process.dispatcher.realms), process.config.limits.realms_max),
        ):
            if value > most:
                raise Violation("queues are bounded", f"{name}: {value} of {most}")

    # --- the index -----------------------------------------------------------------------------

    def index_is_true(self, process: SidecarProcess) -> None:
        """The shared index says HOST exactly of what can be loaded, STORE of what can be read.

        Of the rest it says why it is gone, exactly where the engine remembers that.
        """
        engine = process.dispatcher.engine
        directory: Directory = engine.directory
        expected: dict[RealmLayout, npt.NDArray[np.uint8]] = {}
        numbers = self._truth.numbers
        remembered = 0
        for realm in process.dispatcher.realms.all():
            known = directory.realms.get(realm.realm_id)
            if known is None:
                continue
            # The groups of a model share the index of the first.
            wanted = expected.setdefault(realm.indexed_in, np.zeros(len(numbers), dtype=np.uint8))
            for key, chunk in known.chunks.items():
                if self.is_there(chunk):
                    wanted[numbers[key]] |= FLAG_HOST
            # What the store holds beyond what anybody here asked for is not looked up.
            if known.stored_chunks:
                for key, number in numbers.items():
                    if known.in_store(key):
                        wanted[number] |= FLAG_STORE
        for realm, wanted in expected.items():
            found = self._reader(realm).lookup(self._tags(realm))
            flags = found & np.uint8(ANYWHERE)
            for number in np.flatnonzero(flags != wanted):
                self._differs(realm, int(number), int(flags[number]), int(wanted[number]))
            if np.any((found > ANYWHERE) & (flags > 0)):
                raise Violation("what is there is not gone", f"{found[(found > ANYWHERE)]}")
            remembered += int(np.count_nonzero(found > ANYWHERE))
        if remembered > len(engine.gone) or len(engine.gone) > engine.limits.gone_keys_max:
            raise Violation("what is gone is remembered", f"{remembered} of {len(engine.gone)}")
        if remembered:
            self._world.saw("index says why a chunk is gone")

    def _tags(self, realm: RealmLayout) -> Any:
        """Tags of all keys under a realm's salt; most were made before."""
        keys = self._truth.keys
        tags = self._known_tags.get(realm.index_salt)
        if tags is None or len(tags) < len(keys):
            fresh = tags_of(keys[0 if tags is None else len(tags) :], realm.index_salt)
            tags = fresh if tags is None else np.concatenate([tags, fresh])
            self._known_tags[realm.index_salt] = tags
        return tags

    def _differs(self, realm: RealmLayout, number: int, flags: int, expected: int) -> None:
        key = self._truth.keys[number]
        if tag_of(key, realm.index_salt) in realm.index.overflow and not flags:
            self._world.saw("index entry waits for growth")
            return
        raise Violation(
            "the index is what is there", f"{key.hex()[:12]}: says {flags}, is {expected}"
        )

    def _reader(self, realm: RealmLayout) -> IndexReader:
        writer, reader = self._readers.get(realm.realm_id, (None, None))
        if writer is not realm.index or reader is None:
            if reader is not None:
                reader.close()
            reader = IndexReader(os.dup(realm.index.fd), realm.index.size_bytes)
            self._readers[realm.realm_id] = (realm.index, reader)
        return reader

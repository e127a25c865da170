"""What is sealed, served and written is what its key says, byte for byte.

Owns the shadow of the bytes: what each slot was sealed with and which slots were damaged on
purpose, both of which outlive the sidecar as its memory does. Does not own which work runs
(`checks.py`), nor what a key must hold (`content.py`). Rules are named as in `checks.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sidecar.core.commands import Gather, Read, RestoredSlot, Scatter, Write
from sidecar.core.directory import Chunk, SegmentState
from tests.simulation.balance import Sealed
from tests.simulation.clock import Violation, World
from tests.simulation.conduct import Work
from tests.simulation.content import Fact, Model, Truth, templates_of
from tiers.catalog.names import namespace_prefix, parse_name
from tiers.errors import ChunkCorrupt

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sidecar.sessions.namespaces import RealmLayout
    from tests.simulation.engine import SimEngine
    from tests.simulation.process import SidecarProcess


@dataclass(frozen=True, slots=True)
class Place:
    """A byte of a sealed payload in the pool."""

    slot: int
    offset: int
    key: bytes
    partial: bool
    """Another rank's segment of the chunk is on its way."""


class Images:
    """Images of all lives of a node's sidecars; `died` ends one."""

    def __init__(self, world: World, truth: Truth, models: list[Model]) -> None:
        self._world = world
        self._truth = truth
        self._models = models
        self.engines: list[SimEngine] = []
        self.sealed: dict[int, Sealed] = {}
        self.damaged: set[int] = set()
        self._damaged_before: set[int] = set()
        """Writes that were to find that their slot had been damaged before they began."""

    # --- lives of sidecars ---------------------------------------------------------------------

    def come_back(self, restored: tuple[RestoredSlot, ...], owners: dict[int, bytes]) -> None:
        """A sidecar found this in its memory: exactly what the one before had sealed."""
        found = {
            one.slot: (one.namespace, one.geometry, one.key, one.num_blocks, one.tenant)
            for one in restored
        }
        expected = {
            slot: (model.digest, model.chunk_layout(rank).geometry, key, num_blocks, owners[slot])
            for slot, (model, key, rank, num_blocks) in self.sealed.items()
        }
        if found != expected:
            differing = sorted(dict(found.items() ^ expected.items()))
            raise Violation("what was sealed comes back", f"slots {differing}")
        if self.damaged:
            self._world.saw("damage outlives a sidecar")

    def died(self, dead: set[int], *, kept: bool) -> None:
        """A sidecar's life is over; `kept` says that its memory is there still, but for `dead`."""
        # In place: the ledger has it too, and slots are freed before the next life begins.
        for slot in [one for one in self.sealed if not kept or one in dead]:
            del self.sealed[slot]
        self.damaged.intersection_update(self.sealed)

    def clear(self) -> None:
        """No work runs any more."""
        self._damaged_before.clear()

    # --- slots ---------------------------------------------------------------------------------

    def begins(self, process: SidecarProcess, work: Work) -> None:
        """Work on a slot begins: it loses what it held, or serves what was sealed."""
        if isinstance(work, Gather | Read):
            self.damaged.discard(work.slot)
            self.sealed.pop(work.slot, None)
            return
        model = self.model_of(process.dispatcher.realms[work.realm_id])
        if self.sealed.get(work.slot) != (model, work.key, work.rank, work.num_blocks):
            raise Violation("only what is sealed is served", f"{work}")
        if isinstance(work, Write) and work.verify and work.slot in self.damaged:
            self._damaged_before.add(work.write_id)

    def freed(self, offset: int) -> None:
        """A slot went back to the pool."""
        self.damaged.discard(offset)

    def stays(self, work: Work, when: str) -> None:
        """A slot was called corrupt: somebody must have damaged it."""
        if work.slot not in self.damaged:
            raise Violation("what was sealed stays", f"slot {work.slot} corrupt on {when}")

    def _fact(self, key: bytes) -> Fact:
        fact = self._truth.facts.get(key)
        if fact is None:
            raise Violation("every key was made from tokens", key.hex()[:12])
        return fact

    def model_of(self, realm: RealmLayout) -> Model:
        """The simulated model of a realm."""
        return next(
            model
            for model in self._models
            if (model.digest, model.topology) == (realm.namespace_digest, realm.topology)
        )

    def filled(self, process: SidecarProcess, work: Work, num_blocks: int) -> None:
        """A slot was filled: it must hold what its key says, all of it."""
        model = self.model_of(process.dispatcher.realms[work.realm_id])
        fact = self._fact(work.key)
        if fact.num_blocks != num_blocks:
            raise Violation("a chunk is whole", f"{num_blocks} blocks of {fact.num_blocks}")
        if work.slot not in self.damaged:
            template = templates_of(model, work.rank)[num_blocks]
            image = process.pool.memory[work.slot : work.slot + template.image_bytes]
            self._is_right(model, work.rank, work.key, image, type(work).__name__)
        self.sealed[work.slot] = (model, work.key, work.rank, num_blocks)

    def _is_right(self, model: Model, rank: int, key: bytes, image: Any, what: str) -> None:
        fact = self._fact(key)
        template = templates_of(model, rank)[fact.num_blocks]
        try:
            meta = template.verify(image, key)
        except ChunkCorrupt as error:
            raise Violation("what is sealed is an image", f"{what}: {error}") from error
        payload = np.asarray(image)[template.payload_offset :][: template.payload_bytes]
        expected = model.blocks(fact.digests, rank).view(np.uint8).ravel()
        if not np.array_equal(payload, expected):
            raise Violation("a key holds its own bytes", f"{what} of {key.hex()[:12]}, rank {rank}")
        if (meta.parent, meta.token_ids) != (fact.parent, fact.token_ids):
            raise Violation("a key holds its own row", f"{what} of {key.hex()[:12]}")

    def loaded(self, process: SidecarProcess, work: Scatter) -> None:
        """A copy into an engine ended well: its blocks hold what their tokens say."""
        session = process.dispatcher.sessions.get(work.session_id)
        if session is None:
            return
        rank = self._rank_of(session)
        if rank is None:
            return
        if work.slot in self.damaged:
            self._world.saw("damage after a load")
        fact = self._fact(work.key)
        model = self.model_of(process.dispatcher.realms[work.realm_id])
        blocks = model.blocks(fact.digests, rank.rank)
        wanted = blocks[work.first_block : work.first_block + len(work.block_ids)]
        found = rank.views[rank.engine.groups.index(model)][list(work.block_ids)]
        if not np.array_equal(found, wanted):
            raise Violation("what is served is right", f"{work}")

    def _rank_of(self, session: Any) -> Any:
        for engine in self.engines:
            for rank in engine.ranks:
                if rank.wire is session.connection.wire and not engine.dead:
                    return rank
        return None

    def object_written(
        self, process: SidecarProcess, running: Iterable[Work], name: str, image: bytes
    ) -> None:
        """All pieces of an object were taken from its slot."""
        parts = parse_name(name)
        assert parts is not None
        ranks = {
            rank
            for model in self._models
            if name.startswith(namespace_prefix(model.digest))
            for rank in range(model.ranks)
            if model.segment(rank) == parts.segment
        }
        # An object may arrive after its write has failed, while that of another rank runs.
        works = [
            work
            for work in running
            if isinstance(work, Write) and work.key == parts.key and work.rank in ranks
        ]
        if any(work.slot in self.damaged for work in works):
            if any(work.write_id in self._damaged_before for work in works):
                raise Violation("a damaged slot is not written", name)
            self._world.saw("damage under a write")
            assert process.objects is not None
            process.objects.spoilt(name)
            return
        for model in self._models:
            if not name.startswith(namespace_prefix(model.digest)):
                continue
            for rank in range(model.ranks):
                if model.segment(rank) == parts.segment:
                    array = np.frombuffer(image, dtype=np.uint8)
                    self._is_right(model, rank, parts.key, array, "object")
                    return
        raise Violation("objects have names of their own", name)

    def refused(self, process: SidecarProcess, work: Work) -> None:
        """An object was called corrupt: somebody must have seen to that."""
        assert process.objects is not None
        tainted = process.objects.bucket.tainted
        if not any(work.key.hex() in name for name in tainted):
            raise Violation("a sound object is taken", f"{work}")

    def all_sealed_right(self, process: SidecarProcess) -> None:
        """Every slot that may be served holds what its key says."""
        for slot, (model, key, rank, num_blocks) in self.sealed.items():
            if slot in self.damaged:
                continue
            template = templates_of(model, rank)[num_blocks]
            image = process.pool.memory[slot : slot + template.image_bytes]
            self._is_right(model, rank, key, image, "slot")

    def sealed_payloads(self, process: SidecarProcess) -> list[Place]:
        """A place in the payload of each sealed slot."""
        places: list[Place] = []
        on_the_way = (SegmentState.STORING, SegmentState.READING)
        for slot in sorted(self.sealed):
            model, key, rank, num_blocks = self.sealed[slot]
            template = templates_of(model, rank)[num_blocks]
            within = template.payload_offset + self._world.random.randrange(template.payload_bytes)
            partial = any(
                segment.state in on_the_way
                for realm in process.dispatcher.realms.all()
                if self.model_of(realm) == model
                for chunk in [self._chunk(process, realm, key)]
                if chunk is not None
                for segment in chunk.segments
            )
            places.append(Place(slot, slot + within, key, partial))
        return places

    def _chunk(self, process: SidecarProcess, realm: RealmLayout, key: bytes) -> Chunk | None:
        known = process.dispatcher.engine.directory.realms.get(realm.realm_id)
        return None if known is None else known.chunks.get(key)

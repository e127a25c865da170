"""A double of the sidecar beside an engine: it copies blocks of its ranks when a test says so."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sidecar.protocol import Done, JobOutcome, Lookup, LookupDone, Outcome, Release, Submit
from sidecar.protocol.codec import decode_client, encode
from tests.connector.content import Block, entries_of
from tests.connector.double import SALT, session_of
from tests.connector.rank import Rank
from tiers.kv.fence import SidecarFence
from tiers.kv.index import FLAG_HOST, FLAG_STORE, IndexWriter, tag_of

if TYPE_CHECKING:
    from tests.connector.engine import Engine


@dataclass
class Copy:
    """A job that the sidecar was given by one rank and has not ended."""

    rank: int
    job_id: int
    fence: SidecarFence
    epoch: int
    load: list[tuple[bytes, int, list[int]]] = field(default_factory=list)
    store: list[tuple[bytes, list[int]]] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    """Per chunk."""


class DoubleSidecar:
    """Host memory, a store, and copies that run when the test says so.

    A chunk is loadable when all ranks have stored it; `store` holds what was taken out of host
    memory by `demote` and is brought back when a lookup is answered.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.index = IndexWriter(4096)
        self.parts: dict[bytes, dict[int, list[Block]]] = {}
        self.store: dict[bytes, dict[int, list[Block]]] = {}
        self.copies: list[Copy] = []
        self.lookups: list[Lookup] = []
        self._nothing_ready: set[int] = set()
        self.fences: list[SidecarFence] = []
        self.group_of: dict[bytes, int] = {}
        """Per key that was ever stored."""
        self._read: Counter[int] = Counter()
        self._lookups_read = 0

    def attach(self) -> None:
        """Every role of the engine attaches (again); what was submitted before is forgotten."""
        self.copies.clear()
        self.lookups.clear()
        session = session_of(self.index)
        self.epoch = session.epoch
        self.fences = [rank.attach(self.epoch) for rank in self.engine.ranks]
        self.engine.client.attach(session)

    def detach_rank(self, rank: int) -> None:
        """One worker loses its session, for example with its GPU, and the sidecar its jobs."""
        self.copies = [copy for copy in self.copies if copy.rank != rank]
        self.engine.ranks[rank].client.attach(None)

    def attach_rank(self, rank: int) -> None:
        self.fences[rank] = self.engine.ranks[rank].attach(self.epoch)

    def detach(self) -> None:
        """The sidecar dies: nothing of what it was given will run."""
        self.copies.clear()
        self.lookups.clear()
        for client in (self.engine.client, *(rank.client for rank in self.engine.ranks)):
            client.attach(None)

    def tell_flags(self, key: bytes, gone: int = 0) -> None:
        host = FLAG_HOST if len(self.parts.get(key, {})) == len(self.engine.ranks) else 0
        flags = host | (FLAG_STORE if key in self.store else 0)
        self.index.set(tag_of(key, SALT), flags or gone)

    def evict(self, key: bytes, gone: int = 0) -> None:
        """Out of host memory; the store keeps what it has. `gone`: what the index then says."""
        self.parts.pop(key, None)
        self.tell_flags(key, gone)

    def demote(self, key: bytes) -> None:
        """Only the store has it from now on."""
        if key in self.parts and len(self.parts[key]) == len(self.engine.ranks):
            self.store[key] = self.parts[key]
            self.evict(key)

    def hold(self, key: bytes) -> bool:
        return len(self.parts.get(key, {})) == len(self.engine.ranks)

    def receive(self) -> None:
        """Take what the engine's roles sent since the last call."""
        for rank in self.engine.ranks:
            for message in rank.client.sent[self._read[rank.rank] :]:
                assert decode_client(encode(message)) == message
                if isinstance(message, Submit) and rank.client.live is not None:
                    self._submitted(rank, message)
            self._read[rank.rank] = len(rank.client.sent)
        lookups = self.engine.client.sent_of(Lookup)
        for lookup in lookups[self._lookups_read :]:
            assert decode_client(encode(lookup)) == lookup
            live = self.engine.client.live
            if live is not None and live.epoch == lookup.epoch:
                self.lookups.append(lookup)
        self._lookups_read = len(lookups)

    def _submitted(self, rank: Rank, message: Submit) -> None:
        assert rank.client.live is not None
        if message.epoch != rank.client.live.epoch:
            return
        fence = self.fences[rank.rank]
        assert fence.reached(message.fence)
        for load in message.loads:
            pieces = [(chunk.key, chunk.first_block, chunk.block_ids) for chunk in load.chunks]
            groups = [chunk.group for chunk in load.chunks]
            self.copies.append(
                Copy(rank.rank, load.job_id, fence, message.epoch, load=pieces, groups=groups)
            )
        for store in message.stores:
            chunks = [(chunk.key, chunk.block_ids) for chunk in store.chunks]
            groups = [chunk.group for chunk in store.chunks]
            self.copies.append(
                Copy(rank.rank, store.job_id, fence, message.epoch, store=chunks, groups=groups)
            )

    def run(self, copy: Copy, outcome: Outcome = Outcome.OK) -> None:
        """Carry out one job, or fail it, and answer."""
        self.copies.remove(copy)
        with copy.fence.copying(copy.job_id) as allowed:
            if not allowed:
                outcome = Outcome.REVOKED
            if outcome is Outcome.OK:
                outcome = self._load(copy) if copy.load else self._store(copy)
        client = self.engine.ranks[copy.rank].client
        if client.live is not None and client.live.epoch == copy.epoch:
            client.inbox.append(Done(copy.epoch, [JobOutcome(copy.job_id, outcome)]))

    def run_all(self) -> None:
        self.receive()
        for copy in list(self.copies):
            self.run(copy)

    def _load(self, copy: Copy) -> Outcome:
        memory = self.engine.ranks[copy.rank].memory
        for (key, _, _), group in zip(copy.load, copy.groups, strict=True):
            if not self.hold(key):
                return Outcome.MISSING
            assert self.group_of[key] == group, "a key is of one group"
        for (key, first, block_ids), group in zip(copy.load, copy.groups, strict=True):
            blocks = self.parts[key][copy.rank]
            entries = entries_of(self.engine.specs[group])
            for index, block_id in enumerate(block_ids, first):
                memory[block_id][:entries] = blocks[index]
        return Outcome.OK

    def _store(self, copy: Copy) -> Outcome:
        memory = self.engine.ranks[copy.rank].memory
        for (key, block_ids), group in zip(copy.store, copy.groups, strict=True):
            assert self.group_of.setdefault(key, group) == group, "a key is of one group"
            entries = entries_of(self.engine.specs[group])
            blocks = [memory[block_id][:entries] for block_id in block_ids]
            held = self.parts.setdefault(key, {}).setdefault(copy.rank, blocks)
            # The KV under a key is decided by the key.
            assert held == blocks, "two different contents were stored under one key"
            self.tell_flags(key)
        return Outcome.OK

    def answer(
        self, lookup: Lookup, ready: int | None = None, outcome: Outcome | None = None
    ) -> None:
        """Bring the first `ready` keys (all) of a lookup to host memory."""
        self.lookups.remove(lookup)
        ready = len(lookup.keys) if ready is None else ready
        for key in lookup.keys[:ready]:
            if key in self.store:
                self.parts[key] = self.store[key]
                self.tell_flags(key)
        if not ready:
            self._nothing_ready.add(lookup.lookup_id)
        if outcome is None:
            outcome = Outcome.OK if ready == len(lookup.keys) else Outcome.MISSING
        self.engine.client.inbox.append(LookupDone(lookup.epoch, lookup.lookup_id, ready, outcome))

    def lookups_pinning(self) -> set[int]:
        """Those of the live session that a sidecar would still pin chunks for."""
        client = self.engine.client
        if client.live is None:
            return set()
        epoch = client.live.epoch
        asked = {one.lookup_id for one in client.sent_of(Lookup) if one.epoch == epoch}
        released = [one for one in client.sent_of(Release) if one.epoch == epoch]
        given_back = {lookup_id for one in released for lookup_id in one.lookup_ids}
        return asked - given_back - self._nothing_ready

    def close(self) -> None:
        self.index.close()

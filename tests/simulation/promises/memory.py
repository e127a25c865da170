"""Promises about host memory: its slots, what is sealed in them, and what comes back of it."""

from __future__ import annotations

from tests.simulation.mutation import Mutation

MEMORY = (
    # Slots.
    Mutation(
        "a pinned chunk is evicted",
        "HostTier._victim",
        "chunk.pins == 0 and not chunk.busy",
        "not chunk.busy",
        seed=2,
    ),
    Mutation(
        "a slot is evicted under a running copy",
        "HostTier._victim",
        "chunk.pins == 0 and not chunk.busy",
        "chunk.pins == 0",
    ),
    Mutation(
        "a corrupt slot is freed under a running copy",
        "HostTier._remove",
        "if segment.running == 0:",
        "if True:",
        ("memory damaged, then loaded", "store slow"),
    ),
    Mutation(
        "the first of two copies frees a zombie's slot",
        "HostTier.release",
        " and segment.running == 0",
        "",
        ("memory damaged, then loaded", "requests at once"),
        seed=1,
    ),
    Mutation(
        "the last copy does not free a zombie's slot",
        "HostTier.release",
        "segment.running == 0",
        "segment.running < 0",
        ("memory damaged, then loaded", "store slow"),
        seed=1,
    ),
    Mutation(
        "the ledger keeps a slot that was freed",
        "HostTier._free",
        "self.allocated.remove(slot)",
        "pass",
    ),
    Mutation(
        "a slot is not given back to the pool",
        "HostTier._free",
        "self.slots.free(slot)",
        "pass",
    ),
    Mutation(
        "a slot that was not filled stays allocated",
        "HostTier.failed",
        "self._free(segment)",
        "pass",
        seed=4,
    ),
    Mutation(
        "the pool gives a slot out twice",
        "Slab.take",
        "self.freed.pop()",
        "self.freed[-1]",
    ),
    # What is sealed.
    Mutation(
        "a slot is called sealed before its copy has ended",
        "Copies._copier",
        "ended = await self._copy(group, threads, mapped=mapped)",
        "self._finished(group.all_ended(Outcome.OK)); "
        "ended = await self._copy(group, threads, mapped=mapped) and []",
    ),
    Mutation(
        "a store that failed is taken for sealed",
        "Jobs._gathered",
        "if outcome is Outcome.OK:",
        "if True:",
        seed=4,
    ),
    Mutation(
        "a read that failed is taken for sealed",
        "Reads.ended",
        "if event.outcome is StoreOutcome.OK:",
        "if True:",
        seed=3,
    ),
    Mutation(
        "a chunk is offered when one rank has it",
        "Chunk.loadable",
        "self.hosted == self.realm.world_size",
        "self.hosted",
    ),
    Mutation(
        "a damaged slot is served",
        "_finish_scatter",
        "template.check(slot, hasher.digest())",
        "pass",
        seed=3,
    ),
    Mutation(
        "a damaged object is taken in",
        "SlotTemplate.verify",
        "_digest(self.payload(view)) if digest is None else digest",
        "view[self.checksum].tobytes() if digest is None else digest",
        ("object damaged", "store damages", "another cluster writes"),
        seed=87,
    ),
    Mutation(
        "an object under a wrong name is taken in",
        "SlotTemplate.verify",
        "key is not None and meta.key != key",
        "False",
        ("objects under wrong names",),
        seed=2,
    ),
    Mutation(
        "a damaged slot is written to the store",
        "Executor._write",
        "await run_to_end(lambda: template.verify_payload(image), self._verifying)",
        "pass",
        ("memory damaged before it is written", "store slow"),
        seed=3,
    ),
    Mutation(
        "a corrupt chunk stays in sight",
        "Jobs._scattered",
        "self._host.quarantine(copy.segment.chunk)",
        "pass",
        seed=3,
    ),
    Mutation(
        "a chunk found corrupt while it was written stays in sight",
        "Writes.ended",
        "self._host.quarantine(chunk)",
        "pass",
        seed=26,
    ),
    Mutation(
        "a slot is sealed with another chunk's row",
        "gather_group",
        "command.key, command.parent, command.token_ids",
        "command.key, command.key, command.token_ids",
    ),
    # What outlives the sidecar.
    Mutation(
        "a slot may come back before its copy has ended",
        "HostTier.reserve",
        "self._tenants.charge(chunk.tenant, segment.slot_bytes)",
        "self._tenants.charge(chunk.tenant, segment.slot_bytes); self.slots.seal(slot)",
        ("sidecar killed in the middle of a copy",),
        seed=2,
    ),
    Mutation(
        "a sealed slot does not come back",
        "HostTier.filled",
        "self.slots.seal(segment.slot)",
        "pass",
        ("sidecar killed",),
    ),
    Mutation(
        "a tenant's slot comes back as nobody's",
        "HostTier.reserve",
        "self.slots.set_tag(slot, tag)",
        "pass",
        ("sidecar killed",),
    ),
    Mutation(
        "only the first of many slots come back",
        "Engine._adopt",
        "self._outbox.emit(Resume())",
        "pass",
        ("sidecar killed",),
    ),
    Mutation(
        "the ledger does not know what came back",
        "HostTier.restore",
        "self.allocated.update(one.slot for one in restored)",
        "pass",
        ("sidecar killed",),
    ),
)

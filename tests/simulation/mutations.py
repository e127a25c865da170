"""The simulation's own proof: the code with one promise broken on purpose must be noticed.

Owns the list of mutations, and putting one into the running code: a function's source with one
piece replaced, compiled in the place of the function. Where the code has moved on so that the piece
is not there, once, that is an error: a mutation that changes nothing proves nothing.
"""

from __future__ import annotations
import __future__

import contextlib
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock


@dataclass(frozen=True, slots=True)
class Mutation:
    """One promise broken: in `place` ("module:Class.function"), `old` becomes `new`.

    `often` names kinds of faults that bring it to light sooner, and `several groups` where models
    must have them. `seed` is a life in which it was
    noticed when this was written: where the code has moved on, others will do as well.
    """

    name: str
    place: str
    old: str
    new: str
    often: tuple[str, ...] = ()
    seed: int = 0

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """While this lasts, the code is mutated."""
        module_name, _, path = self.place.partition(":")
        module: Any = importlib.import_module(module_name)
        owner: Any = module
        *outer, name = path.split(".")
        for part in outer:
            owner = getattr(owner, part)
        with mock.patch.object(owner, name, self._mutated(module, vars(owner)[name], name)):
            yield

    def _mutated(self, module: Any, original: Any, name: str) -> Any:
        if not callable(original) and not isinstance(original, property | staticmethod):
            raise TypeError(f"{self.place} is no function: {original!r}")
        function: Any = original.fget if isinstance(original, property) else original
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
        if source.count(self.old) != 1:
            raise LookupError(
                f"mutation {self.name!r}: {self.place} has {self.old!r} {source.count(self.old)} "
                "times, not once; follow the code in tests/simulation/mutations.py"
            )
        code = compile(
            source.replace(self.old, self.new),
            f"<{self.name}>",
            "exec",
            flags=__future__.annotations.compiler_flag,
            dont_inherit=True,
        )
        made: dict[str, Any] = {}
        exec(code, vars(module), made)
        return made[name]


MUTATIONS = (
    # Slots.
    Mutation(
        "a pinned chunk is evicted",
        "sidecar.host:HostTier._victim",
        "chunk.pins == 0 and not chunk.busy",
        "not chunk.busy",
    ),
    Mutation(
        "a slot is evicted under a running copy",
        "sidecar.host:HostTier._victim",
        "chunk.pins == 0 and not chunk.busy",
        "chunk.pins == 0",
    ),
    Mutation(
        "a corrupt slot is freed under a running copy",
        "sidecar.host:HostTier._remove",
        "if segment.running == 0:",
        "if True:",
        ("memory damaged, then loaded", "store slow"),
    ),
    Mutation(
        "the first of two copies frees a zombie's slot",
        "sidecar.host:HostTier.release",
        " and segment.running == 0",
        "",
        ("memory damaged, then loaded", "requests at once"),
    ),
    Mutation(
        "the last copy does not free a zombie's slot",
        "sidecar.host:HostTier.release",
        "segment.running == 0",
        "segment.running < 0",
        ("memory damaged, then loaded", "store slow"),
        seed=2,
    ),
    Mutation(
        "the ledger keeps a slot that was freed",
        "sidecar.host:HostTier._free",
        "self.allocated.remove(slot)",
        "pass",
    ),
    Mutation(
        "a slot is not given back to the pool",
        "sidecar.host:HostTier._free",
        "self._slots.free(slot)",
        "pass",
    ),
    Mutation(
        "a slot that was not filled stays allocated",
        "sidecar.host:HostTier.failed",
        "self._free(segment)",
        "pass",
        seed=4,
    ),
    Mutation(
        "the pool gives a slot out twice",
        "tiers.slabs:Slab.take",
        "self.freed.pop()",
        "self.freed[-1]",
    ),
    # What is sealed.
    Mutation(
        "a slot is called sealed before its copy has ended",
        "sidecar.copies:Copies._copier",
        "ended = await self._copy(group, mapped=mapped)",
        "self._finished(group.all_ended(CopyOutcome.OK)); "
        "ended = await self._copy(group, mapped=mapped) and []",
    ),
    Mutation(
        "a store that failed is taken for sealed",
        "sidecar.jobs:Jobs._gathered",
        "if outcome is CopyOutcome.OK:",
        "if True:",
        seed=4,
    ),
    Mutation(
        "a read that failed is taken for sealed",
        "sidecar.lookups:Lookups.read_ended",
        "if event.outcome is StoreOutcome.OK:",
        "if True:",
        seed=6,
    ),
    Mutation(
        "a chunk is offered when one rank has it",
        "sidecar.directory:Chunk.loadable",
        "self.hosted == self.realm.world_size",
        "self.hosted",
    ),
    Mutation(
        "a damaged slot is served",
        "sidecar.copies:_finish_scatter",
        "template.check(slot, hasher.digest())",
        "pass",
        seed=3,
    ),
    Mutation(
        "a damaged object is taken in",
        "tiers.arrow:SlotTemplate.verify",
        "self.verify_payload(view)",
        "pass",
        ("object damaged", "store damages", "another cluster writes"),
        seed=3,
    ),
    Mutation(
        "an object under a wrong name is taken in",
        "tiers.arrow:SlotTemplate.verify",
        "key is not None and meta.key != key",
        "False",
        ("objects under wrong names",),
        seed=3,
    ),
    Mutation(
        "a damaged slot is written to the store",
        "sidecar.mover:Mover._write",
        "await run_to_end(lambda: template.verify_payload(image), self._verifying)",
        "pass",
        ("memory damaged before it is written", "store slow"),
    ),
    Mutation(
        "a corrupt chunk stays in sight",
        "sidecar.jobs:Jobs._scattered",
        "self._host.quarantine(copy.segment.chunk)",
        "pass",
        seed=3,
    ),
    Mutation(
        "a chunk found corrupt while it was written stays in sight",
        "sidecar.writes:Writes.ended",
        "self._host.quarantine(chunk)",
        "pass",
        seed=9,
    ),
    Mutation(
        "a slot is sealed with another chunk's row",
        "sidecar.copies:_gather",
        "command.key, command.parent, command.token_ids",
        "command.key, command.key, command.token_ids",
    ),
    # What outlives the sidecar.
    Mutation(
        "a slot may come back before its copy has ended",
        "sidecar.host:HostTier.reserve",
        "self._tenants.charge(chunk.tenant, num_bytes)",
        "self._tenants.charge(chunk.tenant, num_bytes); self._slots.seal(slot)",
        ("sidecar killed in the middle of a copy",),
    ),
    Mutation(
        "a sealed slot does not come back",
        "sidecar.host:HostTier.arrived",
        "self._slots.seal(segment.slot)",
        "pass",
        ("sidecar killed",),
    ),
    Mutation(
        "a tenant's slot comes back as nobody's",
        "sidecar.host:HostTier.reserve",
        "self._slots.set_tag(slot, tag)",
        "pass",
        ("sidecar killed",),
    ),
    Mutation(
        "the ledger does not know what came back",
        "sidecar.host:HostTier.restore",
        "self.allocated.update(one.slot for one in found)",
        "pass",
        ("sidecar killed",),
    ),
    # Engine memory.
    Mutation(
        "a copy starts before its fence is reached",
        "sidecar.copyqueue:Group.may_start",
        "fence.reached(self.fence) and ",
        "",
        seed=1,
    ),
    Mutation(
        "a revoked job is copied",
        "tiers.fence:SidecarFence.copying",
        "job_id >= int(self._words[_REVOKED_BELOW])",
        "True",
        ("sidecar stopped in the middle of a copy", "sidecar stopped"),
        seed=3,
    ),
    Mutation(
        "a copy does not hold the worker's lock",
        "tiers.fence:SidecarFence.copying",
        "_lock(fd, fcntl.F_RDLCK, _F_OFD_SETLK)",
        "pass",
        ("sidecar stopped in the middle of a copy",),
    ),
    Mutation(
        "a worker gives blocks back without revoking",
        "connector.worker:WorkerRole._expire",
        "if fence.try_revoke(below):",
        "if True:",
        ("sidecar stopped in the middle of a copy",),
    ),
    Mutation(
        "blocks of a store come back after its first rank",
        "connector.storing:Stores.ended",
        "if job.ranks_left <= 0:",
        "if True:",
        ("one rank is late", "requests at once"),
        seed=8,
    ),
    Mutation(
        "blocks of a store never come back",
        "connector.storing:Stores.ended",
        "self._block_pool.free_blocks(reversed(job.blocks))",
        "pass",
    ),
    Mutation(
        "blocks of a store are not kept",
        "connector.storing:Stores.plan",
        "self._block_pool.touch(held_blocks)",
        "[setattr(block, 'ref_cnt', block.ref_cnt + 1) for block in held_blocks[1:]]",
    ),
    Mutation(
        "an abort leaks what its request had asked for",
        "connector.scheduler:SchedulerRole.request_finished",
        "self._release(state)",
        "pass",
        ("abort", "store slow", "another cluster writes"),
        seed=6,
    ),
    Mutation(
        "a load that failed is taken for good",
        "connector.worker:WorkerRole._end",
        "results.failed.add(request_id)",
        "pass",
        seed=3,
    ),
    Mutation(
        "memory is unmapped under a running copy",
        "sidecar.memory:WorkerMemory._unmap_if_idle",
        " or self._copies",
        "",
        ("engine dies", "session cut"),
    ),
    # Jobs.
    Mutation(
        "a revoked job is answered as done",
        "sidecar.copies:Copies._copier",
        "self._finished(ended)",
        "self._finished([Copied(one.copy_id, CopyOutcome.OK) "
        "if one.outcome is CopyOutcome.REVOKED else one for one in ended])",
        seed=4,
    ),
    Mutation(
        "an expired job is answered as done",
        "sidecar.jobs:Job.outcome",
        "self.outcomes <= {Outcome.OK}",
        "self.outcomes <= {Outcome.OK, Outcome.EXPIRED}",
        seed=63,
    ),
    Mutation(
        "a job is answered twice",
        "sidecar.jobs:Jobs._end_if_over",
        "self._ended(job, JobOutcome(job.job_id, outcome))",
        "self._ended(job, JobOutcome(job.job_id, outcome)); "
        "self._ended(job, JobOutcome(job.job_id, outcome))",
    ),
    Mutation(
        "a job is answered before its last copy ended",
        "sidecar.jobs:Jobs._end_if_over",
        "if job.remaining:",
        "if job.remaining > 1:",
    ),
    Mutation(
        "a job is not answered",
        "sidecar.engine:Engine._job_ended",
        "if session.session_id in self._sessions:",
        "if session.session_id in self._sessions and outcome.outcome.name != 'FULL':",
    ),
    Mutation(
        "a job waits on after its session's end of file",
        "sidecar.hub:Hub.end_session",
        "self.copies.drop(session)",
        "pass",
        ("session cut", "one client dies first"),
        seed=8,
    ),
    Mutation(
        "a chunk is stored twice",
        "sidecar.jobs:Jobs._gather",
        "chunk.segments[rank].state is not SegmentState.ABSENT",
        "False",
    ),
    Mutation(
        "a chunk is stored while draining",
        "sidecar.engine:Engine._submit",
        "accept=not self._draining",
        "accept=True",
        seed=28,
    ),
    # Leases.
    Mutation(
        "a lease outlives its load",
        "sidecar.leases:Leases.rank_finished",
        "if len(lease.finished_ranks) >= world_size:",
        "if len(lease.finished_ranks) > world_size:",
    ),
    Mutation(
        "a lease outlives a load that ended before it came",
        "sidecar.leases:Leases.take",
        "if len(early) >= world_size:",
        "if False:",
        ("session cut", "requests at once"),
        seed=40,
    ),
    Mutation(
        "a lease outlives its session",
        "sidecar.engine:Engine._close",
        "if session.role is Role.SCHEDULER:",
        "if False:",
        ("session cut", "leases without a load"),
        seed=3,
    ),
    Mutation(
        "a lease outlives its release",
        "sidecar.leases:Leases.release",
        "if lease is not None:",
        "if False:",
        ("leases without a load",),
        seed=1,
    ),
    Mutation(
        "a lease has no deadline",
        "sidecar.leases:Leases.expire",
        "if lease.deadline > now:",
        "if True:",
        ("leases without a load",),
        seed=1,
    ),
    Mutation(
        "the pins of a lease stay",
        "sidecar.pins:Pins.unpin",
        "self._directory.unpin(chunk)",
        "self._directory.settle(chunk)",
    ),
    # Lookups and reads.
    Mutation(
        "a lookup is not answered at its deadline",
        "sidecar.lookups:Lookups.expire",
        "elif lookup.deadline <= now:",
        "elif False:",
        seed=6,
    ),
    Mutation(
        "a lookup is not answered when all is there",
        "sidecar.lookups:Lookups.completed",
        "self._answer_if_over(lookup)",
        "pass",
    ),
    Mutation(
        "a lookup is not answered when a read fails",
        "sidecar.lookups:Lookups.read_ended",
        "self._give_up(chunk, _READ_FAILURES[event.outcome])",
        "pass",
        ("store fails", "object vanishes", "another cluster writes"),
        seed=4,
    ),
    Mutation(
        "a lookup calls ready what is not there",
        "sidecar.lookups:Lookups._answer",
        "ready = _leading(lookup.chunks, 0)",
        "ready = len(lookup.chunks)",
    ),
    Mutation(
        "a lookup waits longer than it pays",
        "sidecar.planner:Plan.patience_seconds",
        "min(limit_seconds, self.saved_seconds(ready, limit_seconds) + self.compute_seconds)",
        "limit_seconds",
        ("store slow", "another cluster writes"),
        seed=6,
    ),
    Mutation(
        "a lookup outlives its session",
        "sidecar.engine:Engine._close",
        "self._lookups.close_session(session.session_id)",
        "pass",
        ("session cut", "store slow", "another cluster writes"),
        seed=7,
    ),
    Mutation(
        "a lookup outlives its release",
        "sidecar.lookups:Lookups.release",
        "if lookup is not None:",
        "if False:",
        ("abort", "store slow", "another cluster writes"),
        seed=65,
    ),
    Mutation(
        "pins of an answered lookup stay for ever",
        "sidecar.lookups:Lookups.expire",
        "if lookup.expires <= now:",
        "if False:",
    ),
    Mutation(
        "reads are not bounded",
        "sidecar.lookups:Lookups.pump",
        "while len(self._running) < self._reads_inflight_max:",
        "while True:",
    ),
    Mutation(
        "a store that fails is read from all the same",
        "sidecar.lookups:Lookups.pump",
        "if not self._breaker.passes(now):",
        "if False:",
        ("flood of lookups", "store fails", "store slow"),
    ),
    Mutation(
        "a read starts for which nobody waits",
        "sidecar.lookups:Lookups._forget_reads",
        "self._queue.discard(segment)",
        "pass",
        ("store slow", "another cluster writes"),
        seed=4,
    ),
    Mutation(
        "an object that is gone is called stored",
        "sidecar.lookups:Lookups._note_failure",
        "self._store.lost(realm, key, bit)",
        "pass",
        ("object vanishes", "another cluster writes"),
    ),
    # Writes.
    Mutation(
        "a slot is not held while it is written",
        "sidecar.writes:Writes._start",
        "self._host.hold(segment)",
        "pass",
    ),
    Mutation(
        "a write that failed is called stored",
        "sidecar.writes:Writes.ended",
        "if event.outcome is StoreOutcome.OK:",
        "if event.outcome is not StoreOutcome.CORRUPT:",
        ("store fails", "store full", "store goes down"),
    ),
    Mutation(
        "the queue of writes is not bounded",
        "sidecar.writes:Writes._bound",
        "self._pending_bytes > self._queue_bytes_max",
        "False",
        seed=3,
    ),
    Mutation(
        "writes are not bounded",
        "sidecar.writes:Writes.pump",
        "len(self._running) < self._inflight_max and ",
        "",
    ),
    Mutation(
        "a store that fails is written to all the same",
        "sidecar.writes:Writes.pump",
        " and self._breaker.passes(now)",
        "",
        ("store goes down", "store fails"),
    ),
    Mutation(
        "a drain does not wait for writes",
        "sidecar.hub:Hub.feed",
        "if self.draining and self.engine.pending_work().idle:",
        "if self.draining:",
        ("sidecar terminated", "store slow"),
        seed=74,
    ),
    # The index.
    Mutation(
        "the index is not told of an eviction",
        "sidecar.directory:Directory.move",
        "if not chunk.detached:",
        "if not chunk.detached and cause is not Cause.EVICTED:",
    ),
    Mutation(
        "the index is told last",
        "sidecar.outbox:Outbox.take",
        "[*self._index, *self._work, *done, *self._replies]",
        "[*self._work, *done, *self._replies, *self._index]",
    ),
    Mutation(
        "an index entry is lost when the index grows",
        "sidecar.indexing:Indexing.set",
        "self._see_to_room(realm)",
        "smaller = realm.index; self._see_to_room(realm); realm.index is smaller "
        "or realm.index.set(tag_of(command.key, realm.index_salt), 0)",
    ),
    # Sessions, epochs, shares.
    Mutation(
        "epochs are not compared",
        "sidecar.session:Session.event_of",
        "if message.epoch != epoch:",
        "if False:",
        ("message of another life",),
    ),
    Mutation(
        "a client may have any number of leases",
        "sidecar.engine:Engine._lease",
        "self._leases.held(session_id) >= self._limits.leases_max_per_session",
        "False",
        ("leases without a load",),
        seed=8,
    ),
    Mutation(
        "shares are not bounded",
        "sidecar.bounds:Share.fits",
        "return self.of(session_id) + amount <= self._alpha * left",
        "return True",
        seed=1,
    ),
    Mutation(
        "a share is not given back when a lease ends",
        "sidecar.leases:Leases._end",
        "self._bounds.memory.give(lease.session_id, lease.cost)",
        "pass",
    ),
    Mutation(
        "a client may have any number of jobs",
        "sidecar.bounds:Bounds.begin_job",
        "if self.jobs[session_id] >= self.jobs_max_per_session:",
        "if False:",
        ("flood of loads",),
        seed=24,
    ),
    # Tenants.
    Mutation(
        "a tenant's slot is not charged",
        "sidecar.host:HostTier.reserve",
        "self._tenants.charge(chunk.tenant, num_bytes)",
        "pass",
    ),
    Mutation(
        "a tenant's slot is not credited",
        "sidecar.host:HostTier._free",
        "self._tenants.credit(segment.chunk.tenant, self.slot_bytes(segment))",
        "pass",
    ),
    Mutation(
        "a tenant's limit is not kept",
        "sidecar.host:HostTier._make_room",
        "fits = account.host_bytes <= left",
        "fits = True",
    ),
    Mutation(
        "a tenant at its limit pushes out others",
        "sidecar.host:HostTier._make_room",
        "self._victim(account.order, lambda _: True)",
        "self._victim(self._policy, lambda _: True)",
        seed=3,
    ),
    Mutation(
        "tenants share keys",
        "connector.requests:Requests._group_states",
        'salt=request.cache_salt or "",',
        "",
    ),
    # What requests ask for.
    Mutation(
        "a chunk is served after its time",
        "sidecar.host:HostTier.expire",
        "self._remove(due)",
        "pass",
    ),
    Mutation(
        "a restart forgets until when a chunk is kept",
        "sidecar.hostmemory:_restored",
        "expires_at=retention.expires_at,",
        "",
        ("sidecar killed",),
        seed=1,
    ),
    Mutation(
        "what is to stay on the node is written",
        "sidecar.writes:Writes._enqueue",
        " or chunk.stays",
        "",
    ),
    Mutation(
        "a pin ends too early",
        "sidecar.kept:KeptChunks.ask",
        "deadline = now + message.duration_ms / 1000",
        "deadline = now",
    ),
    Mutation(
        "a pinned chunk can be evicted",
        "sidecar.host:HostTier.keep",
        "chunk.kept += 1",
        "chunk.kept += 1; chunk.pins -= 1",
    ),
    Mutation(
        "a reset keeps old keys",
        "connector.scheduler:SchedulerRole.reset",
        "self._requests.generation = os.urandom(16)",
        "pass",
        ("reset",),
        seed=4,
    ),
    # Several KV cache groups.
    Mutation(
        "a store takes blocks that a window gave back",
        "connector.storing:Stores._pieces",
        " or gone",
        "",
        ("several groups",),
        seed=1,
    ),
    Mutation(
        "a window is taken for shorter than it is",
        "connector.groups:Attention.unread",
        "self.window + 1",
        "self.window + 5",
        ("several groups",),
        seed=6,
    ),
    Mutation(
        "a load looks for all chunks in the first group",
        "sidecar.jobs:Jobs.load",
        "realms[piece.group].chunks",
        "realms[0].chunks",
        ("several groups",),
    ),
    Mutation(
        "a store puts all chunks into the first group",
        "sidecar.jobs:Jobs.store",
        "realm = realms[piece.group]",
        "realm = realms[0]",
        ("several groups",),
    ),
    Mutation(
        "a lease pins chunks of the first group alone",
        "sidecar.engine:Engine._lease",
        "for realm in realms",
        "for realm in realms[:1]",
        ("several groups",),
    ),
    Mutation(
        "a pin keeps chunks in the first group alone",
        "sidecar.kept:KeptChunks.ask",
        "realm = realms[group]",
        "realm = realms[0]",
        ("several groups",),
    ),
    Mutation(
        "a copy takes the first group's pages",
        "sidecar.copyqueue:Group.region",
        "self.memory.regions[self.part]",
        "self.memory.regions[0]",
        ("several groups",),
    ),
)


def named(name: str) -> Mutation:
    """The mutation of that name."""
    found = [mutation for mutation in MUTATIONS if mutation.name == name]
    if not found:
        raise ValueError(f"{name!r} is no mutation")
    return found[0]

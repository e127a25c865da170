"""Promises about the work of engines: their memory, their jobs, and the leases of their loads."""

from __future__ import annotations

from tests.simulation.mutation import Mutation

WORK = (
    # Engine memory.
    Mutation(
        "a copy starts before its fence is reached",
        "CopyGroup.may_start",
        "fence.reached(self.fence) and ",
        "",
        seed=1,
    ),
    Mutation(
        "a revoked job is copied",
        "SidecarFence.copying",
        "job_id >= int(self._words[_REVOKED_BELOW])",
        "True",
        ("sidecar stopped in the middle of a copy", "sidecar stopped"),
        seed=3,
    ),
    Mutation(
        "a copy does not hold the worker's lock",
        "SidecarFence.copying",
        "lock_page(self._fd, fcntl.F_RDLCK)",
        "pass",
        ("sidecar stopped in the middle of a copy",),
        seed=3,
    ),
    Mutation(
        "a worker gives blocks back without revoking",
        "WorkerRole._expire",
        "if fence.try_revoke(below)}",
        "if True}",
        ("sidecar stopped in the middle of a copy",),
    ),
    Mutation(
        "blocks of a store come back after its first rank",
        "Stores.ended",
        "if job.ranks_left <= 0:",
        "if True:",
        ("one rank is late", "requests at once"),
        seed=8,
    ),
    Mutation(
        "blocks of a store never come back",
        "Stores.ended",
        "self.block_pool.free_blocks(reversed(job.blocks))",
        "pass",
    ),
    Mutation(
        "blocks of a store are not kept",
        "Stores.plan",
        "self.block_pool.touch(held_blocks)",
        "[setattr(block, 'ref_cnt', block.ref_cnt + 1) for block in held_blocks[1:]]",
    ),
    Mutation(
        "an abort leaks what its request had asked for",
        "PendingLookups.finished",
        "self._ended(state, pinned=True)",
        "pass",
        ("abort", "store slow", "another cluster writes"),
        seed=7,
    ),
    Mutation(
        "a load that failed is taken for good",
        "WorkerRole._end",
        "results.failed.add(job.request_id)",
        "pass",
        seed=3,
    ),
    Mutation(
        "memory is unmapped under a running copy",
        "WorkerMemory._unmap_if_idle",
        " or self._copies",
        "",
        ("engine dies", "session cut"),
        seed=1,
    ),
    # Jobs.
    Mutation(
        "a revoked job is answered as done",
        "Copies._ended",
        "ended += copied",
        "ended += [Copied(one.copy_ids, Outcome.OK) "
        "if one.outcome is Outcome.REVOKED else one for one in copied]",
        seed=4,
    ),
    Mutation(
        "an expired job is answered as done",
        "Job.outcome",
        "self.outcomes <= {Outcome.OK}",
        "self.outcomes <= {Outcome.OK, Outcome.EXPIRED}",
        seed=13,
    ),
    Mutation(
        "a job is answered twice",
        "Engine._job_ended",
        "self._outbox.job_ended(",
        "for _ in (1, 2): self._outbox.job_ended(",
    ),
    Mutation(
        "a job is answered before its last copy ended",
        "Jobs._ended",
        "if job.running:",
        "if job.running > 1:",
    ),
    Mutation(
        "a job is not answered",
        "Engine._job_ended",
        "if session.session_id in self.sessions:",
        "if session.session_id in self.sessions and job.outcome.name != 'FULL':",
    ),
    Mutation(
        "a job waits on after its session's end of file",
        "Dispatcher.end_session",
        "self.copies.drop(session)",
        "pass",
        ("session cut", "one client dies first"),
        seed=1,
    ),
    Mutation(
        "a chunk is stored twice",
        "Jobs._gather",
        "chunk.segments[rank].state is not SegmentState.ABSENT",
        "False",
    ),
    Mutation(
        "a chunk is stored while draining",
        "Jobs._gather",
        "if self.draining:",
        "if False:",
        seed=15,
    ),
    # Leases.
    Mutation(
        "a lease outlives its load",
        "Leases.rank_finished",
        "if len(lease.finished_ranks) >= world_size:",
        "if len(lease.finished_ranks) > world_size:",
    ),
    Mutation(
        "a lease outlives a load that ended before it came",
        "Leases.take",
        "if len(early) >= world_size:",
        "if False:",
        ("session cut", "requests at once"),
        seed=1,
    ),
    Mutation(
        "a lease outlives its session",
        "Engine._close",
        "if session.attach.role is Role.SCHEDULER:",
        "if False:",
        ("session cut", "leases without a load"),
    ),
    Mutation(
        "a lease outlives its release",
        "Leases.release",
        "if lease is not None:",
        "if False:",
        ("leases without a load",),
    ),
    Mutation(
        "a lease has no deadline",
        "Leases.expire",
        "if lease.deadline > now:",
        "if True:",
        ("leases without a load",),
    ),
    Mutation(
        "the pins of a lease stay",
        "Pins.unpin",
        "chunk.pins -= 1",
        "pass",
    ),
)

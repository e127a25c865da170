"""Worker role: shares one rank's KV memory and submits its jobs, a step at a time.

Owns the jobs of this rank between submission and answer. Each ends exactly once: answered by the
sidecar, failed because there is none, or revoked after its deadline. A job that may still touch
this engine's memory never ends (see `tiers.kv.fence`): after its deadline, or without a sidecar, it
ends once the fence page shows that no copy of it can run. Also owns sleep mode. Does not own the
export of memory (`export.py`) nor what is loaded and stored (`scheduler/`).
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from connector.client import Attempt, Client, SidecarSession
from connector.export import EXPORT_FAULTS, fault_reason
from connector.plan import Load, StepPlan, StepReport, Store
from sidecar.protocol import (
    FRAME_BYTES_MAX,
    JOBS_PER_MESSAGE_MAX,
    Attach,
    Done,
    Error,
    JobOutcome,
    Memory,
    Outcome,
    Submit,
)
from tiers.errors import TierError
from tiers.kv.fence import WorkerFence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from connector.export import ExportedMemory

logger = logging.getLogger("vllm.kvlake")

JOBS_BYTES_MAX: Final = FRAME_BYTES_MAX - 64 * 1024
IDLE_WAIT_MS: Final = 2
"""vLLM itself sleeps for 1 ms between two steps with nothing to do. An answer ends the wait."""
RELEASE_SECONDS_MAX: Final = 10.0
"""How long `SleepMode` waits for the sidecar to unmap; it takes milliseconds unless a copy runs."""


@dataclass(slots=True)
class _Outstanding:
    job_id: int
    request_id: str | None
    """The request of a load; None for a store."""
    deadline: float
    fence: WorkerFence


@dataclass(slots=True)
class TransferResults:
    """What this rank finished since the last step."""

    loaded: set[str] = field(default_factory=set[str])
    """Requests whose loads ended, those that failed included."""
    failed: set[str] = field(default_factory=set[str])
    report: StepReport = field(default_factory=StepReport)
    failed_stores: set[int] = field(default_factory=set[int])
    """Jobs among the ended ones of the report that failed."""


class WorkerRole:
    """One rank's end of the connector. `describe` builds its `Attach` from its memory."""

    def __init__(
        self,
        memory: ExportedMemory,
        make_client: Callable[[Callable[[], Attempt]], Client],
        describe: Callable[[ExportedMemory, Memory], Attach],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._memory = memory
        self._describe = describe
        self._clock = clock
        self._step = 0
        self._idle = False
        self._waiting = False
        self._fence_failed = False
        self.fence: WorkerFence | None = None
        self._session: SidecarSession | None = None
        self.retired: list[WorkerFence] = []
        """Fences of lost sessions that may still have open jobs."""
        self.outstanding: dict[int, _Outstanding] = {}
        self._results = TransferResults()
        self._make_client = make_client
        self.client = make_client(self._make_attempt)

    def _make_attempt(self) -> Attempt:
        # Runs on the client's thread. A new fence page per attempt: an earlier sidecar that still
        # runs must not read what is meant for its successor.
        fence = self._memory.new_fence()
        message = self._describe(self._memory, self._memory.shared)
        return Attempt(message, [*self._memory.fds, fence.fd], fence)

    def _refresh_session(self) -> SidecarSession | None:
        session = self.client.session
        if session is not self._session:
            # The old page stays open until its jobs are known to be void; see `_expire`.
            if self.fence is not None:
                self.retired.append(self.fence)
                self.fence = None
            self._session = session
            if session is not None:
                assert isinstance(session.context, WorkerFence)
                self.fence = session.context
        return session

    def submit(
        self,
        plan: StepPlan,
        has_adapter: Callable[[int, str], bool] = lambda _number, _files: True,
        *,
        stale: bool = False,
    ) -> None:
        """Send this step's jobs. Call after the step's forward pass was queued or executed.

        `has_adapter` says whether this worker loaded these files for an adapter's number: KV of
        other files must not be stored. A `stale` plan was made for other weights: its jobs fail.
        """
        if plan.retired:
            # In the middle of a step, so do not wait. Open jobs end as when a sidecar dies. The
            # memory stays until `close`: the client's thread may be sending its descriptor.
            self.client.close(wait_seconds_max=0.0)
        self._idle = plan.idle
        self._waiting = plan.waiting
        if stale:
            self._fail(plan.loads, plan.stores)
            return
        foreign = [
            store for store in plan.stores if not has_adapter(store.adapter_id, store.adapter_files)
        ]
        if foreign:
            self._fail([], foreign)
            plan = replace(plan, stores=[store for store in plan.stores if store not in foreign])
        if not plan.loads and not plan.stores:
            return
        session = self._refresh_session()
        fence = self.fence
        self._step += 1
        if session is None or fence is None or not self._signal(fence):
            self._fail(plan.loads, plan.stores)
            return
        now = self._clock()
        load_deadline = now + session.limits.load_deadline_ms_max / 1000
        store_deadline = now + session.limits.store_deadline_ms_max / 1000
        for loads, stores in _in_messages(plan):
            message = Submit(
                session.epoch,
                self._step,
                [load.job for load in loads],
                [store.job for store in stores],
            )
            if not self.client.send(session, message):
                self._fail(loads, stores)
                continue
            for load in loads:
                job_id = load.job.job_id
                self.outstanding[job_id] = _Outstanding(
                    job_id, load.request_id, load_deadline, fence
                )
            for store in stores:
                job_id = store.job.job_id
                self.outstanding[job_id] = _Outstanding(job_id, None, store_deadline, fence)

    def _fail(self, loads: Sequence[Load], stores: Sequence[Store]) -> None:
        for load in loads:
            self._end(load.job.job_id, load.request_id, Outcome.FAILED)
        for store in stores:
            self._end(store.job.job_id, None, Outcome.FAILED)

    def _signal(self, fence: WorkerFence) -> bool:
        """Have the page show when this step's work is done; False if it never will.

        Loads wait for that, too: the step may still read the blocks that they overwrite.
        """
        try:
            fence.signal(self._step)
        except TierError as error:
            if not self._fence_failed:
                self._fence_failed = True
                logger.warning("kvlake: this worker is served without the cache, because %s", error)
            return False
        return True

    def collect(self) -> TransferResults:
        """Everything that ended since the last call. Call once per step.

        In a step that computes nothing this waits a moment for an answer if any rank or lookup
        does: vLLM repeats such a step at once, and two spinning workers on two cores kept a sidecar
        from running for seconds.
        """
        self._refresh_session()
        if self._idle and (self.outstanding or self._waiting):
            self.client.wait(IDLE_WAIT_MS)
        if self.outstanding or self.retired:
            for message in self.client.poll():
                if isinstance(message, Done):
                    self._answered(message.jobs)
                elif isinstance(message, Error):
                    self._refused(message)
            self._expire()
        results, self._results = self._results, TransferResults()
        return results

    def _answered(self, jobs: list[JobOutcome]) -> None:
        for job in jobs:
            outstanding = self.outstanding.pop(job.job_id, None)
            if outstanding is not None:
                self._end(job.job_id, outstanding.request_id, job.outcome)

    def _refused(self, error: Error) -> None:
        """End all jobs: those of the refused message get no answer, and which is not known."""
        logger.warning("kvlake: the sidecar refused jobs (%s): %s", error.code, error.message)
        for job in self.outstanding.values():
            job.deadline = 0.0

    def _expire(self) -> None:
        """End jobs that get no answer: past their deadline, or of a lost session."""
        now = self._clock()
        revoke_below: dict[WorkerFence, int] = {}
        for job in self.outstanding.values():
            if job.fence is not self.fence or now >= job.deadline:
                revoke_below[job.fence] = max(revoke_below.get(job.fence, 0), job.job_id + 1)
        for fence, below in revoke_below.items():
            # False while a copy runs: its jobs stay until it ends, and no other copy starts.
            if fence.try_revoke(below):
                self._void(fence, below, now)
        for page in (self.fence, *self.retired):
            if page is not None and page.revoking and page not in revoke_below:
                # The jobs that were to be revoked were answered in time.
                page.give_up_revoking()
        busy = {job.fence for job in self.outstanding.values()}
        for page in [page for page in self.retired if page.quiet and page not in busy]:
            self.retired.remove(page)
            page.close()

    def _void(self, fence: WorkerFence, below: int, now: float) -> None:
        for job in list(self.outstanding.values()):
            if job.fence is fence and job.job_id < below:
                del self.outstanding[job.job_id]
                late = 0.0 < job.deadline <= now
                self._end(job.job_id, job.request_id, Outcome.EXPIRED if late else Outcome.REVOKED)

    def _end(self, job_id: int, request_id: str | None, outcome: Outcome) -> None:
        results = self._results
        if request_id is None:
            results.report.stores_expired += outcome is Outcome.EXPIRED
            results.report.ended[job_id] = 1
            if outcome not in (Outcome.OK, Outcome.PARTIAL):
                results.report.failed += 1
                results.failed_stores.add(job_id)
            return
        results.report.loads_expired += outcome is Outcome.EXPIRED
        results.loaded.add(request_id)
        if outcome is not Outcome.OK:
            results.failed.add(request_id)

    def suspend(self, seconds_max: float) -> bool:
        """Detach before the engine's memory is freed. Returns whether the sidecar unmapped it.

        Open jobs end as when a sidecar dies. Until `resume` every new job fails at once.
        """
        unmapped = self.client.close(seconds_max)
        self._refresh_session()
        self._expire()
        self._memory.close()
        return unmapped

    def resume(self, memory: ExportedMemory) -> None:
        """Attach again after `suspend`, with newly exported memory."""
        self._memory = memory
        self.client = self._make_client(self._make_attempt)

    def refuse(self, reason: str) -> None:
        """Report that this rank can never be served again, so that all ranks detach."""
        self._results.report.refusal = reason

    def close(self) -> None:
        """Detach. Open jobs end with the session."""
        self.client.close()
        self._memory.close()


class SleepMode:
    """Releases a worker's KV memory before the engine sleeps, and shares it again afterwards.

    vLLM 0.33 and later free the memory between `unregister_kv_caches` and `restore_kv_caches`. A
    sidecar that still maps it keeps the old pages, so a late copy harms nobody. Both calls may be
    repeated.

    Args:
        share: exports the KV cache as it is now; raises one of `EXPORT_FAULTS`.
    """

    def __init__(self, role: WorkerRole, share: Callable[[], ExportedMemory]) -> None:
        self._role = role
        self._share = share
        self._shared = True
        self.failure = ""
        """Why the memory could not be shared again, or nothing."""

    def unregister(self) -> None:
        """Have the sidecar unmap the memory, which is about to be freed."""
        if not self._shared:
            return
        self._shared = False
        if not self._role.suspend(RELEASE_SECONDS_MAX):
            logger.warning(
                "kvlake: the sidecar did not release this engine's KV memory within %g s; the "
                "memory stays allocated until it does",
                RELEASE_SECONDS_MAX,
            )

    def restore(self) -> None:
        """Share the memory that came back. After a failure this rank stays uncached for good."""
        if self._shared or self.failure:
            return
        try:
            memory = self._share()
            self._role.resume(memory)
        except EXPORT_FAULTS as error:
            # Not tried again: the other ranks and the scheduler leave too, and nothing calls them.
            self.failure = f"after sleep mode {fault_reason(error)}; restart the engine"
            self._role.refuse(self.failure)
            return
        self._shared = True


def _in_messages(plan: StepPlan) -> Iterator[tuple[list[Load], list[Store]]]:
    """A step's jobs in as few messages as the sidecar accepts, loads first."""
    loads: list[Load] = []
    stores: list[Store] = []
    size_bytes = 0
    jobs: list[Load | Store] = [*plan.loads, *plan.stores]
    for job in jobs:
        job_bytes = job.bytes_max
        full = len(loads) + len(stores) == JOBS_PER_MESSAGE_MAX
        if size_bytes and (full or size_bytes + job_bytes > JOBS_BYTES_MAX):
            yield loads, stores
            loads, stores, size_bytes = [], [], 0
        if isinstance(job, Load):
            loads.append(job)
        else:
            stores.append(job)
        size_bytes += job_bytes
    yield loads, stores

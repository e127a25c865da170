"""Worker role: shares one rank's KV memory and submits its jobs, a step at a time.

Owns the jobs of this rank between submission and answer. Each ends exactly once: answered by the
sidecar, failed because there is none, or revoked after its deadline. A job that may still touch
this engine's memory never ends (see `tiers.kv.fence`): after its deadline, or without a sidecar, it
ends once the fence page shows that no copy of it can run. Also owns sleep mode. Does not own the
export of memory (`export.py`) nor what is loaded and stored (`scheduler/`).
"""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from connector.client import Attempt, Client, SidecarSession
from connector.export import EXPORT_FAULTS, ExportedMemory, fault_reason
from connector.plan import (
    IDLE_WAIT_MS,
    LOADS_WAIT_MS,
    Load,
    StepPlan,
    StepReport,
    Store,
    batches,
)
from sidecar.protocol import (
    FRAME_BYTES_MAX,
    JOBS_PER_MESSAGE_MAX,
    KIND_CUDA_IPC,
    Attach,
    Done,
    Error,
    Outcome,
    ServerMessage,
    Submit,
)
from tiers.errors import TierError
from tiers.kv.fence import WorkerFence

logger = logging.getLogger("vllm.kvlake")

JOBS_BYTES_MAX: Final = FRAME_BYTES_MAX - 64 * 1024
RELEASE_SECONDS_MAX: Final = 10.0
"""How long to wait until the sidecar unmapped what is freed next. It takes milliseconds."""
UNATTACHED_SECONDS_MIN: Final = 1.0
"""After so long a rank reports that it has no session: beside a new sidecar it soon has one."""
OTHER_SECONDS_MIN: Final = 30.0
"""The same with another sidecar than its scheduler's: plans made before a restart come late."""
OTHER_SIDECAR: Final = (
    "the engine's processes are attached to different sidecars, so it is served without the cache; "
    'set "socket" in kv_connector_extra_config to the attach.sock of one, and start the engine '
    "again"
)
NOTHING: Final = StepPlan()


@dataclass(slots=True)
class _Outstanding:
    job: Load | Store
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
    """One rank's end. `export` shares its KV memory as it is now, or raises `EXPORT_FAULTS`."""

    def __init__(
        self,
        export: Callable[[], ExportedMemory],
        make_client: Callable[[Callable[[], Attempt]], Client],
        describe: Callable[[ExportedMemory], Attach],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._export = export
        self._make_client = make_client
        self._describe = describe
        self._clock = clock
        self._step = 0
        self._unattached = False
        """Whether the last report said that this rank has no session."""
        self._unattached_since = math.inf
        self._other_since = math.inf
        self._other = False
        """Whether the log says that this rank is with another sidecar than its scheduler."""
        self.fence: WorkerFence | None = None
        self._session: SidecarSession | None = None
        self.retired: list[WorkerFence] = []
        """Fences of lost sessions that may still have open jobs."""
        self.outstanding: dict[int, _Outstanding] = {}
        self._results = TransferResults()
        self._memory: ExportedMemory | None = None
        """None during sleep, and after a refusal."""
        self.client: Client | None = None
        self._left = False
        """A rank can never be served, so this one left for good."""
        self.refusal = ""
        """Why this rank can never be served, or nothing. All ranks and the scheduler detach."""
        self._share()

    def _share(self, when: str = "", remedy: str = "") -> None:
        try:
            self._memory = self._export()
        except EXPORT_FAULTS as error:
            # Not tried again: the other ranks and the scheduler leave too, and nothing calls them.
            self.refusal = f"{when}{fault_reason(error)}{remedy}"
            self._results.report.refusal = self.refusal
            return
        self.client = self._make_client(self._make_attempt)

    def _make_attempt(self) -> Attempt:
        # Runs on the client's thread. A new fence page per attempt: an earlier sidecar that still
        # runs must not read what is meant for its successor.
        memory = self._memory
        assert memory is not None
        fence = memory.new_fence()
        return Attempt(self._describe(memory), [*memory.fds, fence.fd], fence)

    def _refresh_session(self) -> SidecarSession | None:
        session = self.client.session if self.client is not None else None
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
        if plan.retired and self.client is not None and not self._left:
            self._left = True
            # In the middle of a step, so do not wait. Open jobs end as when a sidecar dies. The
            # memory stays until `close`: the client's thread may be sending its descriptor.
            self.client.close(wait_seconds_max=0.0)
        planned: list[Load | Store] = [*plan.loads, *plan.stores]
        jobs: list[Load | Store] = []
        for job in planned:
            known = isinstance(job, Load) or has_adapter(job.adapter_id, job.adapter_files)
            if known and not stale:
                jobs.append(job)
            else:
                self._end(job, Outcome.FAILED)
        if not jobs:
            return
        session = self._refresh_session()
        fence = self.fence
        self._step += 1
        # A sidecar that hangs in a copy keeps the page locked, and no job can be revoked.
        if session is None or fence is None or fence.revoking or not self._signal(fence):
            for job in jobs:
                self._end(job, Outcome.FAILED)
            return
        assert self.client is not None
        now, limits = self._clock(), session.limits
        size_of = attrgetter("bytes_max")
        for batch in batches(jobs, size_of, JOBS_BYTES_MAX, JOBS_PER_MESSAGE_MAX):
            loads = [job.job for job in batch if isinstance(job, Load)]
            stores = [job.job for job in batch if isinstance(job, Store)]
            sent = self.client.send(session, Submit(session.epoch, self._step, loads, stores))
            for job in batch:
                if not sent:
                    self._end(job, Outcome.FAILED)
                    continue
                load = isinstance(job, Load)
                wait_ms = limits.load_deadline_ms_max if load else limits.store_deadline_ms_max
                self.outstanding[job.job.job_id] = _Outstanding(job, now + wait_ms / 1000, fence)

    def _signal(self, fence: WorkerFence) -> bool:
        """Have the page show when this step's work is done; False if it never will.

        Loads wait for that, too: the step may still read the blocks that they overwrite.
        """
        try:
            fence.signal(self._step)
        except TierError as error:
            self.refuse(f"its GPU cannot mark the end of a step: {error}")
            return False
        return True

    def collect(self, plan: StepPlan = NOTHING) -> TransferResults:
        """Everything that ended since the last call. Call once per step, with its plan.

        In an idle step this waits a moment for an answer, also if only another rank or a lookup is
        waiting: vLLM repeats such a step at once, and spinning workers kept a sidecar from running.
        For its own loads it waits longer: the copy may need the core where it would spin.
        """
        now, before = self._clock(), self._unattached
        session = self._refresh_session()
        other = session is not None and plan.epoch not in (0, session.epoch)
        unattached = other or (session is None and plan.epoch != 0)
        self._unattached_since = min(self._unattached_since, now) if unattached else math.inf
        seconds_min = OTHER_SECONDS_MIN if other and not before else UNATTACHED_SECONDS_MIN
        self._unattached = now - self._unattached_since >= seconds_min
        if before or self._unattached:
            self._results.report.unattached = int(self._unattached)
        self._other_since = min(self._other_since, now) if other else math.inf
        lasts = now - self._other_since >= OTHER_SECONDS_MIN
        if lasts and not self._other:
            logger.warning("kvlake: %s", OTHER_SIDECAR)
        self._other = lasts
        client = self.client
        if client is not None and plan.idle and (self.outstanding or plan.waiting):
            loading = any(isinstance(one.job, Load) for one in self.outstanding.values())
            client.wait(LOADS_WAIT_MS if loading else IDLE_WAIT_MS)
        if client is not None and (self.outstanding or self.retired):
            for message in client.poll():
                self._answered(message)
            self._expire()
        results, self._results = self._results, TransferResults()
        return results

    def _answered(self, message: ServerMessage) -> None:
        if isinstance(message, Done):
            for ended in message.jobs:
                if (outstanding := self.outstanding.pop(ended.job_id, None)) is not None:
                    self._end(outstanding.job, ended.outcome)
        elif isinstance(message, Error):
            # The jobs of the refused message get no answer, and which they are is not known.
            logger.warning(
                "kvlake: the sidecar refused jobs (%s): %s", message.code, message.message
            )
            for outstanding in self.outstanding.values():
                outstanding.deadline = 0.0

    def _expire(self) -> None:
        """End jobs that get no answer: past their deadline, or of a lost session."""
        now = self._clock()
        revoke_below: dict[WorkerFence, int] = {}
        for job_id, open_job in self.outstanding.items():
            fence = open_job.fence
            if fence is not self.fence or now >= open_job.deadline:
                revoke_below[fence] = max(revoke_below.get(fence, 0), job_id + 1)
        # False while a copy runs: its jobs stay until it ends, and no other copy starts.
        revoked = {fence for fence, below in revoke_below.items() if fence.try_revoke(below)}
        for job_id, open_job in list(self.outstanding.items()):
            if open_job.fence in revoked and job_id < revoke_below[open_job.fence]:
                del self.outstanding[job_id]
                late = 0.0 < open_job.deadline <= now
                self._end(open_job.job, Outcome.EXPIRED if late else Outcome.REVOKED)
        for page in (self.fence, *self.retired):
            if page is not None and page.revoking and page not in revoke_below:
                # The jobs that were to be revoked were answered in time.
                page.give_up_revoking()
        busy = {job.fence for job in self.outstanding.values()}
        for page in [page for page in self.retired if page.quiet and page not in busy]:
            self.retired.remove(page)
            page.close()

    def _end(self, job: Load | Store, outcome: Outcome) -> None:
        results = self._results
        if isinstance(job, Load):
            results.report.loads_expired += outcome is Outcome.EXPIRED
            results.loaded.add(job.request_id)
            if outcome is not Outcome.OK:
                results.failed.add(job.request_id)
            return
        results.report.stores_expired += outcome is Outcome.EXPIRED
        results.report.ended[job.job.job_id] = 1
        if outcome not in (Outcome.OK, Outcome.PARTIAL):
            results.report.failed += 1
            results.failed_stores.add(job.job.job_id)

    def refuse(self, reason: str) -> None:
        """Never attach: the scheduler learns of it with the next step. May be repeated."""
        self.refusal = self._results.report.refusal = reason

    def unregister(self) -> None:
        """Detach before the engine sleeps and its memory is freed. May be repeated.

        vLLM 0.33 and later free the memory between this and `restore`. A sidecar that still maps it
        keeps the old pages, so a late copy harms nobody. Open jobs end as when a sidecar dies, and
        until `restore` every new job fails at once.
        """
        if self.client is None or self._memory is None:
            return
        if not self.client.close(RELEASE_SECONDS_MAX):
            logger.warning(
                "kvlake: the sidecar did not release this engine's KV memory within %g s; the "
                "memory stays allocated until it does",
                RELEASE_SECONDS_MAX,
            )
        self._refresh_session()
        self._expire()
        self._memory.close()
        self._memory = None

    def restore(self) -> None:
        """Share the memory that came back, and attach again. May be repeated."""
        if self._memory is None and not self.refusal and not self._left:
            self._share("after sleep mode ", "; restart the engine")

    def close(self) -> None:
        """Detach. Open jobs end with the session.

        Waits until the sidecar unmapped memory of a legacy IPC handle. An engine in a program that
        goes on frees its memory next, and CUDA leaves undefined what that does to a mapping.
        """
        if self.client is not None:
            ipc = self._memory is not None and self._memory.shared.kind == KIND_CUDA_IPC
            self.client.close(RELEASE_SECONDS_MAX if ipc else 0.0)
        if self._memory is not None:
            self._memory.close()

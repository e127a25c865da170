"""Carries rows of vLLM's host tier to and from the sidecar, through a staging buffer.

vLLM's host tier is a plain file, which the sidecar refuses to map (`tiers/kv/memfd.py`), and whose
rows vLLM reuses at any time. So a few rows of a memfd stand between: a thread copies between a row
of the region and a staging row, the sidecar between staging rows and its slots.

Owns the staging rows, the thread, and the transfers in flight. Knows nothing of vLLM.

Invariants:

* Only the thread touches the region, and only until the transfer is reported as ended. After that
  the region's row may be reused, whatever the sidecar does.
* Every transfer ends, by the sidecar's answer or at its deadline. One that is given up keeps its
  staging row until the sidecar can no longer touch it.
* Only `drain` waits, and only for copies within this process.
"""

import itertools
import mmap
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from connector.client import SidecarSession
from connector.export import ExportedMemory
from connector.plan import Load, StepPlan, Store
from connector.worker import WorkerRole
from sidecar.protocol import (
    JOBS_PER_MESSAGE_MAX,
    KIND_MEMFD,
    LoadChunk,
    LoadJob,
    Memory,
    StoreChunk,
    StoreJob,
)
from tiers.kv.keys import NO_PARENT
from tiers.kv.layout import CONTENT_BYTES_MAX, ROW_ENCODING, KVLayout, Segment
from tiers.kv.mapping import map_shared
from tiers.kv.memfd import sealed_memfd

Rows = npt.NDArray[np.uint8]
"""Shape: [rows, bytes]."""

BLOCK_TOKENS: Final = 1
"""vLLM does not say which tokens are in a row, so to the sidecar a row is a block of one token."""
TOKEN_IDS: Final = bytes(4 * BLOCK_TOKENS)
"""The tokens are not known; the encoding says so."""
STORES_PER_JOB_MAX: Final = 64


class StagedRow(NamedTuple):
    """A chunk `key` in row `chunk_id` of the region; the rest is for stores."""

    key: bytes
    chunk_id: int
    parent: bytes = NO_PARENT
    ttl_ms: int = 0
    stays: bool = False


@dataclass(slots=True)
class Batch:
    """Transfers that are reported together."""

    batch_id: int
    is_load: bool
    started: float
    left: int
    done: list[bytes] = field(default_factory=list[bytes])
    failed: list[bytes] = field(default_factory=list[bytes])
    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class StagedTransfer:
    """A transfer of one row."""

    batch: Batch
    chunk: StagedRow
    deadline: float
    row: int = -1
    copy: Future[None] | None = None
    given_up: bool = False


def row_layout(num_rows: int, row_bytes: int) -> KVLayout:
    """Rows as blocks of one token, in heads of a size that is accepted; raises `LayoutError`."""
    heads = 1
    while row_bytes // heads > CONTENT_BYTES_MAX:
        # Rows are whole pages.
        heads *= 2
    content = row_bytes // heads
    pages = -(-num_rows * row_bytes // mmap.PAGESIZE)
    return KVLayout.from_views(
        Segment(0, 1, 0, heads),
        [(0, (num_rows, heads, BLOCK_TOKENS, content), (row_bytes, content, content, 1))],
        itemsize=1,
        dtype="uint8",
        encoding=ROW_ENCODING,
        size_bytes=pages * mmap.PAGESIZE,
    )


class Staging:
    """`make_role` attaches the memory of the `num_rows` staging rows as that of a worker."""

    def __init__(
        self,
        region: Rows,
        num_rows: int,
        make_role: Callable[[ExportedMemory], WorkerRole],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._region = region
        self._clock = clock
        layout = row_layout(num_rows, region.shape[1])
        fd = sealed_memfd("kvlake-staging", layout.size_bytes)
        _, flat = map_shared(fd, layout.size_bytes)
        self._rows: Rows = flat[: num_rows * region.shape[1]].reshape(num_rows, region.shape[1])
        self._free = list(range(num_rows))
        self._kept_for_loads = num_rows // 4
        """Rows that stores leave free: a request waits for a load, nothing for a store."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvlake-staging")
        self._queued: dict[bool, deque[StagedTransfer]] = {True: deque(), False: deque()}
        self._copying: list[StagedTransfer] = []
        self._copied: list[StagedTransfer] = []
        self._loads: dict[int, StagedTransfer] = {}
        self._stores: dict[int, list[StagedTransfer]] = {}
        self._finished: list[Batch] = []
        self._new_id: Callable[[], int] = itertools.count(2).__next__
        self._role = make_role(ExportedMemory(fd, Memory(KIND_MEMFD, layout.size_bytes), [layout]))

    def begin(
        self, batch_id: int, rows: Sequence[StagedRow], *, is_load: bool, seconds_max: float
    ) -> None:
        """Queue these rows. `finished` reports them, after a later `pump`."""
        now = self._clock()
        batch = Batch(batch_id, is_load, now, len(rows))
        if not rows:
            self._finished.append(batch)
            return
        self._queued[is_load].extend(
            StagedTransfer(batch, chunk, now + seconds_max) for chunk in rows
        )

    def pump(self, session: SidecarSession | None) -> None:
        """Take what has ended, and continue the rest. Never waits."""
        self._collect()
        self._copies_ended()
        self._expire(everything=session is None)
        if session is None:
            return
        inflight_max = min(session.limits.jobs_inflight_max, JOBS_PER_MESSAGE_MAX)
        plan = StepPlan()
        self._send_stores(plan, inflight_max)
        self._start_loads(plan, inflight_max)
        self._start_stores()
        if plan.loads or plan.stores:
            self._role.submit(plan)

    def finished(self) -> list[Batch]:
        """Batches that ended since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def drain(self) -> None:
        """End everything now, after a copy that runs; the region is not touched afterwards."""
        for transfer in list(self._copying):
            if transfer.copy is not None and not transfer.copy.cancel():
                transfer.copy.result()
        self._copies_ended()
        self._expire(everything=True)

    def close(self) -> None:
        """Detach. Transfers in flight end with the session."""
        self.drain()
        self._thread.shutdown()
        self._role.close()
        # vLLM unmaps it next, which a view prevents.
        self._region = np.empty((0, 0), dtype=np.uint8)

    def _collect(self) -> None:
        results = self._role.collect()
        for request_id in results.loaded:
            transfer = self._loads.pop(int(request_id))
            if transfer.given_up or request_id in results.failed:
                self._end(transfer, ok=False)
            else:
                region = self._region[transfer.chunk.chunk_id]
                self._copy(transfer, self._rows[transfer.row], region)
        for job_id in results.report.ended:
            for transfer in self._stores.pop(job_id):
                self._end(transfer, ok=job_id not in results.failed_stores)

    def _copies_ended(self) -> None:
        copying, self._copying = self._copying, []
        for transfer in copying:
            copy = transfer.copy
            assert copy is not None
            if not copy.done():
                self._copying.append(transfer)
            elif copy.cancelled() or copy.exception() is not None:
                self._end(transfer, ok=False)
            elif transfer.batch.is_load:
                self._end(transfer, ok=True)
            else:
                self._copied.append(transfer)

    def _expire(self, *, everything: bool) -> None:
        """Give up transfers past their deadline, except those that the thread copies right now."""
        now = self._clock()

        def over(transfer: StagedTransfer) -> bool:
            return everything or now >= transfer.deadline

        for waiting in (*self._queued.values(), self._copied):
            for transfer in [one for one in waiting if over(one)]:
                waiting.remove(transfer)
                self._end(transfer, ok=False)
        sent = [*self._loads.values(), *(one for job in self._stores.values() for one in job)]
        for transfer in sent:
            if over(transfer) and not transfer.given_up:
                transfer.given_up = True
                self._report(transfer, ok=False)

    def _send_stores(self, plan: StepPlan, inflight_max: int) -> None:
        while self._copied and len(self._loads) + len(self._stores) < inflight_max:
            first = self._copied[0].chunk
            # Retention holds for all chunks of a job.
            retention = first.ttl_ms, first.stays
            alike = [
                one for one in self._copied if (one.chunk.ttl_ms, one.chunk.stays) == retention
            ]
            sent = alike[:STORES_PER_JOB_MAX]
            self._copied = [one for one in self._copied if one not in sent]
            chunks = [
                StoreChunk(one.chunk.key, one.chunk.parent, TOKEN_IDS, [one.row]) for one in sent
            ]
            job_id = self._new_id()
            self._stores[job_id] = sent
            plan.stores.append(Store(StoreJob(job_id, chunks, *retention)))

    def _start_loads(self, plan: StepPlan, inflight_max: int) -> None:
        queued = self._queued[True]
        while queued and self._free and len(self._loads) + len(self._stores) < inflight_max:
            transfer = queued.popleft()
            transfer.row = self._free.pop()
            job_id = self._new_id()
            self._loads[job_id] = transfer
            # A job for each, so that one failure fails no other.
            chunk = LoadChunk(transfer.chunk.key, 0, [transfer.row])
            plan.loads.append(Load(str(job_id), LoadJob(job_id, [chunk])))

    def _start_stores(self) -> None:
        queued = self._queued[False]
        while queued and len(self._free) > self._kept_for_loads:
            transfer = queued.popleft()
            transfer.row = self._free.pop()
            self._copy(transfer, self._region[transfer.chunk.chunk_id], self._rows[transfer.row])

    def _copy(self, transfer: StagedTransfer, source: Rows, target: Rows) -> None:
        # np.copyto releases the GIL for rows of this size.
        transfer.copy = self._thread.submit(np.copyto, target, source)
        self._copying.append(transfer)

    def _end(self, transfer: StagedTransfer, *, ok: bool) -> None:
        """Free the staging row, which nothing touches any more."""
        if transfer.row >= 0:
            self._free.append(transfer.row)
        if not transfer.given_up:
            self._report(transfer, ok=ok)

    def _report(self, transfer: StagedTransfer, *, ok: bool) -> None:
        batch = transfer.batch
        (batch.done if ok else batch.failed).append(transfer.chunk.key)
        batch.left -= 1
        if not batch.left:
            batch.seconds = self._clock() - batch.started
            self._finished.append(batch)

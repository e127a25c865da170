"""Copies between workers and slots: which waits, which is next, and what a copy thread does.

Owns the groups of `Gather` and `Scatter` commands from their arrival until their `Copied` events:
waiting for the worker's fence, the order of the copy threads, and the copy itself, one thread hop
for all chunks of a job. Does not own slots, sessions or what an outcome means.

Invariants:

* A load is reported as good only if every chunk of it hashed, on its way, to the checksum taken
  when it left an engine. One corrupt chunk, and the whole job is a miss: its blocks are computed,
  and none of them is read before. (Why not hash first and copy then: docs/adr/0006.)
* A copy holds the worker's fence lock while it touches the worker's memory, and starts only if
  its job is not revoked. A lock that the worker has is tried again later, never waited for in a
  thread, so one stopped worker cannot hold the copy threads.
* Every command ends in exactly one `Copied`, however its session, its fence or the copy fare.
* A started copy runs to its end; cancelling only stops the waiting for it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

import anyio
import numpy as np
import numpy.typing as npt

from sidecar.commands import Copied, CopyOutcome, Gather, Scatter
from sidecar.logs import fields, story_of
from tiers.arrow import payload_hasher
from tiers.errors import ChunkCorrupt
from tiers.filesystems import run_to_end

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from sidecar.memory import WorkerMemory
    from sidecar.realms import Rank
    from sidecar.session import Session

T = TypeVar("T")
Memory = npt.NDArray[np.uint8]

HOP_BYTES_MAX: Final = 64 * 1024 * 1024
"""Stores are cut into hops of about this size, so that a load never waits behind a large one."""
LOADS_IN_A_ROW_MAX: Final = 8
"""Loads go before stores, but a waiting store gets every ninth turn."""
FENCE_POLL_SECONDS_MIN: Final = 0.0005
FENCE_POLL_SECONDS_MAX: Final = 0.005

_logger = logging.getLogger("kvlake.copies")


@dataclass(slots=True, eq=False)
class Group:
    """Gathers or scatters of one job, copied together."""

    session: Session
    memory: WorkerMemory
    rank: Rank
    commands: Sequence[Gather | Scatter]
    deadline: float
    """Moment (monotonic seconds) after which the group is no longer worth waiting for."""

    @property
    def job_id(self) -> int:
        """The job that all its commands belong to."""
        return self.commands[0].job_id

    @property
    def fence(self) -> int:
        """The step after which its blocks may be touched."""
        return self.commands[0].fence

    @property
    def is_load(self) -> bool:
        """Whether it writes to the worker's memory."""
        return isinstance(self.commands[0], Scatter)

    def all_ended(self, outcome: CopyOutcome, detail: str = "") -> list[Copied]:
        """The same ending for every command."""
        return [Copied(command.copy_id, outcome, detail) for command in self.commands]


class Copies:
    """The queue of copies and the tasks that work on it."""

    def __init__(
        self, pool: Memory, threads: int, finished: Callable[[list[Copied]], None]
    ) -> None:
        self._pool = pool
        self._threads = threads
        self._limiter = anyio.CapacityLimiter(threads)
        self._finished = finished
        self._waiting: list[Group] = []
        self._loads: deque[Group] = deque()
        self._stores: deque[Group] = deque()
        self._loads_in_a_row = 0
        self._ready = anyio.Semaphore(0)
        self._arrived = anyio.Event()
        self._poll_seconds = FENCE_POLL_SECONDS_MIN
        self._running = 0
        self._loads_running = 0
        self._begun: list[float] = []
        """When each copy that runs now began (monotonic seconds), oldest first."""

    @property
    def loads_pending(self) -> int:
        """Loads whose fence was reached and that have not ended: engines wait for these."""
        return len(self._loads) + self._loads_running

    @property
    def pending(self) -> int:
        """Groups that have not ended."""
        return len(self._waiting) + len(self._loads) + len(self._stores) + self._running

    def stuck_seconds(self, now: float) -> float:
        """How long no copy thread has been free to begin a copy; 0 while one is."""
        return now - self._begun[-1] if len(self._begun) >= self._threads else 0.0

    async def run(self) -> None:
        """Work on the queue until cancelled; a copy that runs then is waited for."""
        async with anyio.create_task_group() as group:
            for _ in range(self._threads):
                group.start_soon(self._copier)
            await self._gate()

    def add(self, group: Group) -> None:
        """Queue a group; one whose fence is reached already does not wait for the next poll."""
        for part in _hops(group):
            if part.memory.fence.reached(part.fence):
                self._enqueue(part)
            else:
                self._waiting.append(part)
                self._poll_seconds = FENCE_POLL_SECONDS_MIN
                self._arrived.set()

    def drop(self, session: Session) -> None:
        """End what has not started of a session that is over: nobody waits for it."""
        dropped: list[Group] = []
        for queue in (self._loads, self._stores):
            ended = [group for group in queue if group.session is session]
            for group in ended:
                queue.remove(group)
            dropped += ended
        dropped += [group for group in self._waiting if group.session is session]
        self._waiting = [group for group in self._waiting if group.session is not session]
        for group in dropped:
            self._finished(group.all_ended(CopyOutcome.REVOKED, "the session ended"))

    def _enqueue(self, group: Group) -> None:
        (self._loads if group.is_load else self._stores).append(group)
        self._ready.release()

    async def _gate(self) -> None:
        """Let groups through as their fences are reached; give up those past their deadline."""
        while True:
            if not self._waiting:
                self._arrived = anyio.Event()
                await self._arrived.wait()
            await anyio.sleep(self._poll_seconds)
            self._poll_seconds = min(self._poll_seconds * 1.5, FENCE_POLL_SECONDS_MAX)
            self._sweep(time.monotonic())

    def _sweep(self, now: float) -> None:
        waiting, self._waiting = self._waiting, []
        for group in waiting:
            if group.memory.fence.reached(group.fence):
                self._enqueue(group)
            elif now > group.deadline:
                detail = f"fence {group.fence} was not reached before the job's deadline"
                self._finished(group.all_ended(CopyOutcome.FAILED, detail))
            else:
                self._waiting.append(group)

    def _next(self) -> Group | None:
        """Loads first: an engine's request waits for them. None if `drop` took it away."""
        if self._loads and (self._loads_in_a_row < LOADS_IN_A_ROW_MAX or not self._stores):
            self._loads_in_a_row += 1
            return self._loads.popleft()
        self._loads_in_a_row = 0
        return self._stores.popleft() if self._stores else None

    async def _copier(self) -> None:
        while True:
            await self._ready.acquire()
            group = self._next()
            if group is None:
                continue
            self._running += 1
            self._loads_running += group.is_load
            begun = time.monotonic()
            self._begun.append(begun)
            try:
                with group.memory.in_use() as mapped:
                    ended = await self._copy(group, mapped=mapped)
            finally:
                self._running -= 1
                self._loads_running -= group.is_load
                self._begun.remove(begun)
            if ended is None:
                # The worker was revoking at that moment. Its lock lasts microseconds, or as long
                # as it is stopped: back to the gate, where the deadline bounds it.
                self._retry(group)
            else:
                self._finished(ended)

    def _retry(self, group: Group) -> None:
        if group.memory.ended:
            self._finished(group.all_ended(CopyOutcome.REVOKED, "the session ended"))
        elif time.monotonic() > group.deadline:
            detail = "the worker held its fence page until after the job's deadline"
            self._finished(group.all_ended(CopyOutcome.FAILED, detail))
        else:
            self._waiting.append(group)
            self._arrived.set()

    async def _copy(self, group: Group, *, mapped: bool) -> list[Copied] | None:
        if not mapped:
            return group.all_ended(CopyOutcome.REVOKED, "the session ended")
        copy = _scatter if group.is_load else _gather
        try:
            return await run_to_end(lambda: copy(group, self._pool), self._limiter)
        except BlockingIOError:
            return None
        except Exception as error:
            # A copy that raised is a miss to its engine, and no reason to leave the others alone.
            # Not `exception`: a record that is kept would keep the worker's memory mapped.
            _logger.error(  # noqa: TRY400
                "copy failed",
                extra=fields(
                    session=group.session.session_id, job=group.job_id, traceback=story_of(error)
                ),
            )
            return group.all_ended(CopyOutcome.FAILED, str(error))


def _hops(group: Group) -> Iterable[Group]:
    if group.is_load:
        # Whole: one corrupt chunk makes a miss of the job, so there is one answer for all of it.
        return [group]
    chunk_bytes = group.rank.layout.payload_bytes(group.rank.layout.blocks_per_chunk)
    step = max(1, HOP_BYTES_MAX // chunk_bytes)
    return [
        Group(
            group.session,
            group.memory,
            group.rank,
            group.commands[first : first + step],
            group.deadline,
        )
        for first in range(0, len(group.commands), step)
    ]


def _gather(group: Group, pool: Memory) -> list[Copied]:
    """In a copy thread: blocks to slots, then seal. Raises `BlockingIOError`: try again."""
    plan, templates = group.memory.plan, group.rank.templates
    copied: list[tuple[Gather, bytes]] = []
    ended: list[Copied] = []
    with group.memory.fence.copying(group.job_id) as valid:
        if not valid:
            return group.all_ended(CopyOutcome.REVOKED, "the worker took its blocks back")
        for command in _only(Gather, group.commands):
            try:
                template = templates[len(command.block_ids)]
                slot = pool[command.slot : command.slot + template.image_bytes]
                template.prepare(slot)
                hasher = payload_hasher()
                ids, payload = _ids(command.block_ids), template.payload(slot)
                plan.gather(group.memory.view, ids, payload, visit=hasher.update)
            except Exception as error:
                _logger.error(  # noqa: TRY400
                    "gather failed", extra=fields(key=command.key, traceback=story_of(error))
                )
                ended.append(Copied(command.copy_id, CopyOutcome.FAILED, str(error)))
            else:
                copied.append((command, hasher.digest()))
    for command, checksum in copied:
        template = templates[len(command.block_ids)]
        slot = pool[command.slot : command.slot + template.image_bytes]
        template.seal(slot, command.key, command.parent, command.token_ids, checksum=checksum)
        ended.append(Copied(command.copy_id, CopyOutcome.OK))
    return ended


def _scatter(group: Group, pool: Memory) -> list[Copied]:
    """In a copy thread: slots to blocks, verified. Raises `BlockingIOError`: try again."""
    commands = _only(Scatter, group.commands)
    corrupt: dict[int, str] = {}
    with group.memory.fence.copying(group.job_id) as valid:
        if not valid:
            return group.all_ended(CopyOutcome.REVOKED, "the worker took its blocks back")
        for command in commands:
            try:
                _scatter_one(group, command, pool)
            except ChunkCorrupt as error:
                corrupt[command.copy_id] = str(error)
    if not corrupt:
        return group.all_ended(CopyOutcome.OK)
    return [
        Copied(command.copy_id, CopyOutcome.CORRUPT, corrupt[command.copy_id])
        if command.copy_id in corrupt
        else Copied(command.copy_id, CopyOutcome.FAILED, "another chunk of the job is corrupt")
        for command in commands
    ]


def _scatter_one(group: Group, command: Scatter, pool: Memory) -> None:
    """Copy the wanted blocks of one slot; hash all of it, for the checksum covers all."""
    layout, template = group.rank.layout, group.rank.templates[command.num_blocks]
    slot = pool[command.slot : command.slot + template.image_bytes]
    payload = template.payload(slot)
    first = command.first_block * layout.block_payload_bytes
    last = first + len(command.block_ids) * layout.block_payload_bytes
    hasher = payload_hasher()
    hasher.update(payload[:first].data)
    ids, wanted = _ids(command.block_ids), payload[first:last]
    group.memory.plan.scatter(group.memory.view, ids, wanted, visit=hasher.update)
    hasher.update(payload[last:].data)
    template.check(slot, hasher.digest())


def _ids(block_ids: tuple[int, ...]) -> npt.NDArray[np.int64]:
    return np.array(block_ids, dtype=np.int64)


def _only(kind: type[T], commands: Iterable[object]) -> list[T]:
    return [command for command in commands if isinstance(command, kind)]

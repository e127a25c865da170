"""Copies between workers and slots: their order, when one starts, and what a copy thread does.

Owns the groups of `Gather` and `Scatter` commands until they end, the copy threads, the polling of
fences, and the copy itself, one call in a thread for all chunks of a job. Loads come before stores,
the sessions of each kind take turns, and the groups of one session are copied as they came. Does
not own slots, sessions, or what an outcome means.

Invariants:

* A load succeeds only if every chunk of it that is to be verified hashed, while it was copied, to
  the checksum taken when it left an engine. One corrupt chunk makes a miss of the whole job: its
  blocks are computed before they are read. (Why not hash before copying: docs/adr/0006.)
* A copy holds the worker's fence lock while it touches the worker's memory, and starts only if its
  job is not revoked. A lock that the worker holds is tried again later, never waited for in a
  thread, so a stopped worker cannot occupy the copy threads.
* Every command ends in exactly one `Copied`, and starts before its deadline or never. A started
  copy runs to its end; cancelling only stops the waiting for it.
* A group is in one place: behind its fence, ready, running, or gone.
* A session that floods delays another's next group by one group of its own, not by its backlog.
* Fences and deadlines of one session's groups do not decrease, so polling all queues costs the
  number of sessions, not of groups. A client that breaks this delays its own groups only, until
  their deadline at most.
"""

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar, cast

import anyio
import numpy as np
import numpy.typing as npt

from sidecar.core.commands import Copied, Gather, Scatter
from sidecar.data.transfer_times import Kind, TransferTimes
from sidecar.logs import fields, traceback_end
from sidecar.protocol import Outcome
from sidecar.sessions.namespaces import RankLayout, RealmLayout
from sidecar.sessions.session import Session
from sidecar.sessions.worker_memory import WorkerMemory
from tiers.errors import ChunkCorrupt
from tiers.kv.copy import Region, Transfer
from tiers.kv.slot_image import payload_hasher
from tiers.store.client import run_to_end
from tiers.threads import DedicatedThreads

T = TypeVar("T")
Memory = npt.NDArray[np.uint8]

LOADS_IN_A_ROW_MAX: Final = 8
"""A waiting store gets every ninth turn."""
STORE_BYTES_MAX: Final = 64 * 1024 * 1024
"""Stores are cut into parts of this size, so that a load never waits behind a large one."""
FENCE_POLL_SECONDS_MIN: Final = 0.0005
FENCE_POLL_SECONDS_MAX: Final = 0.005

_logger = logging.getLogger("kvlake.copies")


@dataclass(slots=True, eq=False)
class CopyGroup:
    """Gathers or scatters of one job, copied together."""

    session: Session
    memory: WorkerMemory
    rank: RankLayout
    commands: Sequence[Gather | Scatter]
    deadline: float
    """Monotonic seconds after which the group must not start."""
    part: int = 0
    """The worker's KV cache group that the chunks are of."""
    arrived: float = field(default_factory=time.monotonic)
    """When its job arrived (monotonic seconds)."""

    @property
    def region(self) -> Region:
        """That KV cache group in the worker's memory."""
        return self.memory.regions[self.part]

    @property
    def realm(self) -> RealmLayout:
        """The realm that the chunks are of."""
        return self.session.realms[self.part]

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

    @property
    def about(self) -> str:
        """What is copied, for whom."""
        attach = self.session.attach
        return f"{len(self.commands)} chunks, engine {attach.engine_id}, rank {attach.rank}"

    @property
    def num_bytes(self) -> int:
        """Bytes to copy."""
        num_blocks = sum(len(command.block_ids) for command in self.commands)
        return num_blocks * self.rank.layout.block_payload_bytes

    @property
    def may_start(self) -> bool:
        """Whether its fence was reached, and its worker is not waiting to take blocks back."""
        fence = self.memory.fence
        return fence.reached(self.fence) and not fence.revoking

    def all_ended(self, outcome: Outcome, detail: str = "") -> list[Copied]:
        """The same outcome for every command."""
        return [Copied(command.copy_id, outcome, detail) for command in self.commands]


class _RoundRobin:
    """Groups by session. The sessions take turns."""

    def __init__(self) -> None:
        self._queues: dict[Session, deque[CopyGroup]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def sessions(self) -> list[Session]:
        """The sessions that have groups, in the order of their turns."""
        return list(self._queues)

    def head(self, session: Session) -> CopyGroup | None:
        """The first group of a session."""
        queue = self._queues.get(session)
        return None if queue is None else queue[0]

    def queue_of(self, session: Session) -> deque[CopyGroup]:
        """The groups of a session, to add one."""
        return self._queues.setdefault(session, deque())

    def pop(self, session: Session | None = None) -> CopyGroup:
        """Take the first group of a session, by default of the one whose turn it is.

        Its next group goes behind all other sessions.
        """
        session = next(iter(self._queues)) if session is None else session
        queue = self._queues.pop(session)
        group = queue.popleft()
        if queue:
            self._queues[session] = queue
        return group

    def drop(self, session: Session) -> list[CopyGroup]:
        """Take every group of a session out."""
        return list(self._queues.pop(session, ()))


class CopyQueue:
    """Groups on their way to the copy threads."""

    def __init__(self) -> None:
        self._waiting = (_RoundRobin(), _RoundRobin())
        self._loads = _RoundRobin()
        self._stores = _RoundRobin()
        self._loads_in_a_row = 0

    def __len__(self) -> int:
        return sum(map(len, self._queues()))

    @property
    def waiting(self) -> int:
        """Groups whose fence was not reached yet."""
        return sum(map(len, self._waiting))

    @property
    def loads_ready(self) -> int:
        """Loads whose fence was reached."""
        return len(self._loads)

    def add(self, group: CopyGroup) -> bool:
        """Queue a group. True if it is ready now."""
        waiting = self._waiting[group.is_load]
        # Behind the waiting groups of its session, so that `sweep` need only look at the first.
        if waiting.head(group.session) is None and group.may_start:
            self._make_ready(group)
            return True
        waiting.queue_of(group.session).append(group)
        return False

    def put_back(self, group: CopyGroup) -> None:
        """Queue a group again that could not start because its worker was revoking."""
        self._waiting[group.is_load].queue_of(group.session).appendleft(group)

    def _make_ready(self, group: CopyGroup) -> None:
        (self._loads if group.is_load else self._stores).queue_of(group.session).append(group)

    def sweep(self, now: float) -> tuple[int, list[CopyGroup]]:
        """Make groups ready whose fence is reached. Returns how many, and the expired groups."""
        ready, expired = 0, list[CopyGroup]()
        for queue in self._waiting:
            for session in queue.sessions():
                while (group := queue.head(session)) is not None:
                    if group.may_start:
                        self._make_ready(queue.pop(session))
                        ready += 1
                    elif now > group.deadline:
                        expired.append(queue.pop(session))
                    else:
                        break
        return ready, expired

    def next(self) -> CopyGroup | None:
        """The group whose turn it is, or None."""
        if self._loads and (self._loads_in_a_row < LOADS_IN_A_ROW_MAX or not self._stores):
            self._loads_in_a_row += 1
            return self._loads.pop()
        self._loads_in_a_row = 0
        return self._stores.pop() if self._stores else None

    def sessions(self) -> set[Session]:
        """The sessions that have groups."""
        return {session for queue in self._queues() for session in queue.sessions()}

    def drop(self, session: Session) -> list[CopyGroup]:
        """Take every group of a session out."""
        return [group for queue in self._queues() for group in queue.drop(session)]

    def _queues(self) -> tuple[_RoundRobin, ...]:
        return self._loads, self._stores, *self._waiting


class Copies:
    """The queue of copies and the tasks that work on it."""

    def __init__(
        self,
        pool: Memory,
        threads: int,
        finished: Callable[[list[Copied]], None],
        times: TransferTimes,
    ) -> None:
        self._pool = pool
        self._threads = threads
        self._limiter = anyio.CapacityLimiter(threads)
        self._finished = finished
        self.queue = CopyQueue()
        self.times = times
        self._ready = anyio.Semaphore(0)
        self._arrived = anyio.Event()
        self._poll_seconds = FENCE_POLL_SECONDS_MIN
        self._running: dict[CopyGroup, float] = {}
        """When each copy that runs now began (monotonic seconds), oldest first."""

    @property
    def loads_pending(self) -> int:
        """Loads that are ready or run. Engines wait for these."""
        return self.queue.loads_ready + sum(group.is_load for group in self._running)

    def stuck_seconds(self, now: float) -> float:
        """Seconds since a copy thread was last free; 0 while one is."""
        if len(self._running) < self._threads:
            return 0.0
        return now - next(reversed(self._running.values()))

    async def run(self) -> None:
        """Work on the queue until cancelled; a copy that runs then is waited for."""
        # Engines wait for a copy, which holds their fence. Its thread keeps the process's priority.
        threads = DedicatedThreads(self._threads, "kvlake-copy")
        try:
            async with anyio.create_task_group() as group:
                for _ in range(self._threads):
                    group.start_soon(self._copier, threads)
                await self._gate()
        finally:
            threads.close()

    def add(self, group: CopyGroup) -> None:
        """Queue a group. Where its fence is reached already, it need not wait for a poll."""
        # A load is not cut: one corrupt chunk makes a miss of the job, so all of it has one answer.
        step = len(group.commands)
        if not group.is_load:
            layout = group.rank.layout
            step = max(1, STORE_BYTES_MAX // layout.payload_bytes(layout.blocks_per_chunk))
        for first in range(0, len(group.commands), step):
            part = replace(group, commands=group.commands[first : first + step])
            if self.queue.add(part):
                self._ready.release()
            else:
                self._poll_seconds = FENCE_POLL_SECONDS_MIN
                self._arrived.set()

    def drop(self, session: Session) -> None:
        """End the groups of a closed session that have not started."""
        for group in self.queue.drop(session):
            self._finished(group.all_ended(Outcome.REVOKED, "the session ended"))

    async def _gate(self) -> None:
        """Let groups through as their fences are reached; give up those past their deadline."""
        while True:
            if not self.queue.waiting:
                self._arrived = anyio.Event()
                await self._arrived.wait()
            await anyio.sleep(self._poll_seconds)
            self._poll_seconds = min(self._poll_seconds * 1.5, FENCE_POLL_SECONDS_MAX)
            ready, expired = self.queue.sweep(time.monotonic())
            for _ in range(ready):
                self._ready.release()
            for group in expired:
                revoking = group.memory.fence.revoking
                what = "the worker revoked" if revoking else f"fence {group.fence} was not reached"
                detail = f"{what} until the job's deadline"
                self._finished(group.all_ended(Outcome.EXPIRED, detail))

    async def _copier(self, threads: DedicatedThreads) -> None:
        while True:
            await self._ready.acquire()
            group = self.queue.next()
            if group is None:
                continue
            if time.monotonic() > group.deadline:
                detail = "no copy thread was free before the job's deadline"
                self._finished(group.all_ended(Outcome.EXPIRED, detail))
                continue
            self._running[group] = time.monotonic()
            try:
                with group.memory.in_use() as mapped:
                    ended = await self._copy(group, threads, mapped=mapped)
            finally:
                del self._running[group]
            if ended is None:
                # The worker holds its lock for microseconds, or as long as it is stopped. The gate
                # tries again until the deadline.
                self._retry(group)
            else:
                if all(one.outcome is Outcome.OK for one in ended):
                    kind, realm = Kind.LOAD if group.is_load else Kind.STORE, group.realm
                    seconds = time.monotonic() - group.arrived
                    self.times.ended(kind, realm, seconds, group.num_bytes, group.about)
                self._finished(ended)

    def _retry(self, group: CopyGroup) -> None:
        if group.memory.ended:
            self._finished(group.all_ended(Outcome.REVOKED, "the session ended"))
        elif time.monotonic() > group.deadline:
            detail = "the worker held its fence page until after the job's deadline"
            self._finished(group.all_ended(Outcome.EXPIRED, detail))
        else:
            self.queue.put_back(group)
            self._arrived.set()

    async def _copy(
        self, group: CopyGroup, threads: DedicatedThreads, *, mapped: bool
    ) -> list[Copied] | None:
        if not mapped:
            return group.all_ended(Outcome.REVOKED, "the session ended")
        copy = scatter_group if group.is_load else gather_group
        try:
            return await run_to_end(lambda: copy(group, self._pool), self._limiter, threads=threads)
        except BlockingIOError:
            return None
        except Exception as error:
            # A copy that raised is a miss for its engine; the other copies go on.
            # Not `exception`: a log record that is kept would keep the worker's memory mapped.
            _logger.error(  # noqa: TRY400
                "copy failed",
                extra=fields(
                    session=group.session.session_id,
                    job=group.job_id,
                    traceback=traceback_end(error),
                ),
            )
            return group.all_ended(Outcome.FAILED, str(error))


def gather_group(group: CopyGroup, pool: Memory) -> list[Copied]:
    """In a copy thread: blocks to slots, then seal. Raises `BlockingIOError`: try again."""
    commands, templates = cast("Sequence[Gather]", group.commands), group.rank.templates
    copied: list[tuple[Gather, bytes]] = []
    ended: list[Copied] = []

    def begin(command: Gather) -> Transfer:
        template = templates[len(command.block_ids)]
        slot = pool[command.slot : command.slot + template.image_bytes]
        template.prepare(slot)
        return group.region.gather(np.array(command.block_ids, np.int64), template.payload(slot))

    with group.memory.fence.copying(group.job_id) as valid, contextlib.ExitStack() as begun:
        if not valid:
            return group.all_ended(Outcome.REVOKED, "the worker took its blocks back")
        for command, transfer in _one_ahead(commands, begin, begun):
            try:
                hasher = payload_hasher()
                transfer.finish(hasher.update)
            except Exception as error:
                _logger.error(  # noqa: TRY400
                    "gather failed", extra=fields(key=command.key, traceback=traceback_end(error))
                )
                ended.append(Copied(command.copy_id, Outcome.FAILED, str(error)))
            else:
                copied.append((command, hasher.digest()))
    for command, checksum in copied:
        template = templates[len(command.block_ids)]
        slot = pool[command.slot : command.slot + template.image_bytes]
        template.seal(slot, command.key, command.parent, command.token_ids, checksum=checksum)
        ended.append(Copied(command.copy_id, Outcome.OK))
    return ended


def scatter_group(group: CopyGroup, pool: Memory) -> list[Copied]:
    """In a copy thread: slots to blocks, verified. Raises `BlockingIOError`: try again."""
    commands = cast("Sequence[Scatter]", group.commands)
    corrupt: dict[int, str] = {}

    def begin(command: Scatter) -> Transfer:
        _, wanted, _ = _payload(group, command, pool)
        return group.region.scatter(np.array(command.block_ids, np.int64), wanted)

    with group.memory.fence.copying(group.job_id) as valid, contextlib.ExitStack() as begun:
        if not valid:
            return group.all_ended(Outcome.REVOKED, "the worker took its blocks back")
        for command, transfer in _one_ahead(commands, begin, begun):
            try:
                _finish_scatter(group, command, pool, transfer)
            except ChunkCorrupt as error:
                corrupt[command.copy_id] = str(error)
    if not corrupt:
        return group.all_ended(Outcome.OK)
    return [
        Copied(command.copy_id, Outcome.CORRUPT, corrupt[command.copy_id])
        if command.copy_id in corrupt
        else Copied(command.copy_id, Outcome.FAILED, "another chunk of the job is corrupt")
        for command in commands
    ]


def _finish_scatter(group: CopyGroup, command: Scatter, pool: Memory, transfer: Transfer) -> None:
    """Finish the transfer of the wanted blocks, and hash the whole slot for its checksum."""
    if not command.verify:
        transfer.finish(lambda _: None)
        return
    template = group.rank.templates[command.num_blocks]
    before, _, after = _payload(group, command, pool)
    hasher = payload_hasher()
    hasher.update(before.data)
    transfer.finish(hasher.update)
    hasher.update(after.data)
    slot = pool[command.slot : command.slot + template.image_bytes]
    template.check(slot, hasher.digest())


def _payload(group: CopyGroup, command: Scatter, pool: Memory) -> tuple[Memory, Memory, Memory]:
    """The payload of a slot: before the wanted blocks, those, and after them."""
    layout, template = group.rank.layout, group.rank.templates[command.num_blocks]
    payload = template.payload(pool[command.slot : command.slot + template.image_bytes])
    first = command.first_block * layout.block_payload_bytes
    last = first + len(command.block_ids) * layout.block_payload_bytes
    return payload[:first], payload[first:last], payload[last:]


def _one_ahead(
    commands: Iterable[T], begin: Callable[[T], Transfer], begun: contextlib.ExitStack
) -> Iterator[tuple[T, Transfer]]:
    """Each command with its transfer; the next one is begun before this one is finished.

    Copy engines then work while a core hashes. `begun` waits at its end for every transfer, so no
    copy outlives it. What `begin` raises is raised by `finish`.
    """
    ahead: tuple[T, Transfer] | None = None
    for command in commands:
        try:
            transfer = begin(command)
            begun.callback(transfer.settle)
        except Exception as error:
            transfer = _NotBegun(error)
        if ahead is not None:
            yield ahead
        ahead = (command, transfer)
    if ahead is not None:
        yield ahead


class _NotBegun:
    """A transfer that failed before it began."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def finish(self, visit: object) -> None:  # noqa: ARG002 (of every transfer)
        raise self._error

    def settle(self) -> None:
        pass

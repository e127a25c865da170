"""Copies between workers and slots: when one starts, how it ends, and what a copy thread does.

Owns the groups of `Gather` and `Scatter` commands until they end, the polling of fences, and the
copy itself, one call in a thread for all chunks of a job. Copy threads take groups themselves, so
that none is idle while the event loop is busy. Does not own the order of groups (`copy_queue.py`),
the threads (`tiers/threads.py`), slots, sessions, or what an outcome means.

Invariants:

* A load succeeds only if every chunk of it that is to be verified hashed, while it was copied, to
  the checksum taken when it left an engine. One corrupt chunk makes a miss of the whole job, also
  where several threads copied it: its blocks are computed before they are read. (Why not hash
  before copying: docs/adr/0006.)
* A copy holds the worker's fence lock while it touches the worker's memory, and starts only if its
  job is not revoked. A lock that the worker holds is tried again later, never waited for in a
  thread, so a stopped worker cannot occupy the copy threads.
* Every command ends in exactly one `Copied`, and starts before its deadline or never. A started
  copy runs to its end; cancelling only stops the waiting for it.
* A worker's memory stays mapped while a group of it is queued or copied.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final, TypeVar, cast

import anyio
import anyio.abc
import numpy as np
import numpy.typing as npt

from sidecar.core.commands import Copied, Gather, Scatter
from sidecar.data.copy_queue import CopyGroup, CopyQueue
from sidecar.data.transfer_times import Kind, TransferTimes
from sidecar.logs import fields, traceback_end
from sidecar.protocol import Outcome
from sidecar.sessions.session import Session
from tiers.errors import ChunkCorrupt
from tiers.kv.copy import Transfer
from tiers.kv.slot_image import payload_hasher
from tiers.threads import DedicatedThreads

T = TypeVar("T")
Memory = npt.NDArray[np.uint8]

STORE_BYTES_MAX: Final = 64 * 1024 * 1024
"""Stores are cut into parts of this size, so that a load never waits behind a large one."""
LOAD_BYTES_MIN: Final = 4 * 1024 * 1024
"""Parts of a load that several threads copy are at least this large: they take half a ms each."""
FENCE_POLL_SECONDS_MIN: Final = 0.0005
FENCE_POLL_SECONDS_MAX: Final = 0.005

_logger = logging.getLogger("kvlake.copies")


class Copies:
    """The queue of copies and the threads that work on it.

    `finished` gets what ended, on the event loop.
    """

    def __init__(
        self,
        pool: Memory,
        threads: int,
        finished: Callable[[list[Copied]], None],
        times: TransferTimes,
    ) -> None:
        self._pool = pool
        self._finished = finished
        self.queue = CopyQueue()
        self.times = times
        # Engines wait for a copy, which holds their fence. Its thread keeps the process's priority.
        self._threads = DedicatedThreads(
            threads,
            "kvlake-copy",
            take=self.queue.take,
            carry_out=self._carry_out,
            ended=self._ended,
        )
        self._arrived = anyio.Event()
        self._poll_seconds = FENCE_POLL_SECONDS_MIN

    @property
    def loads_pending(self) -> int:
        """Loads, or parts of them, that are ready or run. Engines wait for these."""
        return self.queue.loads_ready + self._loads_running

    @property
    def _loads_running(self) -> int:
        running = [one[1] for one in self._threads.running if one is not None]
        return sum(group.is_load for group in running)

    def stuck_seconds(self, now: float) -> float:
        """Seconds since a copy thread was last free; 0 while one is."""
        began = [one[0] for one in self._threads.running if one is not None]
        return now - max(began) if len(began) == len(self._threads.running) else 0.0

    async def run(
        self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Work on the queue until cancelled; a copy that runs then is waited for.

        Raises `NoThread`, in a group, before it has started.
        """
        async with anyio.create_task_group() as tasks:
            await tasks.start(self._threads.run)
            task_status.started()
            await self._gate()

    def add(self, group: CopyGroup) -> None:
        """Queue a group. Where its fence is reached already, it need not wait for a poll."""
        step = self._chunks_per_part(group)
        if step >= len(group.commands):
            self._add(group)
            return
        for first in range(0, len(group.commands), step):
            self._add(replace(group, commands=group.commands[first : first + step]))

    def _chunks_per_part(self, group: CopyGroup) -> int:
        """How many chunks of a job one thread copies."""
        layout = group.rank.layout
        chunk_bytes = layout.payload_bytes(layout.blocks_per_chunk)
        if not group.is_load:
            return max(1, STORE_BYTES_MAX // chunk_bytes)
        # Threads that have no other load to copy share it. While all have one, it is not cut:
        # loads that take turns all end late.
        free = len(self._threads.running) - self.queue.loads - self._loads_running
        least = -(-LOAD_BYTES_MIN // chunk_bytes)
        return max(least, -(-len(group.commands) // max(1, free)))

    def _add(self, group: CopyGroup) -> None:
        group.memory.hold()
        if self.queue.add(group):
            self._threads.wake()
        else:
            self._poll_seconds = FENCE_POLL_SECONDS_MIN
            self._arrived.set()

    def drop(self, session: Session) -> None:
        """End the groups of a closed session that have not started."""
        for group in self.queue.drop(session):
            self._finish(group, Outcome.REVOKED, "the session ended")

    def _finish(self, group: CopyGroup, outcome: Outcome, detail: str) -> None:
        group.memory.release()
        self._finished(group.all_ended(outcome, detail))

    async def _gate(self) -> None:
        """Let groups through as their fences are reached; give up those past their deadline."""
        while True:
            if not self.queue.waiting:
                self._arrived = anyio.Event()
                await self._arrived.wait()
            await anyio.sleep(self._poll_seconds)
            self._poll_seconds = min(self._poll_seconds * 1.5, FENCE_POLL_SECONDS_MAX)
            ready, expired = self.queue.sweep(time.monotonic())
            self._threads.wake(ready)
            for group in expired:
                revoking = group.memory.fence.revoking
                what = "the worker revoked" if revoking else f"fence {group.fence} was not reached"
                self._finish(group, Outcome.EXPIRED, f"{what} until the job's deadline")

    def _carry_out(self, group: CopyGroup) -> list[Copied] | None:
        """Copy, in a copy thread. None: the worker holds its lock, so try again."""
        if time.monotonic() > group.deadline:
            detail = "no copy thread was free before the job's deadline"
            return group.all_ended(Outcome.EXPIRED, detail)
        copy = scatter_group if group.is_load else gather_group
        try:
            return copy(group, self._pool)
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

    def _ended(self, groups: list[tuple[CopyGroup, list[Copied] | None]]) -> None:
        ended: list[Copied] = []
        for group, copied in groups:
            if copied is None:
                # The worker holds its lock for microseconds, or as long as it is stopped. The gate
                # tries again until the deadline.
                self._retry(group)
                continue
            group.memory.release()
            if all(one.outcome is Outcome.OK for one in copied):
                kind = Kind.LOAD if group.is_load else Kind.STORE
                seconds = time.monotonic() - group.arrived
                self.times.ended(kind, group.realm, seconds, group.num_bytes, group.about)
            ended += copied
        if ended:
            self._finished(ended)

    def _retry(self, group: CopyGroup) -> None:
        if group.memory.ended:
            self._finish(group, Outcome.REVOKED, "the session ended")
        elif time.monotonic() > group.deadline:
            detail = "the worker held its fence page until after the job's deadline"
            self._finish(group, Outcome.EXPIRED, detail)
        else:
            self.queue.put_back(group)
            self._arrived.set()


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
                ended.append(Copied([command.copy_id], Outcome.FAILED, str(error)))
            else:
                copied.append((command, hasher.digest()))
    for command, checksum in copied:
        template = templates[len(command.block_ids)]
        slot = pool[command.slot : command.slot + template.image_bytes]
        template.seal(slot, command.key, command.parent, command.token_ids, checksum=checksum)
    if copied:
        ended.append(Copied([command.copy_id for command, _ in copied], Outcome.OK))
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
    ended = [Copied([copy_id], Outcome.CORRUPT, why) for copy_id, why in corrupt.items()]
    others = [one.copy_id for one in commands if one.copy_id not in corrupt]
    if others:
        ended.append(Copied(others, Outcome.FAILED, "another chunk of the job is corrupt"))
    return ended


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

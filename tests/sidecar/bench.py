"""A session with memory and a pool of slots, without sockets: what copies and the executor work on.

Owns the commands that are made of block numbers, and waiting for how they end. The fixture `bench`
(`conftest.py`) makes one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import anyio
import numpy as np
import numpy.typing as npt

from sidecar.core.commands import (
    Copied,
    Event,
    Gather,
    Scatter,
)
from sidecar.data.copy_queue import CopyGroup
from sidecar.protocol import Outcome, Role
from sidecar.sessions.namespaces import RankLayout, RealmLayout, Realms
from sidecar.sessions.session import Session, Sessions
from sidecar.sessions.worker_memory import WorkerMemory, take_memory
from tests.sidecar.client import WAIT_SECONDS_MAX, attach_message, key_of, layout_of
from tiers.kv.fence import WorkerFence
from tiers.kv.memfd import sealed_memfd

SLOTS = 8
LAYOUT = layout_of(num_blocks=16)


async def until(true: Callable[[], bool]) -> None:
    """Poll: what is waited for is seen through its effects, as its callers see it."""
    with anyio.fail_after(WAIT_SECONDS_MAX):
        while not true():  # noqa: ASYNC110
            await anyio.sleep(0.001)


def wait_for(true: Callable[[], bool]) -> None:
    """The same without an event loop."""
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@dataclass
class Bench:
    """A session with memory and a pool of slots, without sockets."""

    realms: Realms
    realm: RealmLayout
    rank: RankLayout
    memory: WorkerMemory
    session: Session
    fence: WorkerFence
    bytes: npt.NDArray[np.uint8]
    pool: npt.NDArray[np.uint8]
    sessions: Sessions
    ended: list[Copied] = field(default_factory=list[Copied])
    told: list[Event] = field(default_factory=list[Event])

    def slot(self, number: int) -> int:
        return number * self.rank.templates.slot_bytes

    def gather(self, number: int, *, job: int = 1, fence: int = 0, blocks: int = 1) -> Gather:
        tokens = bytes(4 * blocks * LAYOUT.block_tokens)
        ids = tuple(range(number, number + blocks))
        key = key_of(number)
        return Gather(number, 1, job, fence, 1, 0, self.slot(number), key, ids, bytes(32), tokens)

    def scatter(self, number: int, target: int, *, job: int = 2, fence: int = 0) -> Scatter:
        return Scatter(
            100 + number, 1, job, fence, 1, 0, self.slot(number), key_of(number), (target,), 1, 0
        )

    def group(self, *commands: Gather | Scatter, seconds: float = 60) -> CopyGroup:
        return CopyGroup(self.session, self.memory, self.rank, commands, time.monotonic() + seconds)

    async def wait(self, count: int) -> dict[int, Outcome]:
        await until(lambda: sum(len(event.copy_ids) for event in self.ended) >= count)
        return {one: event.outcome for event in self.ended for one in event.copy_ids}


@contextmanager
def new_bench() -> Iterator[Bench]:
    """One that is taken down in the end, when nothing may be mapped any more."""
    fence = WorkerFence()
    memory_fd = sealed_memfd("kv", LAYOUT.size_bytes)
    attach = attach_message(Role.WORKER, LAYOUT)
    memory = take_memory(attach, [os.dup(memory_fd), os.dup(fence.fd)])
    assert memory is not None
    view: npt.NDArray[np.uint8] = np.memmap(f"/proc/self/fd/{memory_fd}", dtype=np.uint8, mode="r+")
    view[:] = np.random.default_rng(1).integers(0, 256, view.size, dtype=np.uint8)
    realms = Realms()
    (realm,) = realms.join(attach.parts)
    realm.register(0, LAYOUT.chunk(attach.blocks_per_chunk))
    sessions = Sessions(8)
    connection = cast("Any", None)
    session = sessions.open(attach, connection, (realm,), memory)
    rank = realm.ranks[0]
    pool = np.zeros(SLOTS * rank.templates.slot_bytes, dtype=np.uint8)
    yield Bench(realms, realm, rank, memory, session, fence, view, pool, sessions)
    sessions.close(session)
    wait_for(lambda: not memory.mapping.mapped)
    realms.close()
    fence.close()
    os.close(memory_fd)

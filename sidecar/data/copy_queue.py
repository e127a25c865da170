"""Groups of copies on their way to the copy threads: their order, and when one may start.

Owns the groups of `Gather` and `Scatter` commands that have not started. Loads come before stores,
the sessions of each kind take turns, and the groups of one session are copied as they came. Does
not own the threads, nor the copies themselves (`copies.py`).

Invariants:

* A group is in one place: behind its fence, ready, or taken.
* A session that floods delays another's next group by one group of its own, not by its backlog.
* Fences and deadlines of one session's groups do not decrease, so polling all queues costs the
  number of sessions, not of groups. A client that breaks this delays its own groups only, until
  their deadline at most.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from sidecar.core.commands import Copied, Gather, Scatter
from sidecar.protocol import Outcome
from sidecar.sessions.namespaces import RankLayout, RealmLayout
from sidecar.sessions.session import Session
from sidecar.sessions.worker_memory import WorkerMemory
from tiers.kv.copy import Region

LOADS_IN_A_ROW_MAX: Final = 8
"""A waiting store gets every ninth turn."""


@dataclass(slots=True, eq=False)
class CopyGroup:
    """Gathers or scatters of one job, or a part of them, copied by one thread."""

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
        return [Copied([command.copy_id for command in self.commands], outcome, detail)]


class _RoundRobin:
    """Groups by session. The sessions take turns."""

    def __init__(self) -> None:
        self._queues: dict[Session, deque[CopyGroup]] = {}
        self.groups = 0

    def sessions(self) -> list[Session]:
        """The sessions that have groups, in the order of their turns."""
        return list(self._queues)

    def head(self, session: Session) -> CopyGroup | None:
        """The first group of a session."""
        queue = self._queues.get(session)
        return None if queue is None else queue[0]

    def put(self, group: CopyGroup, *, first: bool = False) -> None:
        """Add a group behind those of its session, or before them."""
        queue = self._queues.get(group.session)
        if queue is None:
            queue = self._queues[group.session] = deque()
        if first:
            queue.appendleft(group)
        else:
            queue.append(group)
        self.groups += 1

    def pop(self, session: Session | None = None) -> CopyGroup:
        """Take the first group of a session, by default of the one whose turn it is.

        Its next group goes behind all other sessions.
        """
        session = next(iter(self._queues)) if session is None else session
        queue = self._queues.pop(session)
        group = queue.popleft()
        if queue:
            self._queues[session] = queue
        self.groups -= 1
        return group

    def drop(self, session: Session) -> list[CopyGroup]:
        """Take every group of a session out."""
        groups = list(self._queues.pop(session, ()))
        self.groups -= len(groups)
        return groups


class CopyQueue:
    """Groups on their way to the copy threads. Any thread may call it."""

    def __init__(self) -> None:
        self._waiting = (_RoundRobin(), _RoundRobin())
        self._loads = _RoundRobin()
        self._stores = _RoundRobin()
        self._loads_in_a_row = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(queue.groups for queue in self._queues())

    @property
    def waiting(self) -> int:
        """Groups whose fence was not reached yet."""
        return sum(queue.groups for queue in self._waiting)

    @property
    def loads(self) -> int:
        """Groups that load."""
        return self._waiting[True].groups + self._loads.groups

    @property
    def loads_ready(self) -> int:
        """Those whose fence was reached."""
        return self._loads.groups

    def add(self, group: CopyGroup) -> bool:
        """Queue a group. True if it is ready now."""
        waiting = self._waiting[group.is_load]
        with self._lock:
            # Behind the waiting groups of its session, so that `sweep` need only look at the first.
            if waiting.head(group.session) is None and group.may_start:
                self._make_ready(group)
                return True
            waiting.put(group)
            return False

    def put_back(self, group: CopyGroup) -> None:
        """Queue a group again that could not start because its worker was revoking."""
        with self._lock:
            self._waiting[group.is_load].put(group, first=True)

    def _make_ready(self, group: CopyGroup) -> None:
        (self._loads if group.is_load else self._stores).put(group)

    def sweep(self, now: float) -> tuple[int, list[CopyGroup]]:
        """Make groups ready whose fence is reached. Returns how many, and the expired groups."""
        ready, expired = 0, list[CopyGroup]()
        with self._lock:
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

    def take(self) -> CopyGroup | None:
        """Take the group whose turn it is, or None."""
        with self._lock:
            loads, stores = self._loads, self._stores
            if loads.groups and (self._loads_in_a_row < LOADS_IN_A_ROW_MAX or not stores.groups):
                self._loads_in_a_row += 1
                return loads.pop()
            self._loads_in_a_row = 0
            return stores.pop() if stores.groups else None

    def sessions(self) -> set[Session]:
        """The sessions that have groups."""
        with self._lock:
            return {session for queue in self._queues() for session in queue.sessions()}

    def drop(self, session: Session) -> list[CopyGroup]:
        """Take every group of a session out."""
        with self._lock:
            return [group for queue in self._queues() for group in queue.drop(session)]

    def _queues(self) -> tuple[_RoundRobin, ...]:
        return self._loads, self._stores, *self._waiting

"""Copies that wait for their worker's fence, and then for a copy thread, in a fair order.

Owns the groups of `Gather` and `Scatter` commands until a copy thread takes them, and their order:
loads before stores, the sessions of each kind in turn, the groups of one session as they came. Does
not own the threads or the copies (`copies.py`), and reads no clock.

Invariants:

* A group is in one place: behind its fence, ready, or gone.
* A session that floods delays another's next group by one group of its own, not by its backlog.
* Fences and deadlines of one session's groups do not decrease, so polling all queues costs the
  number of sessions, not of groups. A client that breaks this delays its own groups only, until
  their deadline at most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sidecar.core.commands import Copied, Gather, Scatter
from sidecar.protocol import Outcome
from sidecar.sessions.namespaces import RankLayout
from sidecar.sessions.session import Session
from sidecar.sessions.worker_memory import WorkerMemory
from tiers.kv.copy import Region

LOADS_IN_A_ROW_MAX: Final = 8
"""A waiting store gets every ninth turn."""


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

    @property
    def region(self) -> Region:
        """That KV cache group in the worker's memory."""
        return self.memory.regions[self.part]

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

    def heads(self) -> list[tuple[Session, CopyGroup]]:
        """The first group of each session, in the order of their turns."""
        return [(session, queue[0]) for session, queue in self._queues.items()]

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
            for session, _ in queue.heads():
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

    def heads(self) -> list[tuple[Session, CopyGroup]]:
        """Each session's next group: waiting, ready loads, ready stores."""
        return [head for queue in self._queues() for head in queue.heads()]

    def drop(self, session: Session) -> list[CopyGroup]:
        """Take every group of a session out."""
        return [group for queue in self._queues() for group in queue.drop(session)]

    def _queues(self) -> tuple[_RoundRobin, ...]:
        return self._loads, self._stores, *self._waiting

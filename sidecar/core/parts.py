"""What the parts of the core share: the record that they take, the outbox, snapshots.

Owns no decision but the order of commands and which copies are compared with their checksum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from sidecar.core.commands import Command, IndexOffer, IndexSet, Reply, Resume
from sidecar.protocol import Done

if TYPE_CHECKING:
    from collections.abc import Callable

    from sidecar.core.commands import Counters
    from sidecar.core.directory import Directory, HostSegment
    from sidecar.core.fair_share import FairShares
    from sidecar.core.host_tier import HostTier
    from sidecar.core.tenants import Tenants, TenantSnapshot
    from sidecar.protocol import JobOutcome


@dataclass(frozen=True, slots=True)
class CoreParts:
    """What every part of the core takes. Nothing but references."""

    directory: Directory
    host: HostTier
    counters: Counters
    tenants: Tenants
    bounds: FairShares
    emit: Callable[[Command], None]
    """Adds a command to the outbox."""


class Outbox:
    """Commands of one event on their way out: in order, and packed into few messages.

    The order is index, work, messages. A session gets one `Done` per event, and there is one
    `Resume` until it is answered.
    """

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._index: list[Command] = []
        self._work: list[Command] = []
        self._jobs: dict[int, list[JobOutcome]] = {}
        self._replies: list[Command] = []
        self._resuming = False
        """Whether `Resumed` is to come: one turn is enough for all that was put off."""

    def emit(self, command: Command) -> None:
        """Add one command."""
        if isinstance(command, IndexSet | IndexOffer):
            self._index.append(command)
        elif isinstance(command, Reply):
            self._replies.append(command)
        elif isinstance(command, Resume):
            if not self._resuming:
                self._work.append(command)
            self._resuming = True
        else:
            self._work.append(command)

    def resumed(self) -> None:
        """Others had their turn."""
        self._resuming = False

    def job_ended(self, session_id: int, outcome: JobOutcome) -> None:
        """Add a job's outcome to the session's next `Done`."""
        self._jobs.setdefault(session_id, []).append(outcome)

    def take(self) -> list[Command]:
        """All commands, in order; the outbox is empty afterwards."""
        done = [Reply(session, Done(self._epoch, jobs)) for session, jobs in self._jobs.items()]
        commands = [*self._index, *self._work, *done, *self._replies]
        self._index, self._work, self._jobs, self._replies = [], [], {}, []
        return commands


_HAIR: Final = 1e-6
"""By so much, and less, sums of tenths fall short of one."""


class Sampling:
    """Which segments are compared with their checksum, for one way out of host memory.

    An even part of all, 0 to 1, and without exception those that this process has not seen to be
    right, or has a reason to doubt (`HostSegment.verified`). By rank, because ranks take turns: an
    even part of all would be the same rank's every time.

    Invariant: no chance in it; of n of one rank that are asked about, n times the part are chosen,
    give or take one, and those that are not `verified`.
    """

    def __init__(self, part: float) -> None:
        self._part = part
        self._due: dict[int, float] = {}
        """By rank: what is due to it so far."""

    def chooses(self, segment: HostSegment) -> bool:
        """Whether this segment, which leaves now, is to be compared."""
        due = self._due.get(segment.rank, 0.0) + self._part
        chosen = due > 1 - _HAIR
        self._due[segment.rank] = due - chosen
        return chosen or not segment.verified


@dataclass(frozen=True, slots=True)
class PendingWork:
    """What has not ended yet; a drain waits for all of it to reach zero."""

    copies_running: int
    writes_running: int
    writes_pending: int
    reads_running: int
    reads_queued: int

    @property
    def idle(self) -> bool:
        """Whether nothing is outstanding."""
        return not (
            self.copies_running
            or self.writes_running
            or self.writes_pending
            or self.reads_running
            or self.reads_queued
        )


@dataclass(frozen=True, slots=True)
class RealmSnapshot:
    """One realm's part of the status."""

    realm_id: int
    world_size: int
    sessions: int
    chunks_in_host: int
    chunks_in_store: int


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """Status at one moment."""

    sessions: int
    chunks_in_host: int
    chunks_in_store: int
    slots_allocated: int
    slots_zombie: int
    slots_unclaimed: int
    unclaimed_bytes: int
    leases: int
    lookups: int
    write_queue_bytes: int
    pending: PendingWork
    draining: bool
    realms: tuple[RealmSnapshot, ...]
    tenants: tuple[TenantSnapshot, ...]

"""What the parts of the core share: limits, references to each other, the outbox, and sampling.

Owns the order of the commands of one event. Which decisions lead to them is up to the parts.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from sidecar.core.breaker import BreakerRules
from sidecar.core.commands import Command, Counters, IndexOffer, IndexSet, Reply, Resume
from sidecar.core.directory import Directory, HostSegment
from sidecar.core.fair_share import FairShares, ShareLimits
from sidecar.core.host_tier import HostTier
from sidecar.core.tenants import Tenants
from sidecar.protocol import Done, JobOutcome


class WritePolicy(enum.StrEnum):
    """When a chunk that the store lacks is queued to be written."""

    OFF = "off"
    THROUGH = "through"
    """As soon as all of its segments are in host memory; restored ones when nothing is queued."""
    ON_REUSE = "on_reuse"
    """When a second request uses it: most prompts are never used again."""
    ON_EVICT = "on_evict"
    """While it is among the next to be evicted."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits from the configuration, and how the store is used."""

    writes_inflight_max: int
    reads_inflight_max: int
    write_queue_bytes_max: int
    leases_max_per_session: int
    lease_ttl_seconds_max: float
    lookups_max_per_session: int
    quarantine_keys_max: int
    recompute: bool
    """Whether a run is computed if that takes less time than reading it."""
    regret_max: float
    """Part of the compute time that waiting in vain for the store may cost."""
    breaker: BreakerRules
    write: WritePolicy
    flush_at_end: bool
    """Whether a drain writes what `write` has not written yet."""
    store_reads: bool
    gone_keys_max: int = 0
    """Chunks that are remembered after they left the cache, or were not let in."""
    curve_keys_max: int = 8192
    """Chunks that tell what memory of another size would bring; 0: nothing does."""
    reads_begun_max: int = 1 << 30
    """Reads that one event starts; the others get turns of their own."""
    adopted_max: int = 1 << 30
    """Restored slots that one event adopts; the others get turns of their own."""
    shares: ShareLimits = field(default_factory=ShareLimits)
    verify_loads: float = 1.0
    """Part of the loaded chunks that is verified, 0 to 1; one not verified before always is."""
    verify_writes: float = 1.0
    """The same of the segments that are written to the store."""


@dataclass(frozen=True, slots=True)
class CoreParts:
    """What most parts of the core take. Only references."""

    epoch: int
    limits: EngineLimits
    directory: Directory
    host: HostTier
    counters: Counters
    tenants: Tenants
    shares: FairShares
    emit: Callable[[Command], None]
    """Adds a command to the outbox."""


class CorePart:
    """A part of the core, with its references to the others."""

    def __init__(self, parts: CoreParts) -> None:
        self._directory = parts.directory
        self._host = parts.host
        self._counters = parts.counters
        self._tenants = parts.tenants
        self._shares = parts.shares
        self._limits = parts.limits
        self._emit = parts.emit
        self._epoch = parts.epoch


class Outbox:
    """The commands of one event: index, work, then messages, with one `Done` for a session."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._index: list[Command] = []
        self._work: list[Command] = []
        self._jobs: dict[int, list[JobOutcome]] = {}
        self._replies: list[Command] = []
        self.resuming = False
        """Whether a `Resume` was sent and `Resumed` has not arrived."""

    def change_index(self, command: IndexSet | IndexOffer) -> None:
        """Add a change of the shared index."""
        self._index.append(command)

    def emit(self, command: Command) -> None:
        """Add another command."""
        if isinstance(command, Reply):
            self._replies.append(command)
        elif not (isinstance(command, Resume) and self.resuming):
            self.resuming |= isinstance(command, Resume)
            self._work.append(command)

    def job_ended(self, session_id: int, outcome: JobOutcome) -> None:
        """Add the outcome of a job to the session's next `Done`."""
        self._jobs.setdefault(session_id, []).append(outcome)

    def take(self) -> list[Command]:
        """Remove and return all commands, in order."""
        done = [Reply(session, Done(self._epoch, jobs)) for session, jobs in self._jobs.items()]
        commands = [*self._index, *self._work, *done, *self._replies]
        self._index, self._work, self._jobs, self._replies = [], [], {}, []
        return commands


class Sampling:
    """Which segments are compared with their checksum when they leave host memory.

    A fixed part of all, 0 to 1, and every segment that is not `HostSegment.verified`. Counted per
    rank, because ranks take turns: an even part of all would always select the same rank.

    Invariant: of n segments of one rank, n times the part are selected, plus or minus one, and all
    that are not verified.
    """

    def __init__(self, part: float) -> None:
        self._part = part
        self._due: dict[int, float] = {}

    def selects(self, segment: HostSegment) -> bool:
        """Whether to compare this segment, which leaves now."""
        due = self._due.get(segment.rank, 0.0) + self._part
        # Sums of tenths fall short of one.
        selected = due > 1 - 1e-6
        self._due[segment.rank] = due - selected
        return selected or not segment.verified

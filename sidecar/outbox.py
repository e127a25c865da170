"""Commands of one event on their way out: put in order, and packed into few messages.

Owns the order (index, work, messages) and the bundling: one `Done` per session and event, and
events of the tiers in messages of a bounded size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

from sidecar.commands import Command, IndexOffer, IndexSet, Reply
from sidecar.protocol import Done, Events, JobOutcome, RemovedEvent, StoredEvent

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sidecar.directory import Chunk, FlagChange

T = TypeVar("T")

EVENTS_PER_MESSAGE_MAX: Final = 8192

_TIERS: Final = ("host", "store")


class Outbox:
    """Collects commands until `take`."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._index: list[Command] = []
        self._work: list[Command] = []
        self._jobs: dict[int, list[JobOutcome]] = {}
        self._replies: list[Command] = []

    def emit(self, command: Command) -> None:
        """Add one command."""
        if isinstance(command, IndexSet | IndexOffer):
            self._index.append(command)
        elif isinstance(command, Reply):
            self._replies.append(command)
        else:
            self._work.append(command)

    def job_ended(self, session_id: int, outcome: JobOutcome) -> None:
        """Add a job's outcome to the session's next `Done`."""
        self._jobs.setdefault(session_id, []).append(outcome)

    def tell(self, session_id: int, groups: Mapping[int, int], changes: list[FlagChange]) -> None:
        """Add what a subscriber wants to hear of `changes`. `groups`: realm id to group number."""
        stored: list[StoredEvent] = []
        removed: list[RemovedEvent] = []
        for change in changes:
            group = groups.get(change.realm.realm_id)
            if group is None:
                continue
            for tier, was, now in zip(_TIERS, change.was, change.now, strict=True):
                if was and not now:
                    removed.append(RemovedEvent(change.key, tier, group))
                elif now and not was and change.chunk is not None and _tokens(change.chunk):
                    # A listing tells neither parent nor length, so what is known from a
                    # listing alone is not announced.
                    chunk = change.chunk
                    tokens = _tokens(chunk)
                    stored.append(StoredEvent(change.key, chunk.parent, tokens, tier, group))
        for came in _parts(stored):
            self.emit(Reply(session_id, Events(self._epoch, came, [])))
        for went in _parts(removed):
            self.emit(Reply(session_id, Events(self._epoch, [], went)))

    def take(self) -> list[Command]:
        """All commands, in order; the outbox is empty afterwards."""
        done = [Reply(session, Done(self._epoch, jobs)) for session, jobs in self._jobs.items()]
        commands = [*self._index, *self._work, *done, *self._replies]
        self._index, self._work, self._jobs, self._replies = [], [], {}, []
        return commands


def _tokens(chunk: Chunk) -> int:
    """Tokens of a chunk, 0 while its length is unknown."""
    layout = chunk.realm.layouts[0]
    return 0 if layout is None else chunk.segments[0].num_blocks * layout.block_tokens


def _parts(items: list[T]) -> Iterator[list[T]]:
    for start in range(0, len(items), EVENTS_PER_MESSAGE_MAX):
        yield items[start : start + EVENTS_PER_MESSAGE_MAX]

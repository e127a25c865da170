"""Commands of one event on their way out: put in order, and packed into few messages.

Owns the order (index, work, messages) and the bundling: one `Done` per session and event, one
`Resume` until it is answered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidecar.core.commands import Command, IndexOffer, IndexSet, Reply, Resume
from sidecar.protocol import Done

if TYPE_CHECKING:
    from sidecar.protocol import JobOutcome


class Outbox:
    """Collects commands until `take`."""

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

"""What an engine's commands say, for its tests to compare: answers to sessions, and the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from sidecar.core.commands import Command, Reply
from sidecar.protocol import Done, JobOutcome, LookupDone, Outcome, ServerMessage
from tests.sidecar.engine_names import EPOCH

if TYPE_CHECKING:
    from collections.abc import Sequence


T = TypeVar("T")


def messages(commands: Sequence[Command], session_id: int) -> list[ServerMessage]:
    """What the commands say to one session."""
    return [c.message for c in commands if isinstance(c, Reply) and c.session_id == session_id]


def only(commands: Sequence[Command], kind: type[T]) -> list[T]:
    return [command for command in commands if isinstance(command, kind)]


def done(job_id: int, outcome: Outcome) -> list[Done]:
    return [Done(EPOCH, [JobOutcome(job_id, outcome)])]


def answer(lookup_id: int, ready: int, outcome: Outcome) -> list[LookupDone]:
    return [LookupDone(EPOCH, lookup_id, ready, outcome)]

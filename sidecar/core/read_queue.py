"""Reads that wait for their turn: which segment is read next, and for whom.

Owns the order of queued reads: the sessions that want any take turns, and those of one session come
in the order in which it asked. A segment that several sessions want waits in the queue of each and
is read when the first of them has its turn. Does not own which segments are wanted (`lookups.py`).

Invariants: a session that floods delays another's next read by one read of its own, not by its
backlog; a segment is queued by at least one session, or not at all; a session without queued reads
is not here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sidecar.core.directory import Segment


class ReadQueue:
    """Segments that wait to be read."""

    def __init__(self) -> None:
        self._by_session: dict[int, dict[Segment, None]] = {}
        """In the order of turns; each in the order of asking."""
        self._sessions_of: dict[Segment, set[int]] = {}

    def __len__(self) -> int:
        return len(self._sessions_of)

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._sessions_of)

    def add(self, session_id: int, segment: Segment) -> None:
        """Queue a read for a session, behind what it has queued; once."""
        self._by_session.setdefault(session_id, {})[segment] = None
        self._sessions_of.setdefault(segment, set()).add(session_id)

    def discard(self, segment: Segment) -> None:
        """Nobody wants this read any more."""
        for session_id in self._sessions_of.pop(segment, ()):
            own = self._by_session[session_id]
            del own[segment]
            if not own:
                del self._by_session[session_id]

    def leave(self, session_id: int) -> None:
        """A session is over; what another wants too stays queued for that one."""
        for segment in self._by_session.pop(session_id, ()):
            sessions = self._sessions_of[segment]
            sessions.remove(session_id)
            if not sessions:
                del self._sessions_of[segment]

    def take(self) -> Segment | None:
        """Take out the read whose turn it is; its session's next one goes behind the others."""
        if not self._by_session:
            return None
        session_id = next(iter(self._by_session))
        own = self._by_session.pop(session_id)
        self._by_session[session_id] = own
        segment = next(iter(own))
        self.discard(segment)
        return segment

    def ahead(self, session_id: int, reads: int) -> int:
        """How many queued reads come before the last of so many more of a session, at most."""
        own = len(self._by_session.get(session_id, ()))
        return own + sum(
            min(len(queued), own + reads)
            for other, queued in self._by_session.items()
            if other != session_id
        )

    def check(self) -> None:
        """Verify the invariants; raises AssertionError."""
        sessions_of: dict[Segment, set[int]] = {}
        for session_id, queued in self._by_session.items():
            assert queued, f"session {session_id} has an empty queue"
            for segment in queued:
                sessions_of.setdefault(segment, set()).add(session_id)
        assert sessions_of == self._sessions_of, "a queued read is miscounted"

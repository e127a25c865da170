"""Engines of this node that serve without the cache, for the status and the metrics.

Owns the list: engines that declined by themselves (`Declined`), and clients whose attach was
refused. Does not own the sockets, or when a client is refused (`handshake.py`).

Invariants: an engine is listed once, however many of its processes are concerned. One that declined
stays while a connection of it is open; one that was refused, while it retries. Both are bounded.
"""

import contextlib
import math
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Final

from sidecar.errors import AttachRefused
from sidecar.protocol import (
    DECLINE_REASONS,
    DECLINED_CHARS_MAX,
    Attach,
    Declined,
    FirstMessage,
)
from sidecar.protocol.codec import ProtocolError
from sidecar.protocol.peer import Peer
from sidecar.sessions.model_names import printable

REFUSED: Final = "refused"
OTHER: Final = "other"
REASONS: Final = (*DECLINE_REASONS, REFUSED, OTHER)
"""All reasons. `refused`: the sidecar refused its attach. `other`: a later release's reason."""
REFUSED_SECONDS: Final = 10.0
"""A refused client retries several times a second, or after waiting five seconds for an answer: one
that has not retried within this time is gone."""
REFUSED_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class UncachedEngine:
    """An engine that serves without the cache. `message` is for an operator."""

    engine_id: str
    """Empty where the engine was refused before it named itself."""
    pid: int
    uid: int
    reason: str
    message: str
    since: float
    refused_at: float = math.inf
    """When its attach was last refused; infinite for one that declined."""


class UncachedEngines:
    """The current engines without the cache; `declined_max` connections of those that declined."""

    def __init__(self, declined_max: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._declined_max = declined_max
        self._clock = clock
        self._declined: dict[object, UncachedEngine] = {}
        """By a token for each connection."""
        self._refused: dict[tuple[object, ...], UncachedEngine] = {}
        """In the order of their last refusals."""

    def check(self) -> None:
        """Raise `AttachRefused` where there is no room for another engine that declines."""
        if len(self._declined) >= self._declined_max:
            raise AttachRefused(
                "declined",
                f"limits.sessions_max={self._declined_max} processes of engines without the cache "
                "are listed already; raise it",
            )

    @contextlib.contextmanager
    def declining(self, message: Declined, peer: Peer) -> Generator[None]:
        """List an engine inside the `with` block."""
        token = object()
        reason = message.reason if message.reason in DECLINE_REASONS else OTHER
        self._declined[token] = UncachedEngine(
            message.engine_id, peer.pid, peer.uid, reason, message.message, self._clock()
        )
        try:
            yield
        finally:
            del self._declined[token]

    def refused(self, peer: Peer, first: FirstMessage | None, error: ProtocolError) -> None:
        """List a client for `REFUSED_SECONDS`; `first` is its message, if that was decoded."""
        if error.code == "draining" or isinstance(first, Declined):
            return
        now = self._expire()
        if first is not None:
            key = _session_key(first)
        elif error.code == "user":
            # A user who is not served is refused unread: all clients of one such user count as one.
            key = ("uid", peer.uid)
        else:
            key = ("pid", peer.uid, peer.pid)
        before = self._refused.pop(key, None)
        engine = UncachedEngine(
            "" if first is None else first.engine_id,
            peer.pid,
            peer.uid,
            REFUSED,
            # It may quote what the client sent.
            printable(f"its attach is refused ({error.code}): {error}", DECLINED_CHARS_MAX),
            now if before is None else before.since,
            now,
        )
        self._refused[key] = engine
        if len(self._refused) > REFUSED_MAX:
            del self._refused[next(iter(self._refused))]

    def attached(self, attach: Attach) -> None:
        """Remove a client that may have been refused before."""
        self._refused.pop(_session_key(attach), None)

    def all(self) -> list[UncachedEngine]:
        """All engines without the cache, the longest listed first."""
        self._expire()
        listed = [*self._declined.values(), *self._refused.values()]
        found: dict[object, UncachedEngine] = {}
        for one in sorted(listed, key=lambda one: one.since):
            found.setdefault(one.engine_id or (one.uid, one.pid), one)
        return list(found.values())

    def _expire(self) -> float:
        now = self._clock()
        recent = now - REFUSED_SECONDS
        self._refused = {key: one for key, one in self._refused.items() if one.refused_at >= recent}
        return now


def _session_key(attach: Attach) -> tuple[object, ...]:
    return ("session", attach.engine_id, attach.role, attach.rank)

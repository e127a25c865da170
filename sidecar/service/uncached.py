"""Engines of this node that run without the cache, for whoever looks at the sidecar.

Owns the list: engines that declined by themselves (`Declined`), and clients whose attach was
refused. Does not own the sockets, or when a client is refused (`handshake.py`).

Invariants: an engine is listed once, however many of its processes are concerned. One that declined
stays while a connection of it is open. One that was refused stays while it tries again, and until
it attaches. Both are bounded in number.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from sidecar.errors import AttachRefused
from sidecar.protocol import DECLINE_REASONS, Declined

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from sidecar.protocol import Attach, FirstMessage, ProtocolError
    from sidecar.transport.attach_socket import Peer

REFUSED: Final = "refused"
OTHER: Final = "other"
REASONS: Final = (*DECLINE_REASONS, REFUSED, OTHER)
"""Every reason. `refused`: the sidecar refused its attach. `other`: a later release's word."""
REFUSED_SECONDS: Final = 10.0
"""A client that was refused tries again several times a second, or after an answer that it waited
five seconds for: one that has not come back by then is gone."""
REFUSED_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class UncachedEngine:
    """An engine that runs without the cache. `message` is for an operator."""

    engine_id: str
    """Empty where it was refused before it could say."""
    pid: int
    uid: int
    reason: str
    message: str
    since: float

    @property
    def name(self) -> str:
        """Which engine it is, in words."""
        return f"engine {self.engine_id or '?'} (pid {self.pid}, uid {self.uid})"


class UncachedEngines:
    """The engines without the cache, as of now.

    Args:
        declined_max: connections of engines that declined.
    """

    def __init__(self, declined_max: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._declined_max = declined_max
        self._clock = clock
        self._next_id = 1
        self._declined: dict[int, UncachedEngine] = {}
        self._refused: dict[tuple[object, ...], _Refusal] = {}
        """The one that was refused last comes last."""

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
        """List an engine for as long as this lasts."""
        number, self._next_id = self._next_id, self._next_id + 1
        self._declined[number] = UncachedEngine(
            message.engine_id,
            peer.pid,
            peer.uid,
            message.reason if message.reason in DECLINE_REASONS else OTHER,
            message.message,
            self._clock(),
        )
        try:
            yield
        finally:
            del self._declined[number]

    def refused(
        self, peer: Peer, first: FirstMessage | None, error: AttachRefused | ProtocolError
    ) -> None:
        """List a client for a while; `first` is what it sent, as far as that was understood."""
        if error.code == "draining" or isinstance(first, Declined):
            return
        key = _key(peer, first, error.code)
        now = self._clock()
        since = now
        if (before := self._refused.pop(key, None)) is not None and not before.over(now):
            since = before.engine.since
        engine = UncachedEngine(
            "" if first is None else first.engine_id,
            peer.pid,
            peer.uid,
            REFUSED,
            f"its attach is refused ({error.code}): {error}",
            since,
        )
        self._refused[key] = _Refusal(engine, now)
        while len(self._refused) > REFUSED_MAX:
            del self._refused[next(iter(self._refused))]

    def attached(self, attach: Attach) -> None:
        """A client that may have been refused before is served."""
        self._refused.pop(_session_key(attach), None)

    def all(self) -> list[UncachedEngine]:
        """Every engine without the cache, the first first."""
        now = self._clock()
        self._refused = {key: one for key, one in self._refused.items() if not one.over(now)}
        refused = (one.engine for one in self._refused.values())
        found: dict[object, UncachedEngine] = {}
        for one in sorted((*self._declined.values(), *refused), key=lambda one: one.since):
            found.setdefault(one.engine_id or (one.uid, one.pid), one)
        return list(found.values())

    def by_reason(self) -> dict[str, int]:
        """How many engines, for each of `REASONS`."""
        counts = Counter(one.reason for one in self.all())
        return {reason: counts[reason] for reason in REASONS}


@dataclass(frozen=True, slots=True)
class _Refusal:
    engine: UncachedEngine
    at: float
    """When its attach was refused last."""

    def over(self, now: float) -> bool:
        return now - self.at > REFUSED_SECONDS


def _key(peer: Peer, first: Attach | None, code: str) -> tuple[object, ...]:
    if first is not None:
        return _session_key(first)
    # Nothing that a user who is not served sends is read: all of one user's clients are one.
    return ("uid", peer.uid) if code == "user" else ("pid", peer.uid, peer.pid)


def _session_key(attach: Attach) -> tuple[object, ...]:
    return ("session", attach.engine_id, attach.role, attach.rank)

"""An in-memory double of `connector.client.Client`, and the sessions that it hands out."""

from __future__ import annotations

import itertools
import os
from typing import TypeVar, cast

from connector.client import Client, SidecarSession
from sidecar.protocol import ClientMessage, Limits, ServerMessage
from tiers.kv.index import IndexReader, IndexWriter

LIMITS = Limits(
    lookup_wait_ms_max=500,
    load_deadline_ms_max=5_000,
    store_deadline_ms_max=10_000,
    jobs_inflight_max=64,
    lease_ttl_ms_max=10_000,
)
SALT = bytes(range(16))

M = TypeVar("M")
_epochs = itertools.count(1)


class DoubleClient:
    """Records what is sent and delivers what the test put into `inbox`.

    `live` is the session, or None; as in the real one, a message for another session than the
    live one does not go out, and what was not polled is lost with its session.
    """

    def __init__(self, session: SidecarSession | None = None) -> None:
        self.live = session
        self.accepting = True
        self.sent: list[ClientMessage] = []
        self.inbox: list[ServerMessage] = []
        self.closed = False
        self.releases = True
        self.waited_ms = 0
        self.answers_stale = 0

    @property
    def session(self) -> SidecarSession | None:
        return self.live

    def send(self, session: SidecarSession, message: ClientMessage) -> bool:
        if session is not self.live or not self.accepting:
            return False
        self.sent.append(message)
        return True

    def wait(self, milliseconds: int) -> None:
        self.waited_ms += milliseconds

    def poll(self, of: SidecarSession | None = None) -> list[ServerMessage]:
        if of is not None and of is not self.live:
            return []
        messages, self.inbox = self.inbox, []
        return messages

    def close(self, release_seconds_max: float = 0.0, *, wait_seconds_max: float = 2.0) -> bool:
        self.closed = True
        self.live = None
        return self.releases

    def attach(self, session: SidecarSession | None) -> None:
        """A new session, or none."""
        self.live = session
        self.inbox.clear()

    def sent_of(self, kind: type[M]) -> list[M]:
        return [message for message in self.sent if isinstance(message, kind)]

    def as_client(self) -> Client:
        return cast("Client", self)


def session_of(
    writer: IndexWriter | None = None,
    *,
    limits: Limits = LIMITS,
    salt: bytes = SALT,
    context: object = None,
    epoch: int | None = None,
) -> SidecarSession:
    """A session of a new life of a sidecar, or of `epoch`, with a reader of `writer`'s index."""
    reader = None if writer is None else IndexReader(os.dup(writer.fd), writer.size_bytes)
    return SidecarSession(
        epoch=next(_epochs) if epoch is None else epoch,
        token=os.urandom(16),
        endpoint="inproc://none",
        limits=limits,
        index_salt=salt,
        index=reader,
        context=context,
    )


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now

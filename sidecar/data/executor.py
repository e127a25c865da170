"""Carries out the engine's commands and reports to it how each ended.

Copies go to `copies.py`, reads to `read.py`, index entries to `index_writer.py`, messages to the
server; writes are done here. Decides nothing: what to copy, when to write and what follows from a
failure is the engine's.

Invariants:

* Every command that the engine waits for ends in exactly one event, whatever is raised.
* What leaves host memory is verified where its command says so. The event loop itself never
  touches payload.
* A slot named in a command is touched until its event is fed, and not after: the tiers' verbs
  return only when nothing touches the caller's memory any more.
"""

import itertools
import logging
import operator
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final, TypeVarTuple

import anyio
import anyio.abc
import numpy as np
import numpy.typing as npt

from sidecar.catalog.service import Catalogs
from sidecar.config.sections import LimitsSettings
from sidecar.core.commands import (
    Command,
    Copied,
    Event,
    Gather,
    IndexOffer,
    IndexSet,
    Quarantine,
    Read,
    Reply,
    Resume,
    Resumed,
    Scatter,
    StoreOutcome,
    Withdraw,
    Write,
    Written,
)
from sidecar.data.copies import Copies
from sidecar.data.copy_queue import CopyGroup
from sidecar.data.index_writer import IndexUpdater
from sidecar.data.read import SegmentReader
from sidecar.data.transfer_times import Kind
from sidecar.logs import fields
from sidecar.protocol import Outcome, ServerMessage
from sidecar.sessions.namespaces import RealmLayout, Realms
from sidecar.sessions.session import Sessions
from tiers.catalog.rows import Row
from tiers.errors import ChunkCorrupt, TierExpired, TierFull, TierUnavailable
from tiers.store.client import run_to_end
from tiers.store.object_tier import ObjectTier

Ts = TypeVarTuple("Ts")

VERIFY_THREADS: Final = 1
"""Threads that hash what was not hashed on arrival, and what is written. Copies have their own."""

GIVE_WAY_SECONDS_MAX: Final = 1.0
GIVE_WAY_POLL_SECONDS: Final = 0.002

_logger = logging.getLogger("kvlake.executor")


class Executor:
    """Runs commands. `feed` takes events, `reply` messages, `index_moved` realms to announce."""

    def __init__(
        self,
        *,
        realms: Realms,
        sessions: Sessions,
        pool: npt.NDArray[np.uint8],
        store: ObjectTier | None,
        catalogs: Catalogs | None,
        copies: Copies,
        limits: LimitsSettings,
        feed: Callable[[Event], None],
        reply: Callable[[int, ServerMessage], None],
        index_moved: Callable[[RealmLayout], None],
        store_failed: Callable[[Exception], None],
    ) -> None:
        self._realms = realms
        self._sessions = sessions
        self._pool = pool
        self._store = store
        self._catalogs = catalogs
        self._copies = copies
        self._limits = limits
        self._feed = feed
        self._reply = reply
        self.indexes = IndexUpdater(
            index_moved, lambda realm: self._start(self.indexes.grow, realm)
        )
        self._store_failed = store_failed
        self._verifying = anyio.CapacityLimiter(VERIFY_THREADS)
        self._reader = (
            None if store is None else SegmentReader(store, self._verifying, self._store_failed)
        )
        self.tasks: anyio.abc.TaskGroup | None = None
        """Runs the tasks of commands, once there is one."""

    def execute(self, commands: Iterable[Command]) -> None:
        """Start all commands of one event. Returns at once."""
        groups: dict[tuple[int, int, int, type], list[Gather | Scatter]] = {}
        entries: list[IndexSet] = []
        for command in commands:
            if isinstance(command, IndexSet):
                entries.append(command)
                continue
            if entries:
                self._set(entries)
                entries = []
            match command:
                case Gather() | Scatter():
                    job = (command.session_id, command.job_id, command.realm_id, type(command))
                    groups.setdefault(job, []).append(command)
                case Reply():
                    session = self._sessions.get(command.session_id)
                    if session is not None and command.waited_seconds is not None:
                        self._copies.times.answered(session.realm, command.waited_seconds)
                    self._reply(command.session_id, command.message)
                case IndexOffer():
                    self.indexes.offer(self._realms[command.realm_id].indexed_in, command)
                case Write():
                    self._start(self._write, command)
                case Read():
                    self._start(self._read, command)
                case Quarantine():
                    # Named now: its realm may be forgotten before the task begins.
                    realm = self._realms[command.realm_id]
                    self._start(self._quarantine, realm.object_name(command.bit, command.key))
                case Withdraw():
                    self._withdraw(command)
                case Resume():
                    # A task begins in the next turn of the loop, behind whatever is ready now.
                    self._start(self._resume)
        self._set(entries)
        for group in groups.values():
            self._copy(group)

    def _set(self, entries: Iterable[IndexSet]) -> None:
        for realm_id, of_realm in itertools.groupby(entries, operator.attrgetter("realm_id")):
            self.indexes.set(self._realms[realm_id].indexed_in, of_realm)

    def _start(self, work: Callable[[*Ts], Coroutine[Any, Any, None]], *given: *Ts) -> None:
        assert self.tasks is not None, "commands come only while there are tasks"
        self.tasks.start_soon(work, *given)

    def _copy(self, commands: list[Gather | Scatter]) -> None:
        first = commands[0]
        session = self._sessions.get(first.session_id)
        if session is None or session.memory is None:
            copy_ids = [command.copy_id for command in commands]
            self._feed(Copied(copy_ids, Outcome.REVOKED, "the session ended"))
            return
        loading = isinstance(first, Scatter)
        seconds = self._limits.load_deadline if loading else self._limits.store_deadline
        realm = self._realms[first.realm_id]
        self._copies.add(
            CopyGroup(
                session=session,
                memory=session.memory,
                rank=realm.ranks[first.rank],
                commands=commands,
                deadline=time.monotonic() + seconds,
                part=session.realms.index(realm),
            )
        )

    async def _write(self, command: Write) -> None:
        realm = self._realms[command.realm_id]
        rank, name = realm.ranks[command.rank], realm.object_name(command.rank, command.key)
        template = rank.templates[command.num_blocks]
        image = self._pool[command.slot : command.slot + template.image_bytes]
        outcome, written_at = StoreOutcome.UNAVAILABLE, 0
        try:
            assert self._store is not None, "the engine writes only where there is a store"
            await self._give_way()
            if command.verify:
                await run_to_end(lambda: template.verify_payload(image), self._verifying)
            begun = time.monotonic()
            await self._store.write(name, image)
            seconds = time.monotonic() - begun
            about = f"chunk {command.key.hex()}, rank {command.rank}"
            self._copies.times.ended(
                Kind.WRITE, realm, seconds, template.image_bytes, about, command.cause
            )
            written_at = self._announce(command, realm, template.image_bytes)
            outcome = StoreOutcome.OK
        except ChunkCorrupt as error:
            outcome = StoreOutcome.CORRUPT
            _logger.error("slot is corrupt, not written", extra=fields(object=name, error=error))  # noqa: TRY400
        except (TierUnavailable, TierFull) as error:
            if isinstance(error, TierExpired):
                outcome = StoreOutcome.EXPIRED
            # A store that is down fails every request. Its watch logs that once.
            _logger.debug("write failed", extra=fields(object=name, error=error))
            self._store_failed(error)
        except Exception:
            _logger.exception("write failed", extra=fields(object=name))
        num_bytes = template.image_bytes if outcome is StoreOutcome.OK else 0
        self._feed(Written(command.write_id, outcome, num_bytes, written_at))

    def _announce(self, command: Write, realm: RealmLayout, size_bytes: int) -> int:
        """Announce an object in the catalog; returns when it was written."""
        assert self._catalogs is not None, "the engine writes only where there is a store"
        row = Row(
            key=command.key,
            segment=realm.ranks[command.rank].layout.segment.name,
            written_at=0,
            size_bytes=size_bytes,
            num_blocks=command.num_blocks,
            parent=command.parent,
            tenant=command.tenant,
        )
        return self._catalogs.announce_written(realm, row, later_than=command.written_after)

    def _withdraw(self, command: Withdraw) -> None:
        assert self._catalogs is not None, "the engine withdraws only where there is a store"
        realm = self._realms[command.realm_id]
        segment = realm.by_bit(command.bit).layout.segment.name
        self._catalogs.announce(realm, Row(command.key, segment, command.written_at))

    async def _resume(self) -> None:
        self._feed(Resumed())

    async def _give_way(self) -> None:
        """Let loads go first: hashing and sending take cores, and no engine waits for a write."""
        until = time.monotonic() + GIVE_WAY_SECONDS_MAX
        while self._copies.loads_pending and time.monotonic() < until:  # noqa: ASYNC110 (rare)
            await anyio.sleep(GIVE_WAY_POLL_SECONDS)

    async def _read(self, command: Read) -> None:
        assert self._reader is not None, "the engine reads only where there is a store"
        realm = self._realms[command.realm_id]
        slot_bytes = realm.ranks[command.rank].templates.slot_bytes
        slot = self._pool[command.slot : command.slot + slot_bytes]
        begun = time.monotonic()
        done = await self._reader.read(realm, command, slot)
        if done.outcome is StoreOutcome.OK:
            seconds = time.monotonic() - begun
            about = f"chunk {command.key.hex()}, rank {command.rank}"
            self._copies.times.ended(Kind.READ, realm, seconds, done.num_bytes, about)
        self._feed(done)

    async def _quarantine(self, name: str) -> None:
        try:
            if self._store is not None:
                await self._store.quarantine(name)
        except Exception as error:
            _logger.warning("quarantine failed", extra=fields(object=name, error=error))
        else:
            _logger.warning("object quarantined", extra=fields(object=name))

"""The executor carries the engine's commands out on the tiers and tells it how each ended.

Owns no state of its own beyond what is running: copies go to `copies.py`, objects to the store,
index entries to `index_writer.py`, messages to the server. Does not decide anything: what to
copy, when to write and what to do about a failure is the engine's.

Invariants:

* Every command that the engine waits for ends in exactly one event, whatever is raised.
* What comes in from the store was verified, all of it, before anybody is told of it. What leaves
  host memory is verified where its command says so. The event loop itself never touches payload.
* A slot named in a command is touched until its event is fed, and not after: the tiers' verbs
  return only when nothing touches the caller's memory any more.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Final, TypeVar

import anyio
import anyio.abc

from sidecar.core.commands import (
    Command,
    Copied,
    CopyOutcome,
    Event,
    Gather,
    IndexOffer,
    IndexSet,
    Quarantine,
    Read,
    ReadDone,
    Reply,
    Resume,
    Resumed,
    Scatter,
    StoreOutcome,
    Withdraw,
    Write,
    Written,
)
from sidecar.data.copy_queue import CopyGroup
from sidecar.data.index_writer import Indexing
from sidecar.data.reread import Rereader
from sidecar.data.reshard import Resharder, SourceError, damaged, fingerprint
from sidecar.data.verify import StreamingVerifier
from sidecar.logs import fields
from tiers.catalog.names import object_name
from tiers.catalog.rows import Row
from tiers.errors import (
    ChunkCorrupt,
    ChunkMissing,
    ImageTruncated,
    ObjectDenied,
    TierExpired,
    TierFull,
    TierUnavailable,
)
from tiers.store.client import run_to_end

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

    import numpy as np
    import numpy.typing as npt

    from sidecar.catalog.service import Catalogs
    from sidecar.data.copies import Copies
    from sidecar.protocol import ServerMessage
    from sidecar.sessions.namespaces import RankLayout, RealmLayout, Realms
    from sidecar.sessions.session import Session, Sessions
    from tiers.kv.slot_image import SegmentMeta
    from tiers.store.object_tier import ObjectTier

C = TypeVar("C", Write, Read, str)

VERIFY_THREADS: Final = 1
"""Threads that hash what the store's own did not, and what goes to it; copies have their own."""

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
        load_deadline_seconds: float,
        store_deadline_seconds: float,
        feed: Callable[[Event], None],
        reply: Callable[[int, ServerMessage], None],
        index_moved: Callable[[RealmLayout], None],
        store_failed: Callable[[Exception], None] | None,
    ) -> None:
        self._realms = realms
        self._sessions = sessions
        self._pool = pool
        self._store = store
        self._catalogs = catalogs
        self._copies = copies
        self._load_deadline_seconds = load_deadline_seconds
        self._store_deadline_seconds = store_deadline_seconds
        self._feed = feed
        self._reply = reply
        self.indexing = Indexing(index_moved, self._grow)
        self._store_failed = store_failed
        self._verifying = anyio.CapacityLimiter(VERIFY_THREADS)
        self._assembler = None if store is None else Resharder(store, self._verifying)
        self._second_look = None if store is None else Rereader(store, self._verifying)
        self._tasks: anyio.abc.TaskGroup | None = None

    async def run(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Own the tasks of the store's verbs until cancelled."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            task_status.started()
            await anyio.sleep_forever()

    def execute(self, commands: Iterable[Command]) -> None:
        """Start all commands of one event. Returns at once."""
        groups: dict[tuple[int, int, int, type], list[Gather | Scatter]] = {}
        for command in commands:
            match command:
                case Gather() | Scatter():
                    name = (
                        command.session_id,
                        command.job_id,
                        command.realm_id,
                        type(command),
                    )
                    groups.setdefault(name, []).append(command)
                case Reply():
                    self._reply(command.session_id, command.message)
                case IndexSet():
                    self.indexing.set(self._realms[command.realm_id].indexed_in, command)
                case IndexOffer():
                    self.indexing.offer(self._realms[command.realm_id].indexed_in, command)
                case Write():
                    self._start(self._write, command)
                case Read():
                    self._start(self._read, command)
                case Quarantine():
                    self._start_quarantine(command)
                case Withdraw():
                    self._withdraw(command)
                case Resume():
                    assert self._tasks is not None, "commands come only while run() runs"
                    self._tasks.start_soon(self._resume)
        for group in groups.values():
            self._copy(group)

    def _start(self, verb: Callable[[C], Coroutine[Any, Any, None]], command: C) -> None:
        assert self._tasks is not None, "commands come only while run() runs"
        self._tasks.start_soon(verb, command)

    def _start_quarantine(self, command: Quarantine) -> None:
        # Named now: its realm may be forgotten before the task begins.
        _, name = self._object(command.realm_id, command.bit, command.key)
        self._start(self._quarantine, name)

    def _copy(self, commands: list[Gather | Scatter]) -> None:
        first = commands[0]
        session = self._sessions.get(first.session_id)
        if session is None or session.memory is None:
            for command in commands:
                self._feed(Copied(command.copy_id, CopyOutcome.REVOKED, "the session ended"))
            return
        self._copies.add(self._group(session, commands))

    def _group(self, session: Session, commands: list[Gather | Scatter]) -> CopyGroup:
        assert session.memory is not None
        loading = isinstance(commands[0], Scatter)
        seconds = self._load_deadline_seconds if loading else self._store_deadline_seconds
        realm = self._realms[commands[0].realm_id]
        return CopyGroup(
            session=session,
            memory=session.memory,
            rank=realm.ranks[commands[0].rank],
            commands=commands,
            deadline=time.monotonic() + seconds,
            part=session.realms.index(realm),
        )

    def _grow(self, realm: RealmLayout) -> None:
        assert self._tasks is not None, "commands come only while run() runs"
        self._tasks.start_soon(self.indexing.grow, realm)

    def _object(self, realm_id: int, bit: int, key: bytes) -> tuple[RankLayout, str]:
        realm = self._realms[realm_id]
        holder = realm.by_bit(bit)
        return holder, object_name(realm.namespace_digest, key, holder.layout.segment)

    async def _write(self, command: Write) -> None:
        rank, name = self._object(command.realm_id, command.rank, command.key)
        template = rank.templates[command.num_blocks]
        image = self._pool[command.slot : command.slot + template.image_bytes]
        outcome, written_at = StoreOutcome.UNAVAILABLE, 0
        try:
            assert self._store is not None, "the engine writes only where there is a store"
            await self._give_way()
            if command.verify:
                await run_to_end(lambda: template.verify_payload(image), self._verifying)
            await self._store.write(name, image)
            written_at = self._announce(command, rank, template.image_bytes)
            outcome = StoreOutcome.OK
        except ChunkCorrupt as error:
            outcome = StoreOutcome.CORRUPT
            _logger.error("slot is corrupt, not written", extra=fields(object=name, error=error))  # noqa: TRY400
        except TierExpired as error:
            outcome = StoreOutcome.EXPIRED
            self._note_failure("write expired", name, error)
        except (TierUnavailable, TierFull) as error:
            self._note_failure("write failed", name, error)
        except Exception:
            _logger.exception("write failed", extra=fields(object=name))
        num_bytes = template.image_bytes if outcome is StoreOutcome.OK else 0
        self._feed(Written(command.write_id, outcome, num_bytes, written_at))

    def _announce(self, command: Write, rank: RankLayout, size_bytes: int) -> int:
        """Have the catalog say that an object is there; returns when it was written."""
        assert self._catalogs is not None, "the engine writes only where there is a store"
        row = Row(
            key=command.key,
            segment=rank.layout.segment.name,
            written_at=0,
            size_bytes=size_bytes,
            num_blocks=command.num_blocks,
            parent=command.parent,
            tenant=command.tenant,
        )
        realm = self._realms[command.realm_id]
        return self._catalogs.wrote(realm, row, later_than=command.written_after)

    def _withdraw(self, command: Withdraw) -> None:
        if self._catalogs is None:
            return
        realm = self._realms[command.realm_id]
        segment = realm.by_bit(command.bit).layout.segment.name
        self._catalogs.lost(realm, Row(command.key, segment, command.written_at))

    async def _resume(self) -> None:
        # A task of its own begins in the next turn of the loop, behind whatever is ready now.
        self._feed(Resumed())

    async def _give_way(self) -> None:
        """Let loads go first: hashing and sending take cores, and nobody waits for a write."""
        until = time.monotonic() + GIVE_WAY_SECONDS_MAX
        while self._copies.loads_pending and time.monotonic() < until:  # noqa: ASYNC110 (rare)
            await anyio.sleep(GIVE_WAY_POLL_SECONDS)

    async def _read(self, command: Read) -> None:
        rank, name = self._object(command.realm_id, command.rank, command.key)
        slot = self._pool[command.slot : command.slot + rank.templates.slot_bytes]
        try:
            if command.sources == (command.rank,):
                meta, num_bytes = await self._read_own(command, rank, name, slot)
            else:
                assert self._assembler is not None, "the engine reads only where there is a store"
                realm = self._realms[command.realm_id]
                meta, num_bytes = await self._assembler.assemble(realm, command, slot)
            done = ReadDone(
                command.read_id, StoreOutcome.OK, meta.num_blocks, meta.parent, num_bytes
            )
        except SourceError as error:
            done = await self._source_failed(command, error)
        except Exception as error:
            outcome = self._read_outcome(error, name, foreign=False)
            done = ReadDone(command.read_id, outcome)
        self._feed(done)

    async def _read_own(
        self, command: Read, rank: RankLayout, name: str, slot: npt.NDArray[np.uint8]
    ) -> tuple[SegmentMeta, int]:
        """Read a rank's own segment, in whatever blocks it was stored."""
        assert self._store is not None, "the engine reads only where there is a store"
        assert self._assembler is not None, "made where there is a store"
        arrival = StreamingVerifier(rank, command.key, slot)
        try:
            num_bytes = await self._store.read(name, slot, seen=arrival.seen)
        except ImageTruncated:
            # Blocks of another size make other headers, and those may be a page longer.
            realm = self._realms[command.realm_id]
            return await self._assembler.assemble(realm, command, slot)
        try:
            if arrival.judged(num_bytes):
                meta = arrival.verdict(num_bytes)
            else:
                meta = await run_to_end(lambda: arrival.verdict(num_bytes), self._verifying)
        except ChunkCorrupt as error:
            came = await run_to_end(lambda: fingerprint(slot[:num_bytes]), self._verifying)
            raise SourceError(command.rank, name, came) from error
        if meta is None:
            meta = await self._assembler.regroup(command, rank, slot, num_bytes)
        return meta, num_bytes

    async def _source_failed(self, command: Read, error: SourceError) -> ReadDone:
        """How a read ended whose source failed: a damaged one is looked at twice."""
        cause: BaseException = error.__cause__ or error
        foreign = error.bit != command.rank
        failed = error.bit if foreign else -1
        if isinstance(cause, ChunkCorrupt) and (damaged(cause) or not foreign):
            try:
                assert self._second_look is not None, "made where there is a store"
                holder, name = self._object(command.realm_id, error.bit, command.key)
                if not await self._second_look.confirms(error, name, holder, command.key):
                    _logger.error(
                        "object arrived damaged, and otherwise the second time: look for failing "
                        "memory on this node, or a proxy before the store",
                        extra=fields(object=name, error=cause),
                    )
                    outcome = StoreOutcome.UNAVAILABLE
                    return ReadDone(command.read_id, outcome, failed=failed, garbled=True)
            except Exception as again:
                cause = again
        outcome = self._read_outcome(cause, error.name, foreign=foreign)
        return ReadDone(command.read_id, outcome, failed=failed)

    def _read_outcome(self, error: BaseException, name: str, *, foreign: bool) -> StoreOutcome:
        """What a failed read was, told where somebody should know."""
        if isinstance(error, ChunkMissing):
            return StoreOutcome.MISSING
        if isinstance(error, ChunkCorrupt):
            told = fields(object=name, error=error)
            if isinstance(error, ObjectDenied):
                _logger.warning("object must not be read", extra=told)
                return StoreOutcome.UNREADABLE
            if foreign and not damaged(error):
                _logger.warning("object of another cut is not used", extra=told)
                return StoreOutcome.UNREADABLE
            _logger.error("object is corrupt", extra=told)
            return StoreOutcome.CORRUPT
        if isinstance(error, TierExpired):
            self._note_failure("read expired", name, error)
            return StoreOutcome.EXPIRED
        if isinstance(error, TierUnavailable | TierFull):
            self._note_failure("read failed", name, error)
        else:
            _logger.error("read failed", extra=fields(object=name), exc_info=error)
        return StoreOutcome.UNAVAILABLE

    def _note_failure(self, what: str, name: str, error: Exception) -> None:
        # A store that is down fails every request: that it is unwell is told once, by its watch.
        _logger.debug(what, extra=fields(object=name, error=error))
        if self._store_failed is not None:
            self._store_failed(error)

    async def _quarantine(self, name: str) -> None:
        try:
            if self._store is not None:
                await self._store.quarantine(name)
        except Exception as error:
            _logger.warning("quarantine failed", extra=fields(object=name, error=error))
        else:
            _logger.warning("object quarantined", extra=fields(object=name))

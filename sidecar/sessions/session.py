"""Sessions: one for each attached client, from its handshake to its end of file.

Owns the handshake's checks against existing sessions, the session's token, and turning a client's
frame into an engine event. Does not own sockets (`transport/`), the worker's mapped memory
(`worker_memory.py`), nor what an event does (`core/engine.py`).

Invariants:

* Every message is checked here once, against what its session attached with. After that a block id
  is in range and a chunk has as many tokens as blocks.
* An ended session is forgotten here at once. Its id is never reused.
"""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from sidecar.core.commands import OpenedGroup, Received, SessionOpened
from sidecar.errors import AttachRefused
from sidecar.protocol import MEMORY_FDS, TOKEN_BYTES, Attach, Lookup, Pin, Role, Submit, Use
from sidecar.protocol.codec import ProtocolError, decode_client
from sidecar.sessions.namespaces import RealmLayout
from sidecar.sessions.worker_memory import WorkerMemory
from sidecar.transport.unix_socket import Connection
from tiers.errors import LayoutError
from tiers.kv.layout import BLOCK_ENTRIES_MAX


@dataclass(slots=True, eq=False)
class Session:
    """One attached client."""

    session_id: int
    attach: Attach
    parts: tuple[Attach, ...]
    """What was attached for each KV cache group."""
    connection: Connection
    realms: tuple[RealmLayout, ...]
    """One for each group."""
    memory: WorkerMemory | None
    token: bytes
    opened: float = field(default_factory=lambda: time.monotonic())  # noqa: PLW0108

    @property
    def realm(self) -> RealmLayout:
        """The realm of the first group. Its index has the chunks of all groups."""
        return self.realms[0]

    def opened_event(self) -> SessionOpened:
        """The event that announces this session to the engine."""
        attach = self.attach
        groups: list[OpenedGroup] = []
        for realm in self.realms:
            if attach.role is Role.SCHEDULER:
                groups.append(OpenedGroup(realm.realm_id))
            else:
                own = realm.ranks[attach.segment_number]
                digest, slot_bytes = realm.namespace_digest, own.templates.slot_bytes
                groups.append(OpenedGroup(realm.realm_id, own.layout, digest, slot_bytes))
        return SessionOpened(self.session_id, attach, tuple(groups))

    def event_of(self, frames: list[bytes], epoch: int) -> Received:
        """Decode and check one message. Raises `ProtocolError`, which does not end the session."""
        if len(frames) != 1:
            raise ProtocolError("malformed", "message of several frames: one is expected")
        message = decode_client(frames[0])
        if message.epoch != epoch:
            raise ProtocolError(
                "epoch", f"epoch={message.epoch}: this sidecar has epoch {epoch}; attach again"
            )
        role = Role.WORKER if isinstance(message, Submit) else Role.SCHEDULER
        if self.attach.role is not role:
            raise ProtocolError(
                "role", f"{type(message).__name__} from a {self.attach.role}: a {role} sends it"
            )
        if isinstance(message, Submit):
            self._check_submit(message)
        elif isinstance(message, Lookup | Pin | Use):
            for group in message.groups:
                self._part(group)
        return Received(self.session_id, message)

    def _check_submit(self, message: Submit) -> None:
        for load in message.loads:
            for piece in load.chunks:
                part = self._part(piece.group)
                _check_blocks(part, piece.block_ids, part.blocks_per_chunk - piece.first_block)
        for store in message.stores:
            for chunk in store.chunks:
                part = self._part(chunk.group)
                _check_blocks(part, chunk.block_ids, part.blocks_per_chunk)
                num_bytes = len(chunk.block_ids) * part.block_tokens * 4  # int32
                if len(chunk.token_ids) != num_bytes:
                    raise ProtocolError(
                        "field",
                        f"token_ids has {len(chunk.token_ids)} bytes: {len(chunk.block_ids)} "
                        f"blocks of {part.block_tokens} tokens have {num_bytes}",
                    )

    def _part(self, group: int) -> Attach:
        if group >= len(self.parts):
            raise ProtocolError(
                "field", f"group={group}: this client attached with {len(self.parts)} groups"
            )
        return self.parts[group]


def _check_blocks(part: Attach, block_ids: list[int], count_max: int) -> None:
    layout = part.layout
    assert layout is not None, "only workers submit, and they attach with a layout"
    if len(block_ids) > count_max:
        raise ProtocolError(
            "field", f"block_ids has {len(block_ids)} blocks: at most {count_max} fit here"
        )
    if min(block_ids) < 0 or max(block_ids) >= layout.num_blocks:
        raise ProtocolError(
            "field",
            f"block_ids={block_ids[:8]}...: ids are 0 to {layout.num_blocks - 1} here",
        )


class Sessions:
    """Current sessions, by id and by token."""

    def __init__(self, sessions_max: int) -> None:
        self._sessions_max = sessions_max
        self._by_id: dict[int, Session] = {}
        self._by_token: dict[bytes, Session] = {}
        self._next_id = 1

    def __len__(self) -> int:
        return len(self._by_id)

    def all(self) -> list[Session]:
        """Every session, oldest first."""
        return list(self._by_id.values())

    def get(self, session_id: int) -> Session | None:
        """The session with this id, unless it has ended."""
        return self._by_id.get(session_id)

    def by_token(self, token: bytes) -> Session | None:
        """The session with this token, unless it has ended."""
        return self._by_token.get(token)

    def has_token(self, token: bytes, uid: int) -> bool:
        """Whether this user has a session with this token."""
        session = self._by_token.get(token)
        return session is not None and session.connection.peer.uid == uid

    def incomplete(self, seconds_max: float) -> list[tuple[str, list[int], int]]:
        """Engines that lack ranks `seconds_max` after another attached: id, ranks, world size."""
        since = time.monotonic() - seconds_max
        engines: dict[tuple[str, int], list[Session]] = {}
        for session in self.all():
            attach = session.attach
            if attach.role is Role.WORKER:
                engines.setdefault((attach.engine_id, attach.world_size), []).append(session)
        return [
            (engine_id, sorted(one.attach.rank for one in workers), world_size)
            for (engine_id, world_size), workers in engines.items()
            if len(workers) < world_size and any(one.opened < since for one in workers)
        ]

    def disconnected(self, attach: Attach) -> list[Session]:
        """Sessions of the same engine whose peer is gone, and that are still open here."""
        return [
            session
            for session in self._by_id.values()
            if session.attach.engine_id == attach.engine_id and session.connection.at_end()
        ]

    def check(self, attach: Attach, realms: Sequence[RealmLayout | None]) -> None:
        """Raise `AttachRefused` unless this client may attach beside the current sessions.

        `realms` are those of its groups, None for one that does not exist yet.
        """
        if len(self._by_id) >= self._sessions_max:
            raise AttachRefused(
                "sessions",
                f"limits.sessions_max={self._sessions_max} clients are attached; raise it",
            )
        for other in self._by_id.values():
            if other.attach.engine_id != attach.engine_id:
                continue
            if other.realms != tuple(realms):
                raise AttachRefused(
                    "engine",
                    f"engine_id={attach.engine_id!r}: its {other.attach.role} of rank "
                    f"{other.attach.rank} attached with topology={other.attach.topology!r}, "
                    f"world_size={other.attach.world_size}, "
                    f"blocks_per_chunk={other.attach.blocks_per_chunk}, other groups "
                    f"({len(other.parts)}) or another namespace; "
                    "all ranks of one engine need the same",
                )
            if (other.attach.role, other.attach.rank) == (attach.role, attach.rank):
                raise AttachRefused(
                    "engine",
                    f"engine_id={attach.engine_id!r}: pid {other.connection.peer.pid} is attached "
                    f"as its {attach.role} of rank {attach.rank}; give each engine its own id",
                )

    def open(
        self,
        attach: Attach,
        connection: Connection,
        realms: tuple[RealmLayout, ...],
        memory: WorkerMemory | None,
    ) -> Session:
        """Create the session of a client that passed `check`."""
        # ZMQ reserves routing ids that start with a zero byte.
        token = bytes([secrets.randbelow(255) + 1]) + secrets.token_bytes(TOKEN_BYTES - 1)
        session = Session(self._next_id, attach, attach.parts, connection, realms, memory, token)
        self._next_id += 1
        self._by_id[session.session_id] = session
        self._by_token[session.token] = session
        return session

    def close(self, session: Session) -> None:
        """Forget a session. Its memory is unmapped once its copies have ended."""
        self._by_id.pop(session.session_id, None)
        self._by_token.pop(session.token, None)
        if session.memory is not None:
            session.memory.end()


def check_shape(attach: Attach) -> None:
    """Raise `AttachRefused` where the fields of one `Attach` disagree with each other."""
    memory, entries = attach.memory, 0
    if memory is None:
        return
    if memory.kind not in MEMORY_FDS:
        raise AttachRefused(
            "memory_kind",
            f"memory.kind={memory.kind!r}: this sidecar maps {', '.join(MEMORY_FDS)}",
        )
    for part in attach.parts:
        layout, segment = part.layout, part.segment
        assert layout is not None, "decode_first checked"
        assert segment is not None, "decode_first checked"
        for name, given, there in (
            ("segment", segment.name, layout.segment.name),
            ("block_tokens", part.block_tokens, layout.block_tokens),
            ("memory.size_bytes", memory.size_bytes, layout.size_bytes),
        ):
            if given != there:
                raise AttachRefused("layout", f"{name}={given}: the layout has {there}")
        try:
            layout.chunk(part.blocks_per_chunk)
        except LayoutError as error:
            raise AttachRefused("layout", str(error)) from error
        entries += segment.num_layers * segment.num_heads * layout.block_entries
    # A copy plan has 8 bytes per entry. The limit of one layout holds for all groups together.
    if entries > BLOCK_ENTRIES_MAX:
        raise AttachRefused(
            "layout",
            f"groups={len(attach.parts)}: one block of each has {entries} (layer, head, token) "
            f"entries together, at most {BLOCK_ENTRIES_MAX} are served; use smaller blocks",
        )

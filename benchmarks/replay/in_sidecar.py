"""A replay through the sidecar's own engine: what its host memory serves of each request.

Everything is the sidecar's code but what carries out its commands: `CountingSlots` in place of the
pool, copies that succeed at once, and a store that only knows what was written. For each request,
in this order, as a connector does:

1. The chunks at its beginning that host memory has are hits, as the directory says.
2. With a store, a `Lookup` reads those after them that the store has.
3. The scheduler sends `Use`.
4. The worker submits a `StoreJob` with what is still missing.

Hits are not copied to blocks: a load changes no order of eviction.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from sidecar.core.breaker import BreakerRules
from sidecar.core.commands import (
    Copied,
    Gather,
    Read,
    ReadDone,
    Received,
    StoreOutcome,
    Write,
    Written,
)
from sidecar.core.outbox import EngineLimits, WritePolicy
from sidecar.protocol import Lookup, Outcome, Release, Role, StoreChunk, StoreJob, Submit, Use
from tests.sidecar.engine_names import (
    BLOCK_TOKENS,
    BLOCKS_PER_CHUNK,
    EPOCH,
    ROOT,
    layout,
    make_engine,
    namespace_of,
    opened_group,
    opened_session,
    slot_bytes_of,
)

if TYPE_CHECKING:
    from benchmarks.replay.traces import PromptRequest
    from sidecar.core.commands import Command
    from sidecar.protocol import ClientMessage
    from tiers.policy import Policy

SCHEDULER, WORKER = 1, 2
DEADLINE_MS: Final = 500
REQUEST_SECONDS: Final = 0.1
"""Between two requests, on the engine's clock."""
BLOCK_IDS: Final = list(range(BLOCKS_PER_CHUNK))
TOKEN_IDS: Final = bytes(4 * BLOCK_TOKENS * BLOCKS_PER_CHUNK)
REALM_ID: Final = 0
"""The engine's own; traces have one realm."""


class CountingSlots:
    """Slots without memory: names that are free, or not."""

    def __init__(self, count: int, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes
        self._free = list(range(0, count * slot_bytes, slot_bytes))
        self.size_bytes = count * slot_bytes

    def allocate(self, slot_bytes: int) -> int | None:
        """A free slot."""
        return self._free.pop() if self._free else None

    def set_tag(self, offset: int, tag: bytes) -> None:
        """No restart comes."""

    def seal(self, offset: int) -> None:
        """No restart comes."""

    def unseal(self, offset: int) -> None:
        """No restart comes."""

    def touch(self, offset: int, uses: int) -> None:
        """No restart comes."""

    def free(self, offset: int) -> None:
        """Free a slot."""
        self._free.append(offset)

    def class_of(self, offset: int) -> int:
        """The only class."""
        return self._slot_bytes

    def free_bytes(self) -> int:
        """Size of the free slots together."""
        return len(self._free) * self._slot_bytes


def _limits(*, with_store: bool) -> EngineLimits:
    """Limits that no request reaches. The store is read whenever it has a chunk."""
    return EngineLimits(
        writes_inflight_max=8,
        reads_inflight_max=8,
        write_queue_bytes_max=1 << 30,
        leases_max_per_session=64,
        lease_ttl_seconds_max=10.0,
        lookups_max_per_session=64,
        quarantine_keys_max=1024,
        recompute=False,
        regret_max=0.0,
        breaker=BreakerRules(),
        write=WritePolicy.THROUGH if with_store else WritePolicy.OFF,
        flush_at_end=False,
        store_reads=with_store,
    )


class SidecarCache:
    """An engine of the sidecar with host memory for `capacity` chunks, and maybe a store."""

    def __init__(self, policy: Policy, capacity: int, *, with_store: bool) -> None:
        geometry = layout(0)
        self._slots = CountingSlots(capacity, slot_bytes_of(geometry))
        self.engine = make_engine(self._slots, policy, _limits(with_store=with_store))
        self._with_store = with_store
        self._parents: dict[bytes, bytes] = {}
        """What a chunk in the store says of the one before it."""
        self.reads: list[int] = []
        """Chunks that were read from the store, by request."""
        self.decision_ms: list[float] = []
        """What the core took to decide on each message, without carrying out its commands."""
        for session_id, role in ((SCHEDULER, Role.SCHEDULER), (WORKER, Role.WORKER)):
            own = geometry if role is Role.WORKER else None
            group = opened_group(REALM_ID, own, namespace_of(REALM_ID))
            self._carry_out(self.engine.handle(opened_session(session_id, role, [group]), 0.0))

    def serve(self, request: PromptRequest) -> int:
        """Serve and cache a prompt. Returns how many of its first chunks host memory had."""
        self.reads.append(0)
        keys = [key for _, key in request.keys]
        missing = (number for number, key in enumerate(keys) if not self._in_host(key))
        hits = next(missing, len(keys))
        if self._with_store and hits < len(keys):
            self._read(keys, hits, request.num_tokens)
        self._send(SCHEDULER, Use(EPOCH, keys, request.num_tokens))
        pieces = [
            StoreChunk(key, parent, TOKEN_IDS, BLOCK_IDS)
            for parent, key in zip([ROOT, *keys], keys, strict=False)
            if not self._in_host(key)
        ]
        if pieces:
            self._send(WORKER, Submit(EPOCH, 0, [], [StoreJob(len(self.reads), pieces)]))
        return hits

    def _in_host(self, key: bytes) -> bool:
        chunk = self.engine.directory.realms[REALM_ID].chunks.get(key)
        return chunk is not None and chunk.loadable

    def _read(self, keys: list[bytes], hits: int, num_tokens: int) -> None:
        """Read what the store has of the keys after the hits."""
        if not self.engine.stored_mask(REALM_ID, keys[hits]):
            return
        lookup_id = len(self.reads)
        lookup = Lookup(EPOCH, lookup_id, keys, DEADLINE_MS, num_tokens=num_tokens, num_held=hits)
        self._send(SCHEDULER, lookup)
        self._send(SCHEDULER, Release(EPOCH, [], [lookup_id]))

    def _send(self, session_id: int, message: ClientMessage) -> None:
        now = len(self.reads) * REQUEST_SECONDS
        started = time.thread_time()
        commands = self.engine.handle(Received(session_id, message), now)
        self.decision_ms.append((time.thread_time() - started) * 1000)
        self._carry_out(commands)

    def _carry_out(self, commands: list[Command]) -> None:
        """Let every copy, read and write end well, and what follows from them."""
        now, queue = len(self.reads) * REQUEST_SECONDS, commands
        while queue:
            following: list[Command] = []
            for command in queue:
                match command:
                    case Gather():
                        ended: Copied | ReadDone | Written = Copied([command.copy_id], Outcome.OK)
                    case Write():
                        self._parents[command.key] = command.parent
                        ended = Written(command.write_id, StoreOutcome.OK, 1, len(self.reads))
                    case Read():
                        self.reads[-1] += 1
                        ended = ReadDone(
                            command.read_id,
                            StoreOutcome.OK,
                            num_blocks=BLOCKS_PER_CHUNK,
                            parent=self._parents[command.key],
                            num_bytes=1,
                        )
                    case _:
                        continue
                following += self.engine.handle(ended, now)
            queue = following

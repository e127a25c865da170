"""A catalog of many chunks in a folder, and a sidecar that reads it, without engines or sockets.

Owns writing the files that a whole compaction would have left, and `Reading`: the parts of a
sidecar that a row of the catalog goes through, on their event loop. Does not own what is measured.

The catalog's files are real and whole: keys are spread as hashes are, files are sorted and hold as
many rows as compaction gives them, and a manifest names them. Only the objects are not there.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Any, Final

import anyio
import numpy as np

from benchmarks.micro.directory_bench import LIMITS, NoSlots
from sidecar.catalog.service import Catalogs
from sidecar.catalog.sync import StoreWatch
from sidecar.config.store import StoreSettings
from sidecar.core.commands import IndexOffer, IndexSet, OpenedGroup
from sidecar.data.index_writer import IndexUpdater
from sidecar.protocol import PROTOCOL_VERSION, Attach, Role
from sidecar.sessions.namespaces import Realms
from tests.sidecar.engine_names import make_engine, opened_session
from tests.tiers.catalog.kit import encode_manifest
from tiers.catalog.log import LogWriter, new_writer
from tiers.catalog.major_compaction import SNAPSHOT_ROWS
from tiers.catalog.manifest import Manifest
from tiers.catalog.names import catalog_folder, manifest_name, namespace_prefix, snapshot_name
from tiers.catalog.rows import Rows, digest_of, encode
from tiers.catalog.usage import Usage
from tiers.kv.layout import ChunkLayout, Segment
from tiers.policy import POLICIES
from tiers.store.object_tier import UrlObjects

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    import numpy.typing as npt

    from sidecar.core.commands import Command, Event

SEGMENT: Final = Segment(0, 32, 0, 8)
LAYOUT: Final = ChunkLayout(
    segment=SEGMENT,
    blocks_per_chunk=16,
    block_tokens=16,
    content_bytes=128,
    dtype="bfloat16",
    encoding="plain",
)
WRITTEN_AT: Final = 1_700_000_000_000_000
DAYS: Final = 30
"""Chunks were written in this many days, evenly."""
NOW_SECONDS: Final = WRITTEN_AT / 1e6 + DAYS * 86_400
TENANTS: Final = 16
SIZE_BYTES: Final = 1 << 20
LAG_PERIOD_SECONDS: Final = 0.001

Keys = Any


def attach_of(namespace: bytes) -> Attach:
    """What the only worker of this model says."""
    return Attach(
        version=PROTOCOL_VERSION,
        role=Role.WORKER,
        engine_id="engine",
        rank=0,
        world_size=1,
        topology="tp1.pp1",
        namespace=namespace,
        block_tokens=LAYOUT.block_tokens,
        blocks_per_chunk=LAYOUT.blocks_per_chunk,
        pid=os.getpid(),
    )


def namespace_of(chunks: int) -> bytes:
    """A namespace of its own for each size of catalog."""
    return b'{"model": "benchmark-%d"}' % chunks


def rows_of(generator: np.random.Generator, count: int, first: float, last: float) -> Rows:
    """Rows of as many chunks, sorted, whose keys are in this part of the range of all keys."""
    keys = generator.integers(0, 256, (count, 32), dtype=np.uint8)
    words: npt.NDArray[np.float64] = np.sort(generator.uniform(first, last, count)) * 2.0**64
    keys[:, :8] = words.astype(np.uint64).astype(">u8").view(np.uint8).reshape(-1, 8)
    return Rows(
        keys=keys,
        parents=np.zeros((count, 32), dtype=np.uint8),
        segments=(SEGMENT.name,),
        segment_ids=np.zeros(count, dtype=np.int32),
        num_blocks=np.full(count, 16, dtype=np.int32),
        size_bytes=np.full(count, SIZE_BYTES, dtype=np.int64),
        written_at=WRITTEN_AT + generator.integers(0, DAYS * 86_400 * 1_000_000, count),
        tenants=_TENANTS[generator.integers(0, TENANTS, count)],
    )


_TENANTS: Final = np.stack(
    [np.frombuffer(number.to_bytes(8, "big"), dtype=np.uint8) for number in range(TENANTS)]
)
"""The first are the requests without a salt."""


class World:
    """One namespace of a store in a folder."""

    def __init__(self, directory: str, chunks: int) -> None:
        self.chunks = chunks
        self.tier = UrlObjects(f"file://{directory}")
        self.realms = Realms()
        [self.realm] = self.realms.join([attach_of(namespace_of(chunks))])
        self.realm.register(0, LAYOUT)
        self.prefix = namespace_prefix(self.realm.namespace_digest)
        self.folder = catalog_folder(self.prefix)
        self.tenants = [number.to_bytes(8, "big") for number in range(TENANTS)]

    async def fill(self, sample: int) -> list[bytes]:
        """Write the catalog; some of its keys, `sample` of each file."""
        generator, names = np.random.default_rng(self.chunks), list[str]()
        files = -(-self.chunks // SNAPSHOT_ROWS)
        kept: list[bytes] = []
        for part in range(files):
            count = min(SNAPSHOT_ROWS, self.chunks - part * SNAPSHOT_ROWS)
            rows = rows_of(generator, count, part / files, (part + 1) / files)
            chosen = generator.integers(0, count, sample)
            kept += [rows.keys[index].tobytes() for index in chosen]
            body = encode(rows)
            names.append(snapshot_name(self.folder, 0, part, digest_of(body)))
            await self.tier.write(names[-1], body)
        each = self.chunks // TENANTS
        held = Usage(each * SIZE_BYTES, each, WRITTEN_AT, each)
        manifest = Manifest(
            generation=0,
            snapshots=tuple(names),
            base=len(names),
            base_seconds=WRITTEN_AT / 1e6,
            rows=self.chunks,
            held=Usage(self.chunks * SIZE_BYTES, self.chunks, WRITTEN_AT, self.chunks),
            tenants={tenant.hex(): held for tenant in self.tenants},
        )
        await self.tier.write(manifest_name(self.folder, 0), encode_manifest(manifest))
        return kept

    async def announce(self, count: int, writer: str | None = None) -> Rows:
        """Have another sidecar announce this many new chunks, in no order."""
        generator = np.random.default_rng(count)
        rows = rows_of(generator, count, 0.0, 1.0)
        log = LogWriter(self.tier, self.folder, writer or new_writer(), rows_max=1, seconds_max=0.0)
        rows = rows.take(generator.permutation(count))
        await log.write(rows)
        return rows


class Reading:
    """The parts of a sidecar between its store and its shared index."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.engine = make_engine(NoSlots(), POLICIES["lru"](), LIMITS)
        self.engine.handle(
            opened_session(1, Role.SCHEDULER, [OpenedGroup(world.realm.realm_id)]), 0.0
        )
        self.directory = self.engine.directory.realms[world.realm.realm_id]
        self._tasks = anyio.create_task_group()
        self.indexes = IndexUpdater(lambda realm: None, self._grow)
        settings = StoreSettings(url="memory://", write="off")
        self.watch = StoreWatch(
            world.tier,
            Catalogs(world.tier, settings),
            world.realms,
            settings,
            feed=self._feed,
            held=self.engine.stored_mask,
            index_settled=self.indexes.settled,
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """While indexes may grow."""
        async with self._tasks:
            yield
            self._tasks.cancel_scope.cancel()

    async def refresh(self) -> None:
        """Take in what is new in the catalog: at first all of it."""
        reason = await self.watch._list(self.world.realm)  # noqa: SLF001
        if reason is not None:
            raise RuntimeError(reason)
        await self.indexes.settled(self.world.realm)

    def _grow(self, realm: Any) -> None:
        self._tasks.start_soon(self.indexes.grow, realm)

    def _feed(self, event: Event) -> None:
        self._execute(self.engine.handle(event, time.monotonic()))

    def _execute(self, commands: Iterable[Command]) -> None:
        for command in commands:
            if isinstance(command, IndexSet):
                self.indexes.set(self.world.realm, (command,))
            elif isinstance(command, IndexOffer):
                self.indexes.offer(self.world.realm, command)


class LagProbe:
    """How late a task of the same event loop is that wants to run every millisecond.

    And what the loop's thread did in between, by the processor's time: on a machine that has other
    work, that is what this work itself holds the loop up by.
    """

    def __init__(self) -> None:
        self.lags_ms: list[float] = []
        self.held_ms: list[float] = []

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """While something else runs on the loop."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._run)
            yield
            tasks.cancel_scope.cancel()

    async def _run(self) -> None:
        while True:
            due, before = time.perf_counter() + LAG_PERIOD_SECONDS, time.thread_time()
            await anyio.sleep(LAG_PERIOD_SECONDS)
            self.held_ms.append((time.thread_time() - before) * 1e3)
            self.lags_ms.append((time.perf_counter() - due) * 1e3)

    def lag(self, percent: float) -> float:
        """A percentile, in milliseconds."""
        return round(float(np.percentile(self.lags_ms, percent)), 2)

    def held(self, percent: float) -> float:
        """A percentile, in milliseconds."""
        return round(float(np.percentile(self.held_ms, percent)), 2)


def rss_bytes() -> int:
    """Memory of this process that is in use now, mapped indexes included."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

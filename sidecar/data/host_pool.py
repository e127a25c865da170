"""Host memory as this sidecar's file: opened, scanned, mapped ahead, kept or removed.

Owns how the pool's lifetime is tied to the process, the log lines about it, and the map from a
rank's chunk geometry to the pool's slot class. Does not own slots and the file
(`tiers/pool/host_pool.py`), or what becomes of what it held (`core/engine.py`).

Invariants: a sidecar that ends in order keeps its memory if `host.after_stop` says so and the
memory holds something; one that ends because of a bug keeps none, because its last decisions cannot
be trusted.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import anyio

from sidecar.core.commands import RestoredSlot
from sidecar.core.retention import read_tag
from sidecar.errors import StartError
from sidecar.logs import fields
from tiers.errors import PoolError
from tiers.pool.file import check_pool
from tiers.pool.host_pool import POPULATE_BYTES_PER_CALL, HostPool
from tiers.pool.numa import Placement, sample
from tiers.pool.recovery import FoundImage, rescan
from tiers.store.client import run_to_end

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator

    from sidecar.config.model import Config
    from tiers.kv.layout import ChunkLayout

_Raised: TypeAlias = type[BaseException] | None

_logger = logging.getLogger("kvlake.server")


def open_pool(config: Config) -> tuple[HostPool, tuple[RestoredSlot, ...]]:
    """Open the pool of this sidecar's name. Returns it with what an earlier process left in it.

    Raises `StartError`. New memory is touched, which takes time; a takeover less than a second.
    """
    path = config.pool_path
    began = time.monotonic()
    placement = placement_of(config)
    with _pool_errors():
        pool = HostPool.open(
            path,
            config.host.size,
            prefault=config.host.prefault,
            threads=config.host.touching_threads,
            placement=placement,
        )
    _log_placement(pool)
    if pool.emptied:
        _logger.warning(
            "host memory starts empty: its file was not taken over",
            extra=fields(path=path, reason=pool.emptied),
        )
    if not len(pool.recovered):
        return pool, ()
    resized = pool.resized_from_bytes != pool.size_bytes
    images, damaged = rescan(pool.memory, pool.recovered)
    for offset in damaged:
        pool.free(offset)
    _logger.info(
        "host memory taken over",
        extra=fields(
            path=path,
            slots=len(images),
            bytes=pool.stats().used_bytes,
            slots_damaged=len(damaged),
            **({"resized_from_bytes": pool.resized_from_bytes} if resized else {}),
            seconds=round(time.monotonic() - began, 3),
        ),
    )
    return pool, tuple(map(_restored, images))


def placement_of(config: Config, root: Path = Path("/")) -> Placement:
    """The NUMA nodes of the pool, tried out. Raises `StartError`."""
    with _pool_errors():
        placement = Placement.of(config.host.numa, root)
        placement.settle()
        return placement


def check_host(config: Config) -> None:
    """Raise `StartError` where `open_pool` would for the pool's files. Changes nothing."""
    with _pool_errors():
        check_pool(config.pool_path, config.host.size)


@contextlib.contextmanager
def _pool_errors() -> Generator[None]:
    try:
        yield
    except PoolError as error:
        raise StartError(f"host: {error}") from error


def _log_placement(pool: HostPool) -> None:
    placement = pool.placement
    if placement.refused:
        _logger.warning("host memory is not placed", extra=fields(reason=placement.reason))
    elif placement.nodes:
        pages = sample(pool.memory)
        away = sum(count for node, count in pages.items() if node not in placement.nodes)
        told = fields(nodes=list(placement.nodes), pages_sampled=pages)
        if away:
            _logger.warning("some host memory is on other NUMA nodes than wanted", extra=told)
        else:
            _logger.info("host memory placed", extra=told)


def _restored(image: FoundImage) -> RestoredSlot:
    tenant, retention = read_tag(image.tag)
    return RestoredSlot(
        slot=image.offset,
        namespace=image.namespace_digest,
        geometry=image.geometry,
        num_blocks=image.num_blocks,
        key=image.key,
        parent=image.parent,
        tenant=tenant,
        sealed=image.sealed,
        used=image.used,
        retention=retention,
    )


def closing(
    pool: HostPool, *, keep: bool, option: str = ""
) -> Callable[[_Raised, object, object], None]:
    """An exit callback that keeps or removes the pool's memory. No copy may run then.

    `option` names the configuration in a command (`Config.option`).
    """

    def close(raised: _Raised, error: object, traceback: object) -> None:
        del error, traceback
        # `StartError` is no bug, and a cancellation is no Exception.
        kind = raised or StartError
        bug = issubclass(kind, Exception) and not issubclass(kind, StartError)
        path, used_bytes = pool.path, pool.stats().used_bytes
        leaked = pool.close(keep=keep and not bug)
        if leaked:
            _logger.error("slots were still in use at the end", extra=fields(slots=len(leaked)))
        if path.exists():
            _logger.info(
                "host memory is kept for the next start; `kvlake pool remove%s` gives it back",
                option,
                extra=fields(path=path, file_bytes=path.stat().st_size, used_bytes=used_bytes),
            )

    return close


async def map_ahead(pool: HostPool) -> None:
    """Map the pages of a pool that was taken over, in the background. Safe to cancel.

    A copy into a page that is not mapped yet takes a page fault and is slower.
    """
    limiter = anyio.CapacityLimiter(1)
    try:
        for start in range(0, pool.size_bytes, POPULATE_BYTES_PER_CALL):
            await run_to_end(functools.partial(pool.populate, start), limiter)
    except OSError as error:
        _logger.warning("host memory is not mapped ahead", extra=fields(reason=error))


class PoolSlots:
    """The engine's `SlotAllocator` over a `HostPool`: slots by chunk geometry instead of by size.

    A geometry is registered, and the pool has accepted its slot size, before the engine hears of
    it. All but the slot class of a geometry is the pool's own.
    """

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self._classes: dict[ChunkLayout, int] = {}
        self.allocate = pool.allocate
        self.set_tag = pool.set_tag
        self.seal = pool.seal
        self.unseal = pool.unseal
        self.touch = pool.touch
        self.free = pool.free
        self.class_of = pool.class_of
        self.slot_bytes = pool.slot_bytes

    def register(self, layout: ChunkLayout, slot_bytes: int) -> None:
        """Register the slot size of a geometry. Raises `PoolError` where no slot of it fits."""
        if layout not in self._classes:
            self._classes[layout] = self._pool.register_class(slot_bytes)

    def keep(self, layouts: Collection[ChunkLayout]) -> None:
        """Forget all other geometries, and slot sizes without a slot in use."""
        for layout in [layout for layout in self._classes if layout not in layouts]:
            del self._classes[layout]
        self._pool.keep_classes(set(self._classes.values()))

    def slot_class(self, layout: ChunkLayout) -> int:
        """See `SlotAllocator.slot_class`."""
        return self._classes[layout]

    @property
    def size_bytes(self) -> int:
        """See `SlotAllocator.size_bytes`."""
        return self._pool.size_bytes

    def free_bytes(self) -> int:
        """See `SlotAllocator.free_bytes`."""
        return self._pool.stats().free_bytes

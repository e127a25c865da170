"""Host memory as this sidecar's file: opened, scanned, mapped ahead, kept or removed.

Owns how the pool's lifetime is tied to the process, the log lines about it, and the images in slots
that an earlier process sealed. Does not own slots and the file (`tiers/pool/host_pool.py`), or what
becomes of what it held (`core/engine.py`).

Slots of an earlier process are checked as foreign bytes: header and footer must equal, byte for
byte, what the slot's own descriptor makes of them, and the row must match its hash. Payloads are
verified before their first use: here that would read all of the memory.

Invariants: a sidecar that ends in order keeps its memory if `host.after_stop` says so and the
memory holds something; one that ends because of a bug keeps none, because its last decisions cannot
be trusted; no claim of a slot costs more than the slot is large; the number of templates is
bounded, whatever the slots claim, and the claims of many slots go first.
"""

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
import numpy as np
import numpy.typing as npt

from sidecar.config.model import Config
from sidecar.core.commands import RestoredSlot
from sidecar.core.retention import read_tag
from sidecar.errors import StartError
from sidecar.logs import fields
from tiers.errors import ChunkCorrupt, PoolError
from tiers.kv.arrow_file import PAGE_BYTES, Descriptor, find_descriptor
from tiers.kv.layout import Bytes
from tiers.kv.slot_image import SlotTemplate, claimed_template
from tiers.pool.file import check_pool
from tiers.pool.host_pool import HostPool
from tiers.pool.numa import Placement, sample
from tiers.pool.table import SealedSlots
from tiers.store.client import run_to_end
from tiers.threads import NoThread, starting_threads

TEMPLATES_MAX: Final = 4096
"""A realm of 16 blocks per chunk and 8 ranks has 128."""
_SLOTS_PER_BATCH: Final = 1024

_logger = logging.getLogger("kvlake.server")


async def opened_pool(
    config: Config, stop: threading.Event
) -> tuple[HostPool, tuple[RestoredSlot, ...]]:
    """`open_pool`, in a thread."""
    with _pool_errors():
        return await anyio.to_thread.run_sync(open_pool, config, stop)


def open_pool(
    config: Config, stop: threading.Event | None = None
) -> tuple[HostPool, tuple[RestoredSlot, ...]]:
    """Open the pool of this sidecar's name. Returns it with what an earlier process left in it.

    Raises `StartError`, and `OpenStopped` if `stop` is set before the memory is ready. New memory
    is touched, which takes time; a takeover less than a second.
    """
    path = config.pool_path
    began = time.monotonic()
    with _pool_errors():
        pool = HostPool.open(
            path,
            config.host.size,
            prefault=config.host.prefault,
            threads=config.host.touching_threads,
            placement=Placement.of(config.host.numa),
            stop=stop,
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
    return pool, tuple(images)


def placement_of(config: Config, root: Path = Path("/")) -> Placement:
    """The NUMA nodes of the pool, tried out. Raises `StartError`."""
    with _pool_errors():
        placement = Placement.of(config.host.numa, root)
        placement.settle()
        return placement


def check_host(config: Config) -> None:
    """Raise `StartError` where `open_pool` would. Changes nothing."""
    with _pool_errors():
        check_pool(config.pool_path, config.host.size)


@contextlib.contextmanager
def _pool_errors() -> Generator[None]:
    try:
        with starting_threads():
            yield
    except (PoolError, NoThread) as error:
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


def rescan(memory: Bytes, slots: SealedSlots) -> tuple[list[RestoredSlot], list[int]]:
    """The images in sealed slots in order of their last use, and the slots without one."""
    claims: dict[tuple[Descriptor | None, int], list[int]] = {}
    offsets: list[int] = slots.offsets.tolist()
    sizes: list[int] = slots.slot_bytes.tolist()
    for row, (offset, slot_bytes) in enumerate(zip(offsets, sizes, strict=True)):
        claimed = find_descriptor(memory[offset : offset + PAGE_BYTES].tobytes())
        claims.setdefault((claimed, slot_bytes), []).append(row)
    images: list[RestoredSlot] = []
    in_order = sorted(claims.items(), key=lambda claim: -len(claim[1]))
    for (claimed, slot_bytes), rows in in_order[:TEMPLATES_MAX]:
        if claimed is None:
            continue
        try:
            template = claimed_template(claimed, slot_bytes)
        except ChunkCorrupt:
            continue
        if template.image_bytes <= slot_bytes:
            for first in range(0, len(rows), _SLOTS_PER_BATCH):
                batch = rows[first : first + _SLOTS_PER_BATCH]
                images += _images(memory, slots, template, np.array(batch))
    images.sort(key=lambda image: image.used)
    good = {image.slot for image in images}
    return images, [offset for offset in offsets if offset not in good]


def _images(
    memory: Bytes, slots: SealedSlots, template: SlotTemplate, rows: npt.NDArray[np.int64]
) -> list[RestoredSlot]:
    geometry = template.layout.geometry
    images: list[RestoredSlot] = []
    found = template.examine(memory, slots.offsets[rows])
    for row, names in zip(rows.tolist(), found, strict=True):
        if names is None:
            continue
        tenant, retention, uses = read_tag(slots.tags[row].tobytes())
        image = RestoredSlot(
            slot=int(slots.offsets[row]),
            namespace=template.namespace_digest,
            geometry=geometry,
            num_blocks=template.num_blocks,
            key=names[0],
            parent=names[1],
            tenant=tenant,
            sealed=int(slots.sealed[row]),
            used=int(slots.used[row]),
            retention=retention,
            uses=uses,
        )
        images.append(image)
    return images


@contextlib.contextmanager
def closing(pool: HostPool, *, keep: bool, option: str = "") -> Generator[None]:
    """Keep or remove the pool's memory at the end. No copy may run then.

    `option` names the configuration in a command (`Config.option`).
    """
    try:
        yield
    except Exception as error:
        # `StartError` is no bug, and a cancellation is no Exception.
        keep = keep and isinstance(error, StartError)
        raise
    finally:
        path, used_bytes = pool.path, pool.stats().used_bytes
        leaked = pool.close(keep=keep)
        if leaked:
            _logger.error("slots were still in use at the end", extra=fields(slots=len(leaked)))
        if path.exists():
            _logger.info(
                "host memory is kept for the next start; `kvlake pool remove%s` gives it back",
                option,
                extra=fields(path=path, file_bytes=path.stat().st_size, used_bytes=used_bytes),
            )


async def map_ahead(pool: HostPool) -> None:
    """Map the pages of a pool that was taken over, in the background. Safe to cancel.

    A copy into a page that is not mapped yet takes a page fault and is slower.
    """
    limiter = anyio.CapacityLimiter(1)
    try:
        for start in pool.pieces():
            await run_to_end(functools.partial(pool.populate, start), limiter)
    except OSError as error:
        _logger.warning("host memory is not mapped ahead", extra=fields(reason=error))

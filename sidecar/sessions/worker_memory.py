"""A worker's KV memory and fence page, mapped in the sidecar.

Owns the mappings and their descriptors. Does not own when a copy runs, nor sessions, nor how GPU
memory is mapped and copied (`tiers/cuda/`).

Invariants: the memory stays mapped while a copy uses it, and is unmapped as soon as its session
and its last copy have ended; every received descriptor is mapped or closed; what is mapped has at
least the declared size, and is sealed against shrinking (`tiers/kv/memfd.py`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import mmap
import os
from typing import TYPE_CHECKING, Final

import anyio
import numpy as np
import numpy.typing as npt

from sidecar.errors import AttachRefused
from sidecar.logs import fields
from sidecar.protocol import KIND_MEMFD, MEMORY_FDS
from sidecar.transport.attach_socket import close_fds
from tiers.kv.copy import CopyPlan
from tiers.kv.fence import PAGE_BYTES, SidecarFence
from tiers.kv.memfd import check_sealed, keep_out_of_dumps
from tiers.pool.file import populate
from tiers.store.client import run_to_end

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from sidecar.protocol import Attach
    from sidecar.sessions.gpus import Gpus
    from tiers.kv.copy import Region, Visit
    from tiers.kv.layout import KVLayout

    Bytes = npt.NDArray[np.uint8]
    BlockIds = npt.NDArray[np.int64]

PREFAULT_BYTES_PER_CALL: Final = 16 << 20
"""About a millisecond where the engine has touched the pages, ten where it has not."""
UNMAPPED_POLL_SECONDS: Final = 0.002

# One at a time, beside the threads that copy: engines attach rarely and copies must not wait.
_prefaulting = anyio.CapacityLimiter(1)
_logger = logging.getLogger("kvlake.memory")


class HostMapping:
    """A memfd, mapped. Takes over `fd`."""

    def __init__(self, size_bytes: int, fd: int) -> None:
        try:
            _check_size(size_bytes)
            check_sealed("memory", fd, size_bytes)
            self._map = mmap.mmap(fd, size_bytes)
            keep_out_of_dumps(self._map)
        finally:
            os.close(fd)
        self._bytes: Bytes | None = np.frombuffer(self._map, dtype=np.uint8)

    @property
    def view(self) -> Bytes:
        """All of the memory. Use it for one copy only, and keep no reference."""
        assert self._bytes is not None, "copies run while it is mapped"
        return self._bytes

    @property
    def mapped(self) -> bool:
        """Whether it is still mapped."""
        return not self._map.closed

    def close(self) -> None:
        """Unmap it."""
        self._bytes = None
        try:
            self._map.close()
        except BufferError:
            # A bug: a view outlived its copy, against the rule of `view`. The mapping ends with the
            # view, so this need not end the sidecar.
            _logger.error("a worker's memory stays mapped: a view is still held")  # noqa: TRY400


class HostRegion:
    """KV memory in a memfd, copied by the CPU, as one KV cache group lies in it. A `Region`."""

    def __init__(self, layout: KVLayout, mapping: HostMapping) -> None:
        self._plan = CopyPlan(layout)
        self.mapping = mapping
        self.size_bytes = layout.size_bytes

    @classmethod
    def open(cls, layout: KVLayout, fd: int) -> HostRegion:
        """Map the memory. Takes over `fd`."""
        mapping = HostMapping(layout.size_bytes, fd)
        try:
            return cls(layout, mapping)
        except BaseException:
            mapping.close()
            raise

    def part(self, layout: KVLayout) -> HostRegion:
        """Another KV cache group in the same memory."""
        return HostRegion(layout, self.mapping)

    def gather(self, block_ids: BlockIds, payload: Bytes) -> HostTransfer:
        """A copy of blocks to `payload`, carried out by `finish`."""
        return HostTransfer(self._plan.gather, self.mapping, block_ids, payload)

    def scatter(self, block_ids: BlockIds, payload: Bytes) -> HostTransfer:
        """A copy of `payload` to blocks, carried out by `finish`."""
        return HostTransfer(self._plan.scatter, self.mapping, block_ids, payload)

    def populate(self, start: int) -> bool:
        """Map the pages of one slice ahead; False where that fails."""
        try:
            return populate(self.mapping.view[start : start + PREFAULT_BYTES_PER_CALL])
        except OSError as error:
            _logger.warning("KV memory is not mapped ahead", extra=fields(reason=error))
            return False

    @property
    def mapped(self) -> bool:
        """Whether it is still mapped."""
        return self.mapping.mapped

    def close(self) -> None:
        """Unmap it, for all groups."""
        self.mapping.close()


class HostTransfer:
    """A copy that runs in `finish`, in the thread that calls it. A `Transfer`."""

    def __init__(
        self, copy: Callable[..., None], mapping: HostMapping, block_ids: BlockIds, payload: Bytes
    ) -> None:
        self._copy = copy
        self._mapping = mapping
        self._block_ids = block_ids
        self._payload = payload

    def finish(self, visit: Visit) -> None:
        """Copy, and show each piece to `visit` while the core has it in its cache."""
        self._copy(self._mapping.view, self._block_ids, self._payload, visit=visit)

    def settle(self) -> None:
        """Do nothing: the copy ran in `finish`, or not at all."""


class WorkerMemory:
    """A worker's KV memory and fence page, mapped here. Owns the region and the page."""

    def __init__(self, region: Region, fence: SidecarFence, parts: Sequence[KVLayout] = ()) -> None:
        self.region = region
        self.regions = (region, *(region.part(layout) for layout in parts))
        """The region as each KV cache group lies in it."""
        self.fence = fence
        self._open = True
        self._copies = 0
        self._ended = False

    @contextlib.contextmanager
    def in_use(self) -> Generator[bool]:
        """Keep the memory mapped during a copy; yields False if it is unmapped already.

        Enter on the event loop. It yields no array on purpose: a view left in a waiting task or an
        idle thread would keep the mapping, and with it a dead engine's memory, until the next copy.
        """
        if not self._open:
            yield False
            return
        self._copies += 1
        try:
            yield True
        finally:
            self._copies -= 1
            self._unmap_if_idle()

    async def prefault(self) -> None:
        """Map every page, slice by slice, while the session lasts. Safe to cancel.

        A copy into a page that is not mapped yet takes a fault for every 4 KiB, which makes it
        three times slower. Pages that the engine reserved but has not touched are allocated.
        """
        region = self.region
        if not isinstance(region, HostRegion):
            return
        for start in range(0, region.size_bytes, PREFAULT_BYTES_PER_CALL):
            with self.in_use() as mapped:
                if not mapped or self._ended:
                    return
                if not await run_to_end(functools.partial(region.populate, start), _prefaulting):
                    return

    def end(self) -> None:
        """The session is over: unmap once the running copies have ended."""
        self._ended = True
        self._unmap_if_idle()

    @property
    def ended(self) -> bool:
        """Whether no new copy may start."""
        return self._ended

    @property
    def mapped(self) -> bool:
        """Whether the memory is still mapped here."""
        return self.region.mapped

    async def wait_unmapped(self, seconds_max: float) -> None:
        """Wait until the memory is unmapped, for `seconds_max` at most."""
        with anyio.move_on_after(seconds_max):
            # Unmapping may end in a thread, which cannot set an event of the loop.
            while self.mapped:  # noqa: ASYNC110
                await anyio.sleep(UNMAPPED_POLL_SECONDS)

    def _unmap_if_idle(self) -> None:
        if not self._ended or self._copies or not self._open:
            return
        self._open = False
        self.fence.close()
        self.region.close()


def _check_size(size_bytes: int) -> None:
    # A memfd may be sparse, so a size above the free memory is no error. A size above the
    # machine's memory is.
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size_bytes > machine_bytes:
        raise AttachRefused(
            "memory",
            f"memory.size_bytes={size_bytes}: this machine has {machine_bytes} bytes; lower the "
            "engine's KV cache size",
        )


def take_memory(attach: Attach, fds: list[int], gpus: Gpus | None = None) -> WorkerMemory | None:
    """Map the descriptors of an `Attach` that passed `check_shape`. Takes over `fds`."""
    try:
        return _take_memory(attach, fds, gpus)
    finally:
        close_fds(fds)


def _take_memory(attach: Attach, fds: list[int], gpus: Gpus | None) -> WorkerMemory | None:
    shared, layout = attach.memory, attach.layout
    names = () if shared is None else MEMORY_FDS[shared.kind]
    if len(fds) != len(names):
        raise AttachRefused(
            "descriptors",
            f"{len(fds)} descriptors arrived: a {attach.role} sends {len(names)}"
            + (f" ({', '.join(names)})" if names else ""),
        )
    if shared is None or layout is None:
        return None
    parts = [group.layout for group in attach.groups if group.layout is not None]
    try:
        check_sealed("fence page", fds[-1], PAGE_BYTES)
        fence = SidecarFence(fds.pop())
        try:
            if shared.kind == KIND_MEMFD:
                region: Region = HostRegion.open(layout, fds.pop())
            else:
                assert gpus is not None, "GPU memory is attached once its device is ready"
                region = gpus.open(shared, layout, fds)
            return WorkerMemory(region, fence, parts)
        except BaseException:
            fence.close()
            raise
    except (OSError, ValueError) as error:
        raise AttachRefused("memory", f"the worker's memory cannot be mapped: {error}") from error

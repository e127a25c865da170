"""A worker's KV memory and fence page, mapped in the sidecar.

Owns the mappings and their descriptors. Does not own when a copy runs, nor sessions, nor how GPU
memory is mapped and copied (`tiers/cuda/`).

Invariants: the memory stays mapped while a copy uses it, and is unmapped as soon as its session
and its last copy have ended; every received descriptor is mapped or closed; what is mapped has at
least the declared size, and is sealed against shrinking (`tiers/kv/memfd.py`).
"""

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import anyio

from sidecar.errors import AttachRefused
from sidecar.logs import fields
from sidecar.protocol import KIND_MEMFD, MEMORY_FDS, Attach
from sidecar.sessions.gpus import GpuMapping, Gpus
from tiers.kv.copy import BlockIds, CopyPlan, Region, Visit
from tiers.kv.fence import PAGE_BYTES, SidecarFence
from tiers.kv.layout import Bytes
from tiers.kv.mapping import map_shared, populate
from tiers.kv.memfd import check_sealed
from tiers.store.client import run_to_end
from tiers.threads import NoThread, submit_or_do

PREFAULT_BYTES_PER_CALL: Final = 16 << 20
"""About a millisecond where the engine has touched the pages, ten where it has not."""
UNMAPPED_POLL_SECONDS: Final = 0.002

# One at a time, beside the threads that copy: engines attach rarely and copies must not wait.
_prefaulting = anyio.CapacityLimiter(1)
_unmapping = ThreadPoolExecutor(1, thread_name_prefix="kvlake-unmap")
_logger = logging.getLogger("kvlake.memory")


class HostMapping:
    """A memfd, mapped. Takes over `fd`."""

    def __init__(self, size_bytes: int, fd: int) -> None:
        try:
            # A memfd may be sparse, so a size above the free memory is no error.
            machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            if size_bytes > machine_bytes:
                raise AttachRefused(
                    "memory",
                    f"memory.size_bytes={size_bytes}: this machine has {machine_bytes} bytes; "
                    "lower the engine's KV cache size",
                )
            check_sealed("memory", fd, size_bytes)
            self._map, memory = map_shared(fd, size_bytes)
        finally:
            os.close(fd)
        self.size_bytes = size_bytes
        self.mapped = True
        """Whether it is still mapped."""
        self._bytes: Bytes | None = memory

    @property
    def view(self) -> Bytes:
        """All of the memory. Use it for one copy only, and keep no reference."""
        assert self._bytes is not None, "copies run while it is mapped"
        return self._bytes

    def populate(self, start: int) -> bool:
        """Map the pages of one slice ahead; False where that fails."""
        try:
            return populate(self.view[start : start + PREFAULT_BYTES_PER_CALL])
        except OSError as error:
            _logger.warning("KV memory is not mapped ahead", extra=fields(reason=error))
            return False

    def close(self) -> None:
        """Unmap it, in a thread: that frees the memory of an engine that died, for seconds."""
        self._bytes = None
        submit_or_do(_unmapping, self._unmap)

    def _unmap(self) -> None:
        try:
            self._map.close()
        except BufferError:
            # A bug: a view outlived its copy, against the rule of `view`. The mapping ends with the
            # view, so this need not end the sidecar.
            _logger.error("a worker's memory stays mapped: a view is still held")  # noqa: TRY400
        else:
            self.mapped = False


@dataclass(frozen=True, slots=True)
class HostRegion:
    """A memfd as one KV cache group lies in it, copied by the CPU. A `Region`."""

    _plan: CopyPlan
    _mapping: HostMapping

    def gather(self, block_ids: BlockIds, payload: Bytes) -> "HostTransfer":
        """A copy of blocks to `payload`, carried out by `finish`."""
        return HostTransfer(self._plan.gather, self._mapping, block_ids, payload)

    def scatter(self, block_ids: BlockIds, payload: Bytes) -> "HostTransfer":
        """A copy of `payload` to blocks, carried out by `finish`."""
        return HostTransfer(self._plan.scatter, self._mapping, block_ids, payload)


@dataclass(slots=True)
class HostTransfer:
    """A copy that runs in `finish`, in the thread that calls it. A `Transfer`."""

    _copy: Callable[..., None]
    _mapping: HostMapping
    _block_ids: BlockIds
    _payload: Bytes

    def finish(self, visit: Visit) -> None:
        """Copy, and show each piece to `visit` while the core has it in its cache."""
        self._copy(self._mapping.view, self._block_ids, self._payload, visit=visit)

    def settle(self) -> None:
        """Do nothing: the copy ran in `finish`, or not at all."""


class WorkerMemory:
    """A worker's KV memory, its `regions` (one for each KV cache group), and its fence page."""

    def __init__(
        self, mapping: HostMapping | GpuMapping, regions: Sequence[Region], fence: SidecarFence
    ) -> None:
        self.mapping = mapping
        self.regions = regions
        self.fence = fence
        self.ended = False
        """Whether no new copy may start."""
        self._open = True
        self._copies = 0

    def hold(self) -> None:
        """Keep the memory mapped until `release`. Call both on the event loop.

        There is no way to get at the bytes here, on purpose: a view left in a waiting task or an
        idle thread would keep the mapping, and with it a dead engine's memory, until the next copy.
        """
        assert self._open, "copies begin while the session lasts"
        self._copies += 1

    def release(self) -> None:
        """One `hold` is over."""
        self._copies -= 1
        self._unmap_if_idle()

    @property
    def prefault_bytes_max(self) -> int:
        """How much memory `prefault` may allocate: what the engine has not touched, or all of it.

        Huge pages take the place of the engine's, and are charged to this process.
        """
        return self.mapping.size_bytes if isinstance(self.mapping, HostMapping) else 0

    async def prefault(self) -> None:
        """Map every page, slice by slice, while the session lasts. Safe to cancel.

        Pages that the engine reserved but has not touched are allocated.
        """
        mapping = self.mapping
        if not isinstance(mapping, HostMapping):
            return
        for start in range(0, mapping.size_bytes, PREFAULT_BYTES_PER_CALL):
            if self.ended:
                return
            self.hold()
            try:
                if not await run_to_end(functools.partial(mapping.populate, start), _prefaulting):
                    return
            except NoThread as error:
                _logger.warning("KV memory is not mapped ahead", extra=fields(reason=error))
                return
            finally:
                self.release()

    def end(self) -> None:
        """The session is over: unmap once the running copies have ended."""
        self.ended = True
        self._unmap_if_idle()

    async def wait_unmapped(self, seconds_max: float) -> None:
        """Wait until the memory is unmapped, for `seconds_max` at most."""
        with anyio.move_on_after(seconds_max):
            # Unmapping may end in a thread, which cannot set an event of the loop.
            while self.mapping.mapped:  # noqa: ASYNC110
                await anyio.sleep(UNMAPPED_POLL_SECONDS)

    def _unmap_if_idle(self) -> None:
        if not self.ended or self._copies or not self._open:
            return
        self._open = False
        self.fence.close()
        self.mapping.close()


def take_memory(attach: Attach, fds: list[int], gpus: Gpus | None = None) -> WorkerMemory | None:
    """Map the descriptors of an `Attach` that passed `check_shape`.

    Takes what it maps out of `fds`; the caller closes the rest. Raises `AttachRefused`.
    """
    shared = attach.memory
    names = () if shared is None else MEMORY_FDS[shared.kind]
    if len(fds) != len(names):
        raise AttachRefused(
            "descriptors",
            f"{len(fds)} descriptors arrived: a {attach.role} sends {len(names)}"
            + (f" ({', '.join(names)})" if names else ""),
        )
    if shared is None:
        return None
    layouts = [part.layout for part in attach.parts if part.layout is not None]
    with contextlib.ExitStack() as undo:
        try:
            check_sealed("fence page", fds[-1], PAGE_BYTES)
            fence = SidecarFence(fds.pop())
            undo.callback(fence.close)
            if shared.kind == KIND_MEMFD:
                mapping = HostMapping(shared.size_bytes, fds.pop())
                undo.callback(mapping.close)
                regions = [HostRegion(CopyPlan(layout), mapping) for layout in layouts]
                memory = WorkerMemory(mapping, regions, fence)
            else:
                assert gpus is not None, "GPU memory is attached once its device is ready"
                memory = WorkerMemory(*gpus.open(shared, layouts, fds, pid=attach.pid), fence)
        except AttachRefused:
            raise
        except (OSError, ValueError) as error:
            raise AttachRefused(
                "memory", f"the worker's memory cannot be mapped: {error}"
            ) from error
        undo.pop_all()
        return memory

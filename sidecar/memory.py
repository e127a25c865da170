"""A worker's KV memory and fence page as they are mapped here.

Owns the mappings and what was handed over for them. Does not own when a copy runs, nor sessions.

Invariants: the memory stays mapped while a copy uses it, and is unmapped as soon as its session
has ended and its last copy has; every descriptor that comes in is mapped or closed; what is mapped
is at least as large as it was said to be, and sealed against shrinking (`tiers/memfd.py`).
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

from sidecar.attach import AttachRefused, close_fds
from sidecar.logs import fields
from tiers.copy import CopyPlan
from tiers.fence import PAGE_BYTES, SidecarFence
from tiers.filesystems import run_to_end
from tiers.memfd import check_sealed
from tiers.prefault import populate

if TYPE_CHECKING:
    from collections.abc import Generator

    from sidecar.protocol import Attach
    from tiers.layout import KVLayout

PREFAULT_BYTES_PER_CALL: Final = 16 << 20
"""About a millisecond where the engine has touched the pages, ten where it has not."""

# One at a time, beside the threads that copy: engines attach rarely and copies must not wait.
_prefaulting = anyio.CapacityLimiter(1)
_logger = logging.getLogger("kvlake.memory")


class WorkerMemory:
    """A worker's KV memory and fence page, mapped here. Owns the descriptors that it is given."""

    def __init__(self, layout: KVLayout, size_bytes: int, fds: list[int]) -> None:
        try:
            _check_size(size_bytes)
            check_sealed("memory", fds[0], size_bytes)
            check_sealed("fence page", fds[1], PAGE_BYTES)
            self.plan = CopyPlan(layout)
            self._map = mmap.mmap(fds[0], size_bytes)
            self.fence = SidecarFence(fds.pop(1))
        except (OSError, ValueError) as error:
            raise AttachRefused(
                "memory", f"the worker's memory cannot be mapped: {error}"
            ) from error
        finally:
            close_fds(fds)
        self._bytes: npt.NDArray[np.uint8] | None = np.frombuffer(self._map, dtype=np.uint8)
        self._copies = 0
        self._ended = False

    @contextlib.contextmanager
    def in_use(self) -> Generator[bool]:
        """Keep the memory mapped for the length of a copy; False if it is gone already.

        Enter on the event loop. It yields no array on purpose: a view left in a waiting task or an
        idle thread would keep the mapping, and with it a dead engine's memory, until the next copy.
        """
        if self._bytes is None:
            yield False
            return
        self._copies += 1
        try:
            yield True
        finally:
            self._copies -= 1
            self._unmap_if_idle()

    @property
    def view(self) -> npt.NDArray[np.uint8]:
        """All of the memory. Only for the copy within `in_use`, and gone when that returns."""
        assert self._bytes is not None, "copies run within in_use"
        return self._bytes

    async def prefault(self) -> None:
        """Map every page, slice by slice, while the session lasts. Safe to cancel.

        A copy into a page that is not mapped yet takes a fault for every 4 KiB, which makes it
        three times slower. Pages that the engine reserved but has not touched are allocated.
        """
        for start in range(0, len(self._map), PREFAULT_BYTES_PER_CALL):
            with self.in_use() as mapped:
                if not mapped or self._ended:
                    return
                if not await run_to_end(functools.partial(self._populate, start), _prefaulting):
                    return

    def _populate(self, start: int) -> bool:
        try:
            return populate(self.view[start : start + PREFAULT_BYTES_PER_CALL])
        except OSError as error:
            _logger.warning("KV memory is not mapped ahead", extra=fields(reason=error))
            return False

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
        return not self._map.closed

    def _unmap_if_idle(self) -> None:
        if not self._ended or self._copies or self._bytes is None:
            return
        self._bytes = None
        self.fence.close()
        try:
            self._map.close()
        except BufferError:
            # A view outlived its copy, against the rule of `view`. Not a reason to end the
            # sidecar: the mapping goes with the view. But it is a bug, so it is told.
            _logger.error("a worker's memory stays mapped: a view is still held")  # noqa: TRY400


def _check_size(size_bytes: int) -> None:
    # A memfd may be sparse: only what is mapped ahead, or copied to, takes memory. What this
    # machine could not back in any case is not begun.
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size_bytes > machine_bytes:
        raise AttachRefused(
            "memory",
            f"memory.size_bytes={size_bytes}: this machine has {machine_bytes} bytes; lower the "
            "engine's KV cache size",
        )


def take_memory(attach: Attach, fds: list[int]) -> WorkerMemory | None:
    """Map what arrived beside an `Attach` that passed `check_shape`. Takes over `fds`."""
    wanted = 0 if attach.layout is None else 2
    if len(fds) != wanted:
        count = len(fds)
        close_fds(fds)
        raise AttachRefused(
            "descriptors",
            f"{count} descriptors arrived: a {attach.role} sends {wanted}"
            + (" (KV memory, fence page)" if wanted else ""),
        )
    if attach.layout is None:
        return None
    return WorkerMemory(attach.layout, attach.layout.size_bytes, fds)

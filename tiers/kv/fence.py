"""The fence page: shared memory by which a worker orders copies against its own work.

Owns three 8-byte words and one lock, all in a file descriptor that the worker makes (memfd) and
hands to the sidecar at attach:

* word 0, `done`: sequence number of the last finished step. Written by the worker (on a GPU by
  the stream itself). Copies of a `Submit` start once `done >= fence`.
* word 1, `revoked_below`: jobs with a smaller id are void. Written by the worker under the lock
  when it takes blocks back without an answer (the sidecar is stopped, or too slow).
* word 2, `revoking`: not zero while the worker waits to revoke because it found the lock held. The
  sidecar starts no copy then; otherwise overlapping copies could keep the lock held for ever.
* an open-file-description lock on the page: the sidecar holds it shared while a copy touches the
  worker's memory, the worker takes it exclusively to revoke. The kernel drops it when its holder
  dies.

Invariant: a block is reused only after its job was answered, or was revoked under the exclusive
lock, or the sidecar's process is gone. The sidecar checks `revoked_below` under the shared lock, so
a copy of a revoked job cannot start, however late a stopped sidecar resumes. Neither side waits for
the other without a limit: both only *try* the lock.
"""

import contextlib
import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Generator
from typing import Final

import numpy as np

from tiers.kv.memfd import sealed_memfd

PAGE_BYTES: Final = 4096
_DONE: Final = 0
_REVOKED_BELOW: Final = 1
_REVOKING: Final = 2

# struct flock on 64-bit Linux: type, whence, pad, start, len, pid, pad.
_FLOCK = struct.Struct("hhxxxxqqixxxx")
_F_OFD_SETLK: Final = getattr(fcntl, "F_OFD_SETLK", 37)


def lock_page(fd: int, kind: int) -> None:
    """Take or drop (`fcntl.F_RDLCK`, `F_WRLCK`, `F_UNLCK`) a lock on the page, without waiting."""
    fcntl.fcntl(fd, _F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, 0, PAGE_BYTES, 0))


class WorkerFence:
    """The worker's end: makes the page, counts steps, revokes."""

    def __init__(self) -> None:
        self.fd = sealed_memfd("kvlake-fence", PAGE_BYTES)
        self._map = mmap.mmap(self.fd, PAGE_BYTES)
        self._words = np.frombuffer(self._map, dtype=np.uint64)

    @property
    def address(self) -> int:
        """Where the page is mapped in this process."""
        return int(self._words.ctypes.data)

    @property
    def quiet(self) -> bool:
        """Whether no write to the page is pending, so that it may be closed."""
        return True

    @property
    def done(self) -> int:
        """Sequence number of the last finished step."""
        return int(self._words[_DONE])

    def signal(self, sequence: int) -> None:
        """Mark all work up to step `sequence` as finished (CPU: a plain store)."""
        self._words[_DONE] = sequence

    def try_revoke(self, below: int) -> bool:
        """Void every job with an id under `below`. False while a copy is running: try later.

        After a False no new copy starts until a True or `give_up_revoking`, so the next try after
        the running copies succeeds.
        """
        try:
            lock_page(self.fd, fcntl.F_WRLCK)
        except (BlockingIOError, PermissionError):
            self._words[_REVOKING] = 1
            return False
        try:
            self._words[_REVOKED_BELOW] = max(below, int(self._words[_REVOKED_BELOW]))
            self._words[_REVOKING] = 0
        finally:
            lock_page(self.fd, fcntl.F_UNLCK)
        return True

    @property
    def revoking(self) -> bool:
        """Whether copies are held off for a revoke that has not succeeded yet."""
        return bool(self._words[_REVOKING])

    def give_up_revoking(self) -> None:
        """Let copies start again: the jobs to be revoked have ended by themselves."""
        self._words[_REVOKING] = 0

    def close(self) -> None:
        """Unmap and close. Idempotent. The sidecar's own descriptor is not affected."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            del self._words
            self._map.close()
            os.close(fd)

    def __del__(self) -> None:
        # After a failed attach, or the end of an unnoticed session, nothing else owns the page.
        with contextlib.suppress(Exception):
            self.close()


class SidecarFence:
    """The sidecar's end of a page. Takes ownership of `fd`, which `check_sealed` accepted."""

    def __init__(self, fd: int) -> None:
        try:
            self._map = mmap.mmap(fd, PAGE_BYTES, prot=mmap.PROT_READ)  # ValueError: too short.
            # Not the worker's description: its lock would be this process's, too.
            self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        finally:
            os.close(fd)
        self._words = np.frombuffer(self._map, dtype=np.uint64)
        self._counting = threading.Lock()
        self._copies = 0
        """Copies that run. The first takes the lock on the page, and the last drops it."""

    def reached(self, fence: int) -> bool:
        """Whether the work of step `fence` is finished."""
        return int(self._words[_DONE]) >= fence

    @property
    def revoking(self) -> bool:
        """Whether the worker waits for the running copies to end, so that it can revoke."""
        return bool(self._words[_REVOKING])

    @contextlib.contextmanager
    def copying(self, job_id: int) -> Generator[bool, None, None]:
        """Hold off revocation while a copy of `job_id` runs; yields False if it is void.

        Raises `BlockingIOError` while the worker revokes or waits to: try again. A wait for the
        lock would block a copy thread for as long as a worker is stopped.
        """
        if self.revoking:
            raise BlockingIOError("the worker waits to revoke")
        with self._counting:
            if not self._copies:
                lock_page(self._fd, fcntl.F_RDLCK)
            self._copies += 1
        try:
            yield job_id >= int(self._words[_REVOKED_BELOW])
        finally:
            with self._counting:
                self._copies -= 1
                if not self._copies:
                    lock_page(self._fd, fcntl.F_UNLCK)

    def close(self) -> None:
        """Unmap and close; no copy may be running."""
        del self._words
        self._map.close()
        os.close(self._fd)

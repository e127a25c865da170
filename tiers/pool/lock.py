"""The owner's record beside a pool: one process at a time, and whose the files are.

Owns `<pool>.lock`. The owner holds it locked (flock: the kernel drops it when the owner and all
that it forked are dead, also across pid namespaces), and its content names that process by pid,
start time and boot, so that a pid that is used again is not mistaken for the owner.

Invariants: a pool file without such a record beside it is not ours; a record is replaced by one
write of constant length, so that an owner killed at any moment leaves the old one or the new one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tiers.errors import PoolError
from tiers.pool import file_lock as filelock
from tiers.pool.creating import require_creatable

if TYPE_CHECKING:
    from collections.abc import Generator

BOOT_ID_BYTES: Final = 16
_RECORD_BYTES: Final = 128
_ATTEMPTS_MAX: Final = 16
_LOCK_FLAGS: Final = os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
# Without start and boot: as releases before the warm restart wrote it.
_RECORD: Final = re.compile(
    rb"kvlake pool of pid (\d{1,10})(?: started (\d{1,20}) boot ([0-9a-f]{32}))?\s*"
)


@dataclass(frozen=True, slots=True)
class Owner:
    """A process, by what tells it from every other. `pid` 0: closed in order, owned by nobody."""

    pid: int
    started_ticks: int = 0
    boot_id: bytes = bytes(BOOT_ID_BYTES)

    @property
    def alive(self) -> bool:
        """Whether that very process runs still, as seen from this process' pid namespace."""
        if self.pid == 0 or self.boot_id != read_boot_id():
            return False
        return _started_ticks(self.pid) == self.started_ticks

    @classmethod
    def current(cls) -> Owner:
        """This process."""
        return cls(os.getpid(), _started_ticks(os.getpid()), read_boot_id())


def read_boot_id() -> bytes:
    """What this run of the machine is called; zeros where the system does not tell."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text()
        return bytes.fromhex(text.strip().replace("-", ""))
    except (OSError, ValueError):
        return bytes(BOOT_ID_BYTES)


def _started_ticks(pid: int) -> int:
    """Start time of a live process (field 22 of /proc/PID/stat), 0 for one that is dead."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        # Field 2 is the command in brackets, with anything in it; count from behind it.
        after = stat[stat.rindex(b")") + 2 :].split()
        return 0 if after[0] in (b"Z", b"X") else int(after[19])
    except (OSError, ValueError, IndexError):
        return 0


def lock_path_of(path: Path) -> Path:
    """Where the record of a pool is."""
    return path.with_name(path.name + ".lock")


def read_owner(lock_path: Path) -> Owner | None:
    """Who the record names, without locking it; None where there is no record of ours."""
    try:
        fd = os.open(lock_path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return owner_of(fd) if stat.S_ISREG(os.fstat(fd).st_mode) else None
    finally:
        os.close(fd)


def owner_of(lock_fd: int) -> Owner | None:
    """Who an open record names; None where the file holds something else."""
    match = _RECORD.fullmatch(os.pread(lock_fd, 2 * _RECORD_BYTES, 0))
    if match is None:
        return None
    pid, started, boot = match.groups()
    return Owner(int(pid), int(started or 0), bytes.fromhex((boot or b"00" * 16).decode()))


def write_owner(lock_fd: int, owner: Owner) -> None:
    """Replace the record. Spaces fill it up: nothing of a longer one may be left behind it."""
    record = f"kvlake pool of pid {owner.pid} started {owner.started_ticks} boot "
    record += owner.boot_id.hex()
    os.pwrite(lock_fd, record.ljust(_RECORD_BYTES - 1).encode() + b"\n", 0)


def take_lock(lock_path: Path) -> int:
    """Open and lock a record. Raises `PoolError` where another process has it."""
    with _worded(lock_path):
        return _lock(lock_path)


def check_lock(lock_path: Path) -> Owner | None:
    """Raise the `PoolError` that `take_lock` would; changes nothing. Returns whom it names."""
    with _worded(lock_path):
        try:
            lock_fd = os.open(lock_path, _LOCK_FLAGS)
        except FileNotFoundError:
            require_creatable(lock_path)
            return None
        try:
            _require_ours(os.fstat(lock_fd))
            _require_free(lock_path, lock_fd, taken=filelock.taken(lock_fd))
            _require_record(lock_fd)
            return owner_of(lock_fd)
        finally:
            os.close(lock_fd)


@contextlib.contextmanager
def _worded(lock_path: Path) -> Generator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise PoolError(
            f"{lock_path.parent} does not exist; make that folder, or choose another host.directory"
        ) from error
    except OSError as error:
        raise PoolError(
            f"cannot lock {lock_path}: {error}; choose another host.directory or runtime.name, or "
            "remove the file if it is not in use"
        ) from error


def _lock(lock_path: Path) -> int:
    for _ in range(_ATTEMPTS_MAX):
        lock_fd = os.open(lock_path, _LOCK_FLAGS | os.O_CREAT, 0o600)
        try:
            _require_ours(os.fstat(lock_fd))
            _require_free(lock_path, lock_fd, taken=not filelock.take(lock_fd))
            # An owner that closed in between removed the file that we have just locked.
            if os.path.samestat(os.fstat(lock_fd), os.stat(lock_path)):
                _require_record(lock_fd)
                return lock_fd
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(lock_fd)
            raise
        os.close(lock_fd)
    raise PoolError(f"pool is in use: {lock_path} changed owners {_ATTEMPTS_MAX} times")


def _require_record(lock_fd: int) -> None:
    if os.fstat(lock_fd).st_size and owner_of(lock_fd) is None:
        raise FileExistsError(errno.EEXIST, "it is no owner's record")


def _require_ours(found: os.stat_result) -> None:
    # In a directory such as /dev/shm anybody can make a file of this name first, and then owns it:
    # could read and replace the record, and keep the lock.
    if not stat.S_ISREG(found.st_mode):
        raise FileExistsError(errno.EEXIST, "it is no regular file")
    if found.st_uid != os.geteuid():
        raise FileExistsError(
            errno.EEXIST, f"it belongs to uid {found.st_uid}, not to uid {os.geteuid()}"
        )


def _require_free(lock_path: Path, lock_fd: int, *, taken: bool) -> None:
    if not taken:
        return
    owner = owner_of(lock_fd)
    who = f"process {owner.pid}" if owner is not None and owner.pid else "an unknown process"
    if owner is not None and owner.pid and not owner.alive:
        # What holds the lock then is a process that it forked, or runs in another pid namespace.
        who += " (not to be seen from here: in another container, or ended and survived by a child)"
    raise PoolError(
        f"pool is in use: {lock_path} is locked by {who}; stop that sidecar, or give this one "
        "another runtime.name or host.directory"
    )


def holds(lock_fd: int, path: Path) -> bool:
    """Whether the record that is beside a pool is the one that the caller has locked.

    Not so where somebody removed it: another process may have made, and locked, a new one since.
    """
    try:
        return os.path.samestat(os.fstat(lock_fd), os.stat(lock_path_of(path)))
    except FileNotFoundError:
        return False


def remove_files(path: Path, lock_fd: int) -> None:
    """Remove a pool whose lock the caller has; the record last, or the memory is nobody's.

    Files of another owner, who took the place of one whose record was removed, stay.
    """
    if holds(lock_fd, path):
        path.unlink(missing_ok=True)
        lock_path_of(path).unlink(missing_ok=True)

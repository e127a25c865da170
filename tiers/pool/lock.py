"""Locks of files between processes, and the owner's record beside a pool.

Owns `<pool>.lock`. The owner of a pool holds it locked (flock: the kernel drops the lock when the
owner and all that it forked are dead, also across pid namespaces). Its content names that process
by pid, start time and boot, so a reused pid is not mistaken for the owner.

Invariants: a pool file without such a record beside it is not ours; a record is replaced by one
write of constant length, so an owner killed at any moment leaves the old one or the new one;
looking at a lock keeps nobody from taking it, and testing leaves no file behind.
"""

import contextlib
import errno
import fcntl
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tiers.errors import PoolError

BOOT_ID_BYTES: Final = 16
LOCK_ATTEMPTS_MAX: Final = 200
LOCK_RETRY_SECONDS: Final = 0.001
_RECORD_BYTES: Final = 128
_OWNER_CHANGES_MAX: Final = 16
_LOCK_FLAGS: Final = os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
# Without start and boot: as releases before the warm restart wrote it.
_RECORD: Final = re.compile(
    rb"kvlake pool of pid (\d{1,10})(?: started (\d{1,20}) boot ([0-9a-f]{32}))?\s*"
)


def try_lock(fd: int) -> bool:
    """Lock an open file for this process; False if another process holds the lock."""
    for _ in range(LOCK_ATTEMPTS_MAX):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if is_locked(fd):
            return False
        # Somebody only looked: `is_locked` holds the file shared for a moment.
        time.sleep(LOCK_RETRY_SECONDS)
    return False


def is_locked(fd: int) -> bool:
    """Whether another process holds an open file's lock."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


def require_creatable(path: Path, *, directory: bool = False) -> None:
    """Raise the `OSError` that creating a file, or a directory, would raise. Leaves none."""
    parent = path.parent
    try:
        try:
            # A file without a name: nobody sees it, and closing it removes it.
            os.close(os.open(parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600))
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
            if directory:
                Path(tempfile.mkdtemp(prefix=".kvlake-", dir=parent)).rmdir()
            else:
                tempfile.NamedTemporaryFile(prefix=".kvlake-", dir=parent).close()
    except OSError as error:
        code = error.errno or errno.EIO
        raise OSError(code, os.strerror(code), str(path)) from error


@dataclass(frozen=True, slots=True)
class Owner:
    """A process, identified also after its pid was reused. `pid` 0: closed, without an owner."""

    pid: int
    started_ticks: int = 0
    boot_id: bytes = bytes(BOOT_ID_BYTES)

    @property
    def alive(self) -> bool:
        """Whether that process still runs, as seen from this process's pid namespace."""
        here = self.pid != 0 and self.boot_id == read_boot_id()
        return here and _started_ticks(self.pid) == self.started_ticks

    @classmethod
    def current(cls) -> "Owner":
        """This process."""
        return cls(os.getpid(), _started_ticks(os.getpid()), read_boot_id())


def read_boot_id() -> bytes:
    """The kernel's id of this boot; zeros if it cannot be read."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text()
        return bytes.fromhex(text.strip().replace("-", ""))
    except (OSError, ValueError):
        return bytes(BOOT_ID_BYTES)


def _started_ticks(pid: int) -> int:
    """Start time of a live process (field 22 of /proc/PID/stat), 0 for a dead one."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        # Field 2 is the command in brackets, with anything in it; count from after it.
        after = stat[stat.rindex(b")") + 2 :].split()
        return 0 if after[0] in (b"Z", b"X") else int(after[19])
    except (OSError, ValueError, IndexError):
        return 0


def lock_path_of(path: Path) -> Path:
    """The record's path of a pool."""
    return path.with_name(path.name + ".lock")


def read_owner(lock_path: Path) -> Owner | None:
    """The owner in a record, without locking it; None if there is no record of ours."""
    try:
        fd = os.open(lock_path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return owner_of(fd) if stat.S_ISREG(os.fstat(fd).st_mode) else None
    finally:
        os.close(fd)


def owner_of(lock_fd: int) -> Owner | None:
    """The owner in an open record; None if the file holds something else."""
    match = _RECORD.fullmatch(os.pread(lock_fd, 2 * _RECORD_BYTES, 0))
    if match is None:
        return None
    pid, started, boot = match.groups()
    return Owner(int(pid), int(started or 0), bytes.fromhex((boot or b"00" * 16).decode()))


def write_owner(lock_fd: int, owner: Owner) -> None:
    """Replace the record, padded with spaces so that nothing of a longer one remains."""
    record = f"kvlake pool of pid {owner.pid} started {owner.started_ticks} boot "
    record += owner.boot_id.hex()
    os.pwrite(lock_fd, record.ljust(_RECORD_BYTES - 1).encode() + b"\n", 0)


def take_lock(lock_path: Path) -> int:
    """Open and lock a record. Raises `PoolError` if another process has it."""
    with _as_pool_errors(lock_path):
        for _ in range(_OWNER_CHANGES_MAX):
            lock_fd = os.open(lock_path, _LOCK_FLAGS | os.O_CREAT, 0o600)
            try:
                _require_free(lock_path, lock_fd, lambda fd: not try_lock(fd))
            except BaseException:
                os.close(lock_fd)
                raise
            # An owner that closed meanwhile removed the file that we have just locked.
            if _is_at(lock_path, lock_fd):
                return lock_fd
            os.close(lock_fd)
        raise PoolError(f"pool is in use: {lock_path} changed owners {_OWNER_CHANGES_MAX} times")


def check_lock(lock_path: Path) -> Owner | None:
    """Raise the `PoolError` that `take_lock` would; changes nothing. Returns the owner."""
    with _as_pool_errors(lock_path):
        try:
            lock_fd = os.open(lock_path, _LOCK_FLAGS)
        except FileNotFoundError:
            require_creatable(lock_path)
            return None
        try:
            return _require_free(lock_path, lock_fd, is_locked)
        finally:
            os.close(lock_fd)


@contextlib.contextmanager
def _as_pool_errors(lock_path: Path) -> Generator[None]:
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


def _require_free(lock_path: Path, lock_fd: int, locked: Callable[[int], bool]) -> Owner | None:
    """The owner in a record of ours that nobody else has locked. Raises `PoolError`, `OSError`."""
    found = os.fstat(lock_fd)
    # In a directory such as /dev/shm any user can create a file of this name first, and could then
    # read and replace the record, and keep the lock.
    if not stat.S_ISREG(found.st_mode):
        raise FileExistsError(errno.EEXIST, "it is no regular file")
    if found.st_uid != os.geteuid():
        raise FileExistsError(
            errno.EEXIST, f"it belongs to uid {found.st_uid}, not to uid {os.geteuid()}"
        )
    is_held, owner = locked(lock_fd), owner_of(lock_fd)
    if not is_held:
        if owner is None and os.fstat(lock_fd).st_size:
            raise FileExistsError(errno.EEXIST, "it is no owner's record")
        return owner
    who = f"process {owner.pid}" if owner is not None and owner.pid else "an unknown process"
    if owner is not None and owner.pid and not owner.alive:
        # Then a process that it forked holds the lock, or it runs in another pid namespace.
        who += " (not to be seen from here: in another container, or ended and survived by a child)"
    raise PoolError(
        f"pool is in use: {lock_path} is locked by {who}; stop that sidecar, or give this one "
        "another runtime.name or host.directory"
    )


def _is_at(lock_path: Path, lock_fd: int) -> bool:
    """Whether an open record was not removed. Another process may have made a new one since."""
    try:
        return os.path.samestat(os.fstat(lock_fd), os.stat(lock_path))
    except FileNotFoundError:
        return False


def remove_files(path: Path, lock_fd: int) -> None:
    """Remove a pool whose lock the caller has; the record last, since it vouches for the file.

    Files of another owner, who took over after the record was removed, stay.
    """
    if _is_at(lock_path_of(path), lock_fd):
        path.unlink(missing_ok=True)
        lock_path_of(path).unlink(missing_ok=True)

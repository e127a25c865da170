"""The runtime directory: where the sockets are, who can reach them, who else could replace them.

Owns `<runtime.directory>/<runtime.name>` with its lock and its socket files, and the check of
everything above it. Does not own what is said on the sockets, nor the check of each client's user
(`handshake.py`).

Invariants:

* Nobody but root and the sidecar's own user can replace a socket or the directory that it lies in:
  the directory belongs to that user, and so does every symbolic link on the way; no directory
  above lets others rename what is in it (unless `runtime.strict_parents` is off).
* The directory has mode 0700. With `runtime.allow_uids` it has 0711: those users must pass through
  it. The kernel then tells who connects, and others are refused on both sockets.
* Whoever holds the lock of the directory owns every file in it: a socket file found there is a
  dead sidecar's. The lock is the kernel's (flock), so it goes with its process.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
from typing import TYPE_CHECKING, Final

from sidecar.errors import StartError
from sidecar.logs import fields

if TYPE_CHECKING:
    from pathlib import Path

MODE_OWN: Final = 0o700
MODE_PASSABLE: Final = 0o711
SOCKET_MODE_OWN: Final = 0o600
SOCKET_MODE_SHARED: Final = 0o666
_SOCKET_PATH_BYTES_MAX: Final = 107
NUMBERS_PER_LIFE: Final = 1 << 36
"""Batches of events that one life may tell before only the clock keeps the next one above it: at
ten thousand a second, 80 days."""
_NUMBER_END: Final = 1 << 62

_logger = logging.getLogger("kvlake.server")


class RuntimeDirectory:
    """`<directory>/<name>`: ours, locked; holds the sockets.

    Args:
        directory: `runtime.directory`; made where it is missing.
        name: `runtime.name`.
        shared: whether other users connect here (`runtime.allow_uids`).
        strict_parents: whether a parent that others can write to is an error.

    Raises:
        StartError: it cannot be had, or could be replaced by somebody else.
    """

    def __init__(
        self, directory: Path, name: str, *, shared: bool = False, strict_parents: bool = True
    ) -> None:
        self.path = directory / name
        self.attach_path = self.path / "attach.sock"
        self.jobs_path = self.path / "jobs.sock"
        self.events_path = self.path / "events.sock"
        self.replay_path = self.path / "replay.sock"
        self.socket_mode = SOCKET_MODE_SHARED if shared else SOCKET_MODE_OWN
        self._mode = MODE_PASSABLE if shared else MODE_OWN
        self._shared = shared
        self._strict = strict_parents
        longest = len(os.fsencode(self.attach_path))
        if longest > _SOCKET_PATH_BYTES_MAX:
            raise StartError(
                f"runtime.directory: {self.attach_path} has {longest} bytes and a Unix socket path "
                f"at most {_SOCKET_PATH_BYTES_MAX}; choose a shorter directory or runtime.name"
            )
        self._make()
        self._lock_fd = self._take_lock()
        self.remove_sockets()

    def held(self) -> bool:
        """Whether the directory is still there and its lock still ours."""
        try:
            found = os.lstat(self.path / "lock")
        except OSError:
            return False
        return os.path.samestat(found, os.fstat(self._lock_fd))

    def retake(self) -> None:
        """Make a directory again that was removed under us. Raises `StartError`, `OSError`."""
        self._make()
        lock_fd, self._lock_fd = self._lock_fd, self._take_lock()
        os.close(lock_fd)

    def _make(self) -> None:
        _make(self.path.parent, self._mode)
        _make(self.path, self._mode)
        _check_own(self.path)
        if stat.S_IMODE(self.path.lstat().st_mode) != self._mode:
            self.path.chmod(self._mode)
        _check_parents(self.path.parent, strict=self._strict, shared=self._shared)

    def _take_lock(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self.path / "lock", flags, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(fd)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise StartError(f"cannot lock {self.path / 'lock'}: {error}") from error
            raise StartError(
                f"a sidecar (pid {owner}) already serves {self.path}; stop it first, or use it: "
                "kvlake run joins it (another runtime.name is a cache of its own)"
            ) from error
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        return fd

    def first_number(self, now: int) -> int:
        """A number for the first batch of events: `now`, or more where an earlier life had more.

        A subscriber hears only numbers above those that it had, and the clock may have gone back.
        """
        place = self.path / "event-number"
        first = now
        try:
            reserved = int(place.read_text())
            if now < reserved < _NUMBER_END:
                first = reserved
        except (FileNotFoundError, ValueError):
            # The first life, or a file that was cut off: the clock alone counts.
            pass
        except OSError as error:
            _logger.warning("the number of events is not known", extra=fields(error=error))
        draft = place.with_suffix(".new")
        try:
            draft.write_text(str(first + NUMBERS_PER_LIFE))
            draft.replace(place)
        except OSError as error:
            _logger.warning("the number of events is not kept", extra=fields(error=error))
        return first

    def remove_sockets(self, *paths: Path) -> None:
        """Unlink these sockets, or all: a dead sidecar's at start, our own at the end.

        Those in a directory that another sidecar has taken meanwhile are its own.
        """
        if not self.held():
            return
        everything = (self.attach_path, self.jobs_path, self.events_path, self.replay_path)
        for path in paths or everything:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the sockets and let go of the directory."""
        self.remove_sockets()
        os.close(self._lock_fd)


def _make(path: Path, mode: int) -> None:
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise StartError(f"runtime.directory={path} cannot be made: {error}") from error
    if stat.S_ISLNK(found.st_mode):
        raise StartError(
            f"runtime.directory={path} is a symbolic link, which can be turned elsewhere; write "
            f"where it points to: {path.resolve()}"
        )
    if not stat.S_ISDIR(found.st_mode):
        raise StartError(f"runtime.directory={path} is not a directory; choose another")
    # Only ever wider, and only our own: a directory that somebody made for us keeps its mode.
    if found.st_uid == os.geteuid() and mode & ~stat.S_IMODE(found.st_mode) & 0o011:
        path.chmod(stat.S_IMODE(found.st_mode) | mode)


def _check_own(path: Path) -> None:
    owner = path.lstat().st_uid
    if owner != os.geteuid():
        raise StartError(
            f"runtime.directory={path} belongs to uid {owner}, not to uid {os.geteuid()}; "
            "choose another, its sockets could be replaced"
        )


def _check_parents(directory: Path, *, strict: bool, shared: bool) -> None:
    """Raise `StartError` where somebody else could put another directory in this one's place."""
    trusted = (os.geteuid(), 0)
    for place in (directory, *directory.parents):
        found = place.lstat()
        if stat.S_ISLNK(found.st_mode) and found.st_uid not in trusted:
            raise StartError(
                f"runtime.directory={directory}: {place} is a symbolic link of uid "
                f"{found.st_uid}, who can turn it elsewhere; choose another directory"
            )
    real = directory.resolve()
    for place in (real, *real.parents):
        found = place.lstat()
        mode = stat.S_IMODE(found.st_mode)
        if shared and not mode & 0o011:
            raise StartError(
                f"runtime.allow_uids: other users cannot pass through {place} (mode {mode:04o}); "
                "choose a runtime.directory such as /run/kvlake, or chmod o+x that one"
            )
        if not strict:
            continue
        if found.st_uid not in trusted:
            raise StartError(
                f"runtime.directory={directory}: {place} belongs to uid {found.st_uid}, who could "
                "replace what is in it; choose another directory"
            )
        # In a sticky directory (/tmp) only the owner of an entry can rename it.
        if mode & 0o022 and not mode & stat.S_ISVTX:
            raise StartError(
                f"runtime.directory={directory}: {place} (mode {mode:04o}) lets others replace "
                f"what is in it; chmod go-w {place}, choose another directory, or, where only "
                "trusted processes reach it (a volume of one pod), set runtime.strict_parents: "
                "false"
            )

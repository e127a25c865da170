"""The runtime directory: the sockets' files, and the permissions that protect them.

Owns `<runtime.directory>/<runtime.name>` with its lock and its socket files, and the check of the
directories above (`check`). Does not own the check of each client's user (`handshake.py`).

Invariants:

* Only root and the sidecar's own user can replace a socket or its directory: that user owns the
  directory and all symbolic links on the way, and no directory above lets others rename its entries
  (unless `runtime.strict_parents` is off).
* The directory has mode 0700, or 0711 for the users of `runtime.allow_uids`: the sockets refuse all
  others by their uid. Missing directories are made with the modes that `check` requires.
* The holder of the directory's lock, a flock, owns every file in it: a socket found there is a dead
  sidecar's.
"""

import contextlib
import logging
import os
import stat
from pathlib import Path
from typing import Final

from sidecar.config.sections import RuntimeSettings
from sidecar.errors import StartError
from sidecar.logs import fields
from tiers.pool.lock import is_locked, require_creatable, try_lock

MODE_OWN: Final = 0o700
MODE_PASSABLE: Final = 0o711
MODE_ABOVE: Final = 0o755
SOCKET_MODE_OWN: Final = 0o600
SOCKET_MODE_SHARED: Final = 0o666
NUMBERS_PER_EPOCH: Final = 1 << 36
"""Reserved numbers of event batches: 80 days at ten thousand a second. After that only the clock
keeps the numbers of the next sidecar above these."""
_NUMBER_END: Final = 1 << 62
_NUMBER_DIGITS_MAX: Final = 18

_SOCKETS: Final = ("attach.sock", "jobs.sock", "events.sock", "replay.sock")

_logger = logging.getLogger("kvlake.server")


class AlreadyServed(StartError):
    """Another sidecar has the lock of this directory."""

    def __init__(self, home: Path, pid: int) -> None:
        super().__init__(
            f"a sidecar (pid {pid or 'unknown'}) already serves {home}; stop it first, or use it: "
            "kvlake run joins it (another runtime.name is a cache of its own)"
        )
        self.pid = pid
        """Its pid in its own namespace; 0 if unknown."""


class RuntimeDirectory:
    """This sidecar's own directory, made where it is missing, and locked.

    Raises `StartError` where it cannot be made or locked, or somebody else could replace it.
    """

    def __init__(self, settings: RuntimeSettings) -> None:
        self._settings = settings
        self.path = settings.home
        self._sockets = tuple(self.path / one for one in _SOCKETS)
        self.attach_path, self.jobs_path, self.events_path, self.replay_path = self._sockets
        self.lock_path = self.path / "lock"
        self._lost_path = self.path / "last-stop-lost"
        self.socket_mode = SOCKET_MODE_SHARED if settings.allow_uids else SOCKET_MODE_OWN
        self._mode = MODE_PASSABLE if settings.allow_uids else MODE_OWN
        self._make()
        self._lock_fd = self._take_lock()
        self.remove_sockets()

    def held(self) -> bool:
        """Whether the directory still exists with our lock."""
        try:
            found = os.lstat(self.lock_path)
        except OSError:
            return False
        return os.path.samestat(found, os.fstat(self._lock_fd))

    def retake(self) -> None:
        """Make a removed directory again. Raises `StartError`, `OSError`."""
        self._make()
        lock_fd, self._lock_fd = self._lock_fd, self._take_lock()
        os.close(lock_fd)

    def _make(self) -> None:
        check(self._settings)
        directory, mode = self.path.parent, self._mode
        try:
            for place in _missing(self.path):
                place.mkdir(mode=MODE_OWN, exist_ok=True)
                place.chmod(mode if place in (directory, self.path) else MODE_ABOVE)
            found = directory.lstat()
            # Only widened, and only if it is our own.
            if mode == MODE_PASSABLE and found.st_uid == os.geteuid():
                directory.chmod(stat.S_IMODE(found.st_mode) | mode)
            self.path.chmod(mode)
        except OSError as error:
            raise _unmakeable(self.path, error) from error
        # Again, now that everything exists.
        check(self._settings)

    def _take_lock(self) -> int:
        fd = _open_lock(self.path, os.O_CREAT)
        with contextlib.ExitStack() as undo:
            # Left open, it would keep the lock, and `retake` would find it taken for ever.
            undo.callback(os.close, fd)
            if not try_lock(fd):
                raise AlreadyServed(self.path, _pid_in(fd))
            os.ftruncate(fd, 0)
            os.pwrite(fd, str(os.getpid()).encode(), 0)
            undo.pop_all()
        return fd

    def first_event_number(self, now: int) -> int:
        """The number of the first batch of events: `now`, or above all of earlier sidecars.

        Subscribers ignore lower numbers than they have seen, and the clock may have gone back.
        """
        place = self.path / "event-number"
        first = now
        try:
            # Without an earlier sidecar, or with a truncated file, the clock alone counts.
            with contextlib.suppress(FileNotFoundError, ValueError):
                reserved = int(place.read_text())
                first = reserved if now < reserved < _NUMBER_END else now
            draft = place.with_suffix(".new")
            draft.write_text(str(first + NUMBERS_PER_EPOCH))
            draft.replace(place)
        except OSError as error:
            _logger.warning("the number of events cannot be kept", extra=fields(error=error))
        return first

    def write_lost(self, objects: int) -> None:
        """Record how many objects this sidecar loses at its end, for the next one's metrics."""
        try:
            if objects and self.held():
                self._lost_path.write_text(str(objects))
        except OSError as error:
            _logger.warning(
                "the number of lost objects cannot be written", extra=fields(error=error)
            )

    def read_lost(self) -> int:
        """Objects that the previous sidecar lost when it stopped. Removes the record."""
        text = ""
        try:
            with contextlib.suppress(FileNotFoundError):
                text = self._lost_path.read_text()
                self._lost_path.unlink()
        except (OSError, ValueError) as error:
            _logger.warning("the number of lost objects cannot be read", extra=fields(error=error))
        return int(text) if text.isdecimal() and len(text) < _NUMBER_DIGITS_MAX else 0

    def remove_sockets(self, *paths: Path) -> None:
        """Unlink these sockets, or all, unless another sidecar has the directory by now."""
        if not self.held():
            return
        for path in paths or self._sockets:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the sockets and release the lock."""
        self.remove_sockets()
        os.close(self._lock_fd)


def check(settings: RuntimeSettings) -> None:
    """Raise `StartError` where the sockets cannot be made, or others could replace them.

    Changes nothing: missing directories are assumed as `RuntimeDirectory` makes them. Raises
    `AlreadyServed` last, so then the other sidecar is the only obstacle.
    """
    _check_kind(settings.directory)
    _check_kind(settings.home, ours=True)
    _check_parents(settings)
    _check_entries(settings.home)


def _missing(path: Path) -> list[Path]:
    """The directories to create so that `path` exists, outermost first."""
    found: list[Path] = []
    while not os.path.lexists(path):
        found.insert(0, path)
        path = path.parent
    return found


def _unmakeable(path: Path, error: OSError) -> StartError:
    return StartError(
        f"runtime.directory={path} cannot be made: {error}; choose another, or make it for uid "
        f"{os.geteuid()}"
    )


def _found(path: Path) -> os.stat_result | None:
    """What the path names; None where it does not exist."""
    with contextlib.suppress(FileNotFoundError):
        return path.lstat()
    return None


def _check_kind(path: Path, *, ours: bool = False) -> None:
    try:
        found = _found(path)
        if found is None:
            require_creatable(_missing(path)[0], directory=True)
            return
    except OSError as error:
        raise _unmakeable(path, error) from error
    if stat.S_ISLNK(found.st_mode):
        raise StartError(
            f"runtime.directory={path} is a symbolic link, which can be turned elsewhere; write "
            f"where it points to: {path.resolve()}"
        )
    if not stat.S_ISDIR(found.st_mode):
        raise StartError(f"runtime.directory={path} is not a directory; choose another")
    if ours and found.st_uid != os.geteuid():
        raise StartError(
            f"runtime.directory={path} belongs to uid {found.st_uid}, not to uid {os.geteuid()}; "
            "choose another, its sockets could be replaced"
        )


def _check_parents(settings: RuntimeSettings) -> None:
    """Raise `StartError` where somebody else could replace the directory by another one."""
    directory, trusted = settings.directory, (os.geteuid(), 0)
    for place in (directory, *directory.parents):
        found = _found(place)
        if found is not None and stat.S_ISLNK(found.st_mode) and found.st_uid not in trusted:
            raise StartError(
                f"runtime.directory={directory}: {place} is a symbolic link of uid "
                f"{found.st_uid}, who can turn it elsewhere; choose another directory"
            )
    real = directory.resolve()
    for place in (real, *real.parents):
        found = _found(place)
        if found is None:
            continue
        mode = stat.S_IMODE(found.st_mode)
        opened = place == real and found.st_uid == os.geteuid()  # by `_make`
        if settings.allow_uids and not opened and not mode & 0o011:
            raise StartError(
                f"runtime.allow_uids: other users cannot pass through {place} (mode {mode:04o}); "
                "choose a runtime.directory such as /run/kvlake, or chmod o+x that one"
            )
        if not settings.strict_parents:
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


def _check_entries(home: Path) -> None:
    """Raise `StartError` where lock or sockets cannot be made, or another sidecar has them."""
    there = _found(home)
    if there is None or stat.S_IMODE(there.st_mode) & MODE_OWN != MODE_OWN:
        # `_make` creates it, or sets its mode.
        return
    for name in _SOCKETS:
        found = _found(home / name)
        if found is not None and stat.S_ISDIR(found.st_mode):
            raise StartError(
                f"{home / name} is a directory, and a socket has to be there; remove it"
            )
    if _found(home / "lock") is None:
        try:
            require_creatable(home / "lock")
        except OSError as error:
            raise _unlockable(home / "lock", error) from error
        return
    fd = _open_lock(home, 0)
    try:
        if is_locked(fd):
            raise AlreadyServed(home, _pid_in(fd))
    finally:
        os.close(fd)


def _open_lock(home: Path, flags: int) -> int:
    """Open the lock file. Raises `StartError` where it is no regular file."""
    lock = home / "lock"
    flags |= os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(lock, flags, 0o600)
    except OSError as error:
        raise _unlockable(lock, error) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _unlockable(lock, "it is no regular file")
    return fd


def _unlockable(lock: Path, error: object) -> StartError:
    return StartError(
        f"cannot lock {lock}: {error}; choose another runtime.name, or remove that file"
    )


def _pid_in(lock_fd: int) -> int:
    """The pid in a lock file; 0 where there is none."""
    text = os.pread(lock_fd, 32, 0).strip()
    return int(text) if text.isdigit() else 0

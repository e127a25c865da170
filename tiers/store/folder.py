"""A local folder, or a mount, as an object store: plain system calls from and into slots.

Owns the files: temporary names, renames and links, folders, leftovers of dead writers, and direct
I/O (O_DIRECT), which moves a slot's pages without a copy through the page cache, for a fraction of
the processor time. What is not aligned, small, or refused by the file system is buffered.

Invariants:

* A name exists with all its bytes, or does not exist: a write goes to a temporary name in the same
  folder, which is renamed, or linked if it must not replace anything.
* Without `fsync` a completed write may be lost in a power failure, direct or not: neither the
  file's length nor its name is on the disk then. With it, both are before the write returns.
* Others can put anything under any name: a link, a pipe that never answers, a file of another user.
  Only regular files are read, none is waited for, and an entry that cannot be examined is omitted
  from listings and counted.
* A slot's bytes beyond the object are left alone. (The kernel fills whole sectors: that is why the
  last page is not read directly.)
"""

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import anyio
import anyio.to_thread

from tiers.errors import ImageTruncated, ObjectDenied, ObjectOdd, TierUnmounted
from tiers.store.access import Folder
from tiers.store.client import PIECE_BYTES, Bytes, Found, Listing, Seen, check_size, run_to_end
from tiers.threads import lower_priority

T = TypeVar("T")

TEMPORARY_SUFFIX: Final = ".tmp"
TEMPORARY_BYTES: Final = 8
_TEMPORARY: Final = re.compile(rf".+\.[0-9a-f]{{{2 * TEMPORARY_BYTES}}}\{TEMPORARY_SUFFIX}")
TEMPORARY_SECONDS_MAX: Final = 24 * 3600
"""A temporary file older than this was left by a process that died; a listing removes it."""
THREADS_MAX: Final = 4
"""Enough to keep a disk busy. More only compete with engines for cores."""
LISTINGS_MAX: Final = 2 * THREADS_MAX
"""Listings that run: those that callers wait for, and as many that they have given up."""
MAKE_FOLDER_ATTEMPTS_MAX: Final = 8
DIRECT_ALIGNMENT: Final = 4096
"""Alignment of memory, offsets and lengths: at least any device's block."""
DIRECT_BYTES_MIN: Final = 256 * 1024
"""Below it, waiting for the device costs more than copying."""

_NO_WAY_THERE: Final = (errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
_GONE_OR_ODD: Final = (*_NO_WAY_THERE, errno.ENOENT, errno.EACCES, errno.EPERM)
"""Errors of a single entry in a listing. Others may be those of the disk or the server, and a
listing that ignores them would report objects as gone."""
_DAMAGED: Final = (errno.EIO, errno.EUCLEAN, errno.EBADMSG)
"""Errors of a single damaged file, but also of a disk or a server that fails."""
DAMAGED_MAX: Final = 1
"""Damaged entries that one listing omits. With more, the disk or the server is the cause."""

_log = logging.getLogger("kvlake.store")


class LocalFolder:
    """A folder of this machine or a mount: system calls in worker threads, into and from slots."""

    def __init__(self, root: str, settings: Folder) -> None:
        self._root = root
        # KV and token ids are private, unless several users share them.
        self._file_mode = 0o666 if settings.shared else 0o600
        self._folder_mode = 0o777 if settings.shared else 0o700
        self._root_status: os.stat_result | None = None
        self._fsync = settings.fsync
        self.direct = settings.direct
        """Whether direct I/O is used; False once the file system has refused it."""
        # Separate limits: a backlog of writes must not delay a read that a prompt waits for.
        self._writers = anyio.CapacityLimiter(THREADS_MAX)
        self._readers = anyio.CapacityLimiter(THREADS_MAX)
        self._listers = anyio.CapacityLimiter(THREADS_MAX)
        self._listings_left = threading.Semaphore(LISTINGS_MAX)
        self.entries_skipped = 0
        """Entries that listings omitted because they are no files or cannot be examined."""

    async def write(self, name: str, image: Bytes, *, create: bool = False) -> None:
        place = os.link if create else os.replace
        path = f"{self._root}/{name}"
        await run_to_end(lambda: self._put(path, image, place), self._writers)

    async def read(self, name: str, into: Bytes, *, seen: Seen | None = None) -> int:
        path = f"{self._root}/{name}"
        return await run_to_end(lambda: self._get(path, into, seen), self._readers)

    async def list(
        self,
        prefix: str,
        *,
        start_after: str = "",
        deep: bool = True,
        names_max: int | None = None,  # noqa: ARG002 (a folder has no pages)
    ) -> Listing:
        # A listing uses no memory of the caller, so a cancel does not wait for its thread, which a
        # mount whose server is gone blocks for any time. Python waits for such threads when it
        # ends: a process that must not wait ends by `os._exit`.
        found = await anyio.to_thread.run_sync(
            lambda: self._find_bounded(prefix, deep=deep),
            limiter=self._listers,
            abandon_on_cancel=True,
        )
        return [one for one in found if one.name > start_after]

    async def move(self, name: str, target: str) -> None:
        source, path = f"{self._root}/{name}", f"{self._root}/{target}"
        await run_to_end(lambda: self._move(source, path), self._writers)

    async def delete(self, names: Sequence[str]) -> None:
        await run_to_end(lambda: self._remove(names), self._writers)

    async def close(self) -> None:
        """See `Objects.close`."""

    def _require_root(self) -> None:
        """Raise `TierUnmounted` if the root is another folder than before: one below a mount point.

        Writing there fills another disk, and what is missing there still exists.
        """
        path, before = self._root, self._root_status
        while True:
            try:
                found = os.stat(path)
                break
            except FileNotFoundError:
                path = os.path.dirname(path)
        if path == self._root:
            # A mount that comes back may have another device; its root has the same inode.
            same = before is None or before.st_ino == found.st_ino
            self._root_status = found if same else before
        else:
            # Somebody removed it, and it is made again, or the mount is gone that it was on.
            same = before is None or before.st_dev == found.st_dev
            self._root_status = None if same else before
        if not same:
            raise TierUnmounted(
                f"{self._root} is not the folder that it was; is it still mounted? Mount it again, "
                "or restart the sidecar to use the folder that is there",
                retryable=True,
            )

    def _put(self, path: str, image: Bytes, place: Callable[[str, str], None]) -> None:
        self._require_root()
        temporary = f"{path}.{secrets.token_hex(TEMPORARY_BYTES)}{TEMPORARY_SUFFIX}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = self._in_folder(temporary, lambda: os.open(temporary, flags, self._file_mode))
        try:
            with os.fdopen(fd, "wb", buffering=0):
                if self._root_status is None:
                    # It has just been made.
                    self._require_root()
                done = self._direct_io(fd, image, image.nbytes, lambda part: os.write(fd, part))
                rest = image.data[done:]
                while rest:
                    rest = rest[os.write(fd, rest) :]
                if self._fsync:
                    os.fsync(fd)
            place(temporary, path)
        finally:
            # After a rename there is nothing left under this name; after a link there is.
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        if self._fsync:
            _sync_folder(os.path.dirname(path))

    def _in_folder(self, path: str, work: Callable[[], T]) -> T:
        """Do `work`, which needs the folder of `path`."""
        # The folder is made only if it is missing: for the first segment of a chunk. Then again,
        # because a removal may take an empty folder away in between.
        for _ in range(MAKE_FOLDER_ATTEMPTS_MAX):
            with contextlib.suppress(FileNotFoundError):
                return work()
            with contextlib.suppress(FileNotFoundError):
                self._make_folders(os.path.dirname(path))
        return work()

    def _make_folders(self, path: str) -> None:
        try:
            self._make_folder(path)
        except FileNotFoundError:
            self._make_folders(os.path.dirname(path))
            with contextlib.suppress(FileExistsError):
                self._make_folder(path)
        except FileExistsError as error:
            if os.path.isdir(path) or not os.path.lexists(path):
                # It exists, or a removal has taken it away again, which the caller finds out.
                return
            # Not the name that is written: a file, or a dangling link, on the way to it.
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from error

    def _make_folder(self, path: str) -> None:
        os.mkdir(path, self._folder_mode)
        if self._fsync:
            _sync_folder(os.path.dirname(path))

    def _get(self, path: str, into: Bytes, seen: Seen | None) -> int:
        try:
            fd = _open_object(path)
        except FileNotFoundError:
            self._require_root()
            raise
        with os.fdopen(fd, "rb", buffering=0):
            size_bytes = os.fstat(fd).st_size
            check_size(size_bytes, into.nbytes)
            done = self._direct_io(fd, into, size_bytes, lambda part: os.readv(fd, [part]))
            if seen is not None and done:
                # Not in any cache, but this thread can hash it.
                seen(size_bytes, 0, done)
            step = size_bytes if seen is None else PIECE_BYTES
            while done < size_bytes:
                count = os.readv(fd, [into.data[done : min(done + step, size_bytes)]])
                if count == 0:
                    raise ImageTruncated(
                        f"it ended at {done} of {size_bytes} bytes while it was read; it will be "
                        "written again"
                    )
                if seen is not None:
                    seen(size_bytes, done, done + count)
                done += count
            return done

    def _direct_io(
        self, fd: int, memory: Bytes, size_bytes: int, transfer: Callable[[memoryview], int]
    ) -> int:
        """Transfer whole pages past the page cache; how many bytes that were."""
        aligned = memory.ctypes.data % DIRECT_ALIGNMENT == 0
        if not self.direct or not aligned or size_bytes < DIRECT_BYTES_MIN:
            return 0
        done, end = 0, size_bytes - size_bytes % DIRECT_ALIGNMENT
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            # A short transfer that is not whole pages ends it: the rest would not be aligned.
            while done < end and done % DIRECT_ALIGNMENT == 0:
                count = transfer(memory.data[done:end])
                if count == 0:
                    break
                done += count
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            self.direct = False
            _log.info("%s: no direct I/O here (%s); buffered instead", self._root, error.strerror)
        finally:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        return done

    def _find_bounded(self, folder: str, *, deep: bool) -> Listing:
        lower_priority()
        if not self._listings_left.acquire(blocking=False):
            raise TimeoutError(
                f"{LISTINGS_MAX} listings have not returned: is this a mount whose server is gone?"
            )
        try:
            return self._find(folder, deep=deep)
        finally:
            self._listings_left.release()

    def _find(self, folder: str, *, deep: bool) -> Listing:
        self._require_root()
        found: Listing = []
        damaged = 0
        pending = [folder]
        dead_before = time.time() - TEMPORARY_SECONDS_MAX
        while pending:
            inner = pending.pop()
            # Others write, move and remove while this listing runs; only the requested folder has
            # to exist.
            try:
                entries = os.scandir(f"{self._root}/{inner}" if inner else self._root)
            except OSError as error:
                if inner == folder or error.errno not in _GONE_OR_ODD:
                    raise
                self.entries_skipped += error.errno != errno.ENOENT
                continue
            with entries:
                for entry in entries:
                    name = f"{inner}/{entry.name}" if inner else entry.name
                    try:
                        if not entry.is_dir(follow_symlinks=False):
                            found.extend(self._found_file(entry, name, dead_before))
                        elif deep:
                            pending.append(name)
                        else:
                            found.append(Found(f"{name}/", 0, 0.0))
                    except OSError as error:
                        damaged += error.errno in _DAMAGED
                        of_entry = error.errno in (*_GONE_OR_ODD, errno.ESTALE, *_DAMAGED)
                        if not of_entry or damaged > DAMAGED_MAX:
                            raise
                        self.entries_skipped += error.errno not in (errno.ENOENT, errno.ESTALE)
        return found

    def _found_file(self, entry: os.DirEntry[str], name: str, dead_before: float) -> Listing:
        """The line of one file; none for a temporary one, which is removed when it is old."""
        status = entry.stat(follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode):
            self.entries_skipped += 1
        elif not entry.name.endswith(TEMPORARY_SUFFIX):
            return [Found(name, status.st_size, status.st_mtime)]
        elif status.st_mtime < dead_before and _TEMPORARY.fullmatch(entry.name):
            # Another user of a shared folder can make a part of it a link to any place: only what
            # this module named is removed.
            # A user who may only read the folder can still list it.
            with contextlib.suppress(OSError):
                os.unlink(entry.path)
        return []

    def _remove(self, names: Sequence[str]) -> None:
        self._require_root()
        folders: set[str] = set()
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self._root}/{name}")
            folders.add(os.path.dirname(name))
        # Object stores have no folders that could be left behind.
        for folder in sorted(folders, reverse=True):
            inner = folder
            with contextlib.suppress(OSError):
                while inner:
                    os.rmdir(f"{self._root}/{inner}")
                    inner = os.path.dirname(inner)

    def _move(self, path: str, target: str) -> None:
        self._require_root()
        # Its time becomes that of the move, as with a copy in a bucket. Objects of another user
        # keep theirs, and so do all on a mount that sets no times.
        with contextlib.suppress(OSError):
            os.utime(path, follow_symlinks=False)
        # Raises if there is nothing to move, before a folder is made for it.
        os.lstat(path)
        self._in_folder(target, lambda: os.replace(path, target))


def _sync_folder(path: str) -> None:
    """Flush the names in a folder to the disk."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _open_object(path: str) -> int:
    """Open a regular file to read, without waiting for the other end of a pipe.

    Raises `ObjectOdd`, `ObjectDenied`, and `OSError` if the entry is not the cause.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _NO_WAY_THERE and not os.path.islink(path):
            # A file or a link stands in the place of a folder: the object does not exist.
            raise FileNotFoundError(errno.ENOENT, os.strerror(error.errno), path) from error
        if error.errno == errno.ENOENT:
            raise
        # Raises again if the cause is the folder, and not this entry.
        mode = os.lstat(path).st_mode
        _require_regular(mode, path)
        if error.errno != errno.EACCES:
            raise
        raise ObjectDenied(
            f"this user must not read it (mode {stat.S_IMODE(mode):04o}); sidecars of several "
            "users need store.folder.shared and a common group"
        ) from error
    try:
        _require_regular(os.fstat(fd).st_mode, path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _require_regular(mode: int, path: str) -> None:
    if stat.S_ISREG(mode):
        return
    if stat.S_ISDIR(mode):
        # Object stores have no folders: no object has such a name.
        raise FileNotFoundError(errno.ENOENT, "it is a folder", path)
    kind = {"l": "a symbolic link", "p": "a pipe", "s": "a socket"}.get(stat.filemode(mode)[0])
    raise ObjectOdd(f"the name is that of {kind or 'a device'}, not of a regular file; it is moved")

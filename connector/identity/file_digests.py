"""Digests of whole weight files, each computed once per version of a file on a node.

Owns the reading of files of a hundred gigabytes, and the cache of their digests in the user's cache
folder. An entry's key is a stamp: path, device, inode, size and times of a file. A change of the
file changes one of these, and ctime cannot be set back. (In a file system image, squashfs or EROFS,
it is what the image says.) If the folder cannot be used, every process reads for itself. Files are
asked for by their stamps, so what is read is the version that was meant when the stamp was taken,
or nothing.

Invariants: of processes that start together one reads, and the others wait for it. A file that
changes before it was read has no digest. A file that was changed just now is not remembered,
because a second change within the same tick of the clock would not show.
"""

import fcntl
import hashlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Collection, Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Final

import msgspec

logger = logging.getLogger("vllm.kvlake")

THREADS: Final = min(8, os.cpu_count() or 1)
THREADS_BESIDE_ENGINE: Final = min(4, THREADS)
"""Threads that read while the engine computes."""
NICENESS_ADDED: Final = 10
"""To the niceness of such threads, so that they yield to the engine."""
PIECE_BYTES: Final = 2 * 1024 * 1024
"""Read and hashed at a time; between two pieces a thread can be stopped."""
AT_ONCE_BYTES_MAX: Final = 32 * 1024 * 1024
"""Files of this size in all are read without a thread of their own: that takes milliseconds."""
LONG_BYTES: Final = 4 * 1024**3
"""From this size on the log reports the beginning and the end."""
PROGRESS_SECONDS: Final = 10.0
SETTLED_SECONDS: Final = 2.0
WAIT_SECONDS_MIN: Final = 900.0
SLOW_BYTES_PER_SECOND: Final = 50e6
"""Another process that reads is waited for as long as this takes; then this one reads too."""
ENTRIES_KEPT_MAX: Final = 4096
_HexDigest = Annotated[str, msgspec.Meta(min_length=64, max_length=64)]
_NEVER: Final = threading.Event()


class ReadingStopped(Exception):
    """The reading was stopped before it was done."""


def known_digests(stamps: Collection[str]) -> dict[str, str] | None:
    """Hex sha256 by stamp, if that needs no long reading and no other process; else None.

    Raises `OSError` if a file cannot be read or changed since its stamp was taken.
    """
    folder = _cache_folder()
    known = {} if folder is None else _remembered(folder / "weights.json")
    missing = [stamp for stamp in stamps if stamp not in known]
    if not missing:
        return {stamp: known[stamp] for stamp in stamps}
    if size_bytes_of(missing) > AT_ONCE_BYTES_MAX:
        return None
    if folder is None:
        return read_all(stamps)
    with _alone(folder / "weights.lock", _NEVER, wait_seconds=0.0) as held:
        return _read_and_remember(folder, stamps) if held else None


def digests_of(
    stamps: Collection[str], stop: threading.Event = _NEVER, *, beside_engine: bool = False
) -> dict[str, str]:
    """Hex sha256 by stamp: remembered ones, those that another process reads now, or read here.

    `beside_engine`: with few threads, of a lower priority.

    Raises:
        OSError: a file cannot be read, or changed since its stamp was taken.
        ReadingStopped: `stop` was set.
    """
    folder = _cache_folder()
    if folder is None:
        return read_all(stamps, stop, beside_engine=beside_engine)
    known = _remembered(folder / "weights.json")
    if all(stamp in known for stamp in stamps):
        return {stamp: known[stamp] for stamp in stamps}
    # All ranks that read at once would slow each other, and the one that is nearly done.
    wait_seconds = max(WAIT_SECONDS_MIN, size_bytes_of(stamps) / SLOW_BYTES_PER_SECOND)
    with _alone(folder / "weights.lock", stop, wait_seconds=wait_seconds):
        return _read_and_remember(folder, stamps, stop, beside_engine=beside_engine)


def _read_and_remember(
    folder: Path,
    stamps: Collection[str],
    stop: threading.Event = _NEVER,
    *,
    beside_engine: bool = False,
) -> dict[str, str]:
    """The same, under the lock."""
    place = folder / "weights.json"
    known = _remembered(place)
    missing = [stamp for stamp in stamps if stamp not in known]
    began = time.time()
    known |= read_all(missing, stop, beside_engine=beside_engine) if missing else {}
    if any(stamps_settled([stamp], began) for stamp in missing):
        _remember(place, {one: known[one] for one in known if stamps_settled([one], began)})
    return {stamp: known[stamp] for stamp in stamps}


def read_all(
    stamps: Collection[str], stop: threading.Event = _NEVER, *, beside_engine: bool = False
) -> dict[str, str]:
    """As `digests_of`, but remembers nothing and waits for no other process."""
    level = logging.INFO if size_bytes_of(stamps) >= LONG_BYTES else logging.DEBUG
    size_gb = size_bytes_of(stamps) / 1e9
    logger.log(level, "kvlake: reading %.0f GB of weights for their digest", size_gb)
    began = time.monotonic()
    left, found, errors = deque(dict.fromkeys(stamps)), dict[str, str](), list[Exception]()

    def read() -> None:
        if beside_engine:
            _lower_priority()
        with suppress(IndexError):
            while not errors:
                stamp = left.popleft()
                try:
                    found[stamp] = file_digest(path_of(stamp), stamp, stop)
                except Exception as error:
                    errors.append(error)

    count = min(len(left), THREADS_BESIDE_ENGINE if beside_engine else THREADS)
    # Daemons, so that a process need not read to the end before it can exit.
    threads = [
        threading.Thread(target=read, name="kvlake-weights", daemon=True) for _ in range(count)
    ]
    for thread in threads:
        thread.start()
    reported = began
    for thread in threads:
        while thread.is_alive():
            thread.join(PROGRESS_SECONDS)
            if time.monotonic() - reported >= PROGRESS_SECONDS:
                reported = time.monotonic()
                unread = len(stamps) - len(found)
                logger.info("kvlake: %d of %d weight files are left to read", unread, len(stamps))
    if errors:
        raise errors[0]
    logger.log(level, "kvlake: the weights were read in %.0f s", time.monotonic() - began)
    return found


def _lower_priority() -> None:
    """Make the calling thread yield to the engine, for good: to take it back is a privilege."""
    thread = threading.get_native_id()
    # A sandbox may forbid it; then the engine yields more.
    with suppress(OSError):
        niceness = os.getpriority(os.PRIO_PROCESS, thread) + NICENESS_ADDED
        os.setpriority(os.PRIO_PROCESS, thread, niceness)


def file_digest(path: Path, stamp: str = "", stop: threading.Event = _NEVER) -> str:
    """Hex sha256 of the file.

    Raises:
        OSError: the file cannot be read, has another stamp than is given, or changes meanwhile.
        ReadingStopped: `stop` was set.
    """
    before = file_stamp(path)
    if stamp and before != stamp:
        raise OSError(f"{path} was changed before it was read")
    size_bytes = min(PIECE_BYTES, size_bytes_of([before]) + 1)
    hasher, piece = hashlib.sha256(), memoryview(bytearray(size_bytes))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            if stop.is_set():
                raise ReadingStopped
            hasher.update(piece[:count])
    if file_stamp(path) != before:
        raise OSError(f"{path} was changed while it was read")
    return hasher.hexdigest()


def file_stamp(path: Path) -> str:
    """A string that differs once the file was changed; raises `OSError`."""
    real = path.resolve(strict=True)
    # Opened, so that NFS asks the server for its current state.
    file = os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(file)
    finally:
        os.close(file)
    times = f"{status.st_mtime_ns}:{status.st_ctime_ns}"
    return f"{status.st_dev}:{status.st_ino}:{status.st_size}:{times}:{real}"


def path_of(stamp: str) -> Path:
    """The file of a stamp, without links."""
    return Path(stamp.split(":", 5)[5])


def size_bytes_of(stamps: Iterable[str]) -> int:
    """Bytes of the files in all."""
    return sum(int(stamp.split(":")[2]) for stamp in stamps)


def stamps_settled(stamps: Iterable[str], now: float) -> bool:
    """Whether a change of these files at `now` or later, by the clock, would show in a stamp."""
    return all(int(one.split(":")[4]) < (now - SETTLED_SECONDS) * 1e9 for one in stamps)


def _cache_folder() -> Path | None:
    """Where digests are remembered; None unless this user, and nobody else, may write there."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(base) / "kvlake"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError:
        return None
    own = status.st_uid == os.geteuid() and not status.st_mode & 0o022
    return folder if own and os.access(folder, os.W_OK) else None


def _remembered(place: Path) -> dict[str, str]:
    try:
        return msgspec.json.decode(place.read_bytes(), type=dict[str, _HexDigest])
    except (OSError, msgspec.MsgspecError):
        return {}


def _remember(place: Path, entries: dict[str, str]) -> None:
    """Replace the file by the latest entries; leave it as it is if that fails."""
    latest = dict(list(entries.items())[-ENTRIES_KEPT_MAX:])
    written = place.with_name(f"{place.name}.{os.getpid()}")
    with suppress(OSError):
        written.write_bytes(msgspec.json.encode(latest))
        written.replace(place)


@contextmanager
def _alone(path: Path, stop: threading.Event, *, wait_seconds: float) -> Generator[bool]:
    """Hold a lock against other processes of this user that read weights.

    Yields whether it is held after at most `wait_seconds`. If there can be no lock, it
    counts as held. Raises `ReadingStopped`.
    """
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        yield True
        return
    try:
        deadline = time.monotonic() + wait_seconds
        held = False
        while not held:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = True
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    break
                if stop.wait(0.05):
                    raise ReadingStopped from None
            except OSError:
                held = True
        yield held
    finally:
        os.close(lock)

"""Digests of whole weight files, each computed once per version of a file on a node.

Owns the reading of files that may have a hundred gigabytes, by a few threads, and the cache of
their digests in the user's cache folder. An entry's key is the path, device, inode, size and times
of a file. A change of the file changes one of these, and the time of the last change (ctime) cannot
be set back. If the folder cannot be used, every process reads for itself.

Invariants: of processes that start together one reads, and the others wait for it. A file that
changes while it is read has no digest. A file that was changed just now is not remembered, because
a second change within the same tick of the clock would not show.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence

logger = logging.getLogger("vllm.kvlake")

THREADS: Final = min(8, os.cpu_count() or 1)
READ_BYTES: Final = 4 * 1024 * 1024
LONG_BYTES: Final = 4 * 1024**3
"""From this size on the log reports progress."""
PROGRESS_SECONDS: Final = 10.0
SETTLED_SECONDS: Final = 2.0
WAIT_SECONDS_MAX: Final = 900.0
"""For another process that reads; then this one reads too."""
ENTRIES_KEPT_MAX: Final = 4096
_HEX_DIGITS: Final = 64


def digests_of(paths: Sequence[Path], *, remember: bool = True) -> list[str]:
    """Hex sha256 of each file; raises `OSError`.

    Without `remember` no other process is waited for, and the cache folder is not used.
    """
    folder = _cache_folder() if remember else None
    if folder is None:
        return _read_all(paths)
    stamps = [file_stamp(path) for path in paths]
    place = folder / "weights.json"
    known = _remembered(place)
    if any(stamp not in known for stamp in stamps):
        with _alone(folder / "weights.lock"):
            known = _remembered(place)
            missing = [
                path for path, stamp in zip(paths, stamps, strict=True) if stamp not in known
            ]
            began = time.time()
            found = dict(zip(missing, _read_all(missing), strict=True))
            settled = {
                file_stamp(path): digest
                for path, digest in found.items()
                if path.stat().st_ctime < began - SETTLED_SECONDS
            }
            if settled:
                _remember(place, known | settled)
        known |= {
            stamp: found[path] for path, stamp in zip(paths, stamps, strict=True) if path in found
        }
    return [known[stamp] for stamp in stamps]


def _read_all(paths: Sequence[Path]) -> list[str]:
    size_bytes = sum(path.stat().st_size for path in paths)
    with ThreadPoolExecutor(THREADS) as threads:
        if size_bytes < LONG_BYTES:
            return list(threads.map(file_digest, paths))
        began = time.monotonic()
        logger.info("kvlake: reading %.0f GB of weights to compute their digest", size_bytes / 1e9)
        reading = [threads.submit(file_digest, path) for path in paths]
        left = set(reading)
        while left:
            _, left = wait(left, timeout=PROGRESS_SECONDS)
            if left:
                logger.info("kvlake: %d of %d weight files are left to read", len(left), len(paths))
        digests = [future.result() for future in reading]
        logger.info("kvlake: the weights were read in %.0f s", time.monotonic() - began)
        return digests


def file_digest(path: Path) -> str:
    """SHA-256 of the file. Raises `OSError` if it changes while it is read."""
    before = file_stamp(path)
    hasher = hashlib.sha256()
    buffer = memoryview(bytearray(READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            hasher.update(buffer[:count])
    if file_stamp(path) != before:
        raise OSError(f"{path} was changed while it was read")
    return hasher.hexdigest()


def file_stamp(path: Path) -> str:
    """A string that differs once the file was changed."""
    real = path.resolve(strict=True)
    return _stamp(real, real.stat())


def opened_stamp(path: Path) -> str:
    """As `file_stamp`, but opens the file: then NFS asks the server for its current state."""
    real = path.resolve(strict=True)
    file = os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return _stamp(real, os.fstat(file))
    finally:
        os.close(file)


def stamps_settled(stamps: Iterable[str], now: float) -> bool:
    """Whether a change of these files at `now` or later, by the clock, would show in a stamp."""
    return all(int(one.split(":")[4]) < (now - SETTLED_SECONDS) * 1e9 for one in stamps)


def _stamp(real: Path, status: os.stat_result) -> str:
    times = f"{status.st_mtime_ns}:{status.st_ctime_ns}"
    return f"{status.st_dev}:{status.st_ino}:{status.st_size}:{times}:{real}"


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
        entries: Any = json.loads(place.read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(entries, dict):
        return {}
    return {
        stamp: digest
        for stamp, digest in entries.items()
        if isinstance(digest, str) and len(digest) == _HEX_DIGITS
    }


def _remember(place: Path, entries: dict[str, str]) -> None:
    """Replace the file by the latest entries; leave it as it is if that fails."""
    latest = dict(list(entries.items())[-ENTRIES_KEPT_MAX:])
    written = place.with_name(f"{place.name}.{os.getpid()}")
    with suppress(OSError):
        written.write_text(json.dumps(latest))
        written.replace(place)


@contextmanager
def _alone(path: Path) -> Generator[None]:
    """Hold a lock against other processes of this user that read weights, if it can be had."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        yield
        return
    try:
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while time.monotonic() < deadline:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:
                break
        yield
    finally:
        os.close(lock)

"""Digests of whole weight files, each computed once for a version of a file on a node.

Owns the reading of files that may have a hundred gigabytes, by a few threads, and what is
remembered of it in the user's cache folder: the digest of a file by its path, device, inode, size
and times. Whoever changes a file changes one of these, and cannot set the time of the last change
back. Where the folder cannot be used, nothing is remembered and every process reads for itself.

Invariants: of several processes that start together one reads, the others wait for it. A file that
changes while it is read has no digest. A file that was changed just now is not remembered, for a
further change within the same tick of the clock would not show.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence

logger = logging.getLogger("vllm.kvlake")

THREADS: Final = min(8, os.cpu_count() or 1)
READ_BYTES: Final = 4 * 1024 * 1024
LONG_BYTES: Final = 4 * 1024**3
"""From here on the log says that weights are read, and how far that is."""
TOLD_EVERY_SECONDS: Final = 10.0
SETTLED_SECONDS: Final = 2.0
WAIT_SECONDS_MAX: Final = 900.0
"""For another process that reads; then this one reads too."""
ENTRIES_KEPT_MAX: Final = 4096
_HEX_DIGITS: Final = 64


def digests_of(paths: Sequence[Path], *, remember: bool = True) -> list[str]:
    """Hex sha256 of each file; raises `OSError`.

    Without `remember` nobody is waited for, and nothing is taken from or left in the cache folder.
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
    if size_bytes < LONG_BYTES:
        with ThreadPoolExecutor(THREADS) as threads:
            return list(threads.map(file_digest, paths))
    began = told = time.monotonic()
    logger.info("kvlake: reading %.0f GB of weights once, to know them by", size_bytes / 1e9)
    with ThreadPoolExecutor(THREADS) as threads:
        reading = {threads.submit(file_digest, path): path for path in paths}
        left = set(reading)
        while left:
            _, left = wait(left, timeout=TOLD_EVERY_SECONDS, return_when=FIRST_COMPLETED)
            if left and time.monotonic() >= told + TOLD_EVERY_SECONDS:
                told = time.monotonic()
                logger.info("kvlake: %d of %d weight files are to be read", len(left), len(paths))
        digests = [future.result() for future in reading]
    logger.info("kvlake: the weights were read in %.0f s", time.monotonic() - began)
    return digests


def file_digest(path: Path) -> str:
    """SHA-256 of the file. Raises `OSError` where it changes while it is read."""
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
    """What is another where a file was changed."""
    real = path.resolve(strict=True)
    return _stamp(real, real.stat())


def opened_stamp(path: Path) -> str:
    """As `file_stamp`, of a file on a network too: opened, NFS asks the server for what it is."""
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
    numbers = (
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    )
    return ":".join((*map(str, numbers), str(real)))


def _cache_folder() -> Path | None:
    """Where digests are remembered; None where this user, and nobody else, may not write there."""
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
    """Replace what is remembered, the latest of it; or leave it where that fails."""
    latest = dict(list(entries.items())[-ENTRIES_KEPT_MAX:])
    written = place.with_name(f"{place.name}.{os.getpid()}")
    with suppress(OSError):
        written.write_text(json.dumps(latest))
        written.replace(place)


@contextmanager
def _alone(path: Path) -> Generator[None]:
    """While no other process of this user reads weights, as far as it can be had in time."""
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

"""Digests of whole weight files, each computed once per version of a file on a node.

Owns the reading of files of a hundred gigabytes, and the cache of their digests in the user's cache
folder. An entry's key is a stamp: path, device, inode, size and times of a file. A change of the
file changes one of these, and ctime cannot be set back. If the folder cannot be used, every process
reads for itself.

Invariants: of processes that start together one reads, and the others wait for it. A file that
changes while it is read has no digest. A file that was changed just now is not remembered, because
a second change within the same tick of the clock would not show.
"""

import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Collection, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Final

import msgspec

logger = logging.getLogger("vllm.kvlake")

THREADS: Final = min(8, os.cpu_count() or 1)
LONG_BYTES: Final = 4 * 1024**3
"""From this size on the log reports the beginning and the end."""
PROGRESS_SECONDS: Final = 10.0
SETTLED_SECONDS: Final = 2.0
WAIT_SECONDS_MAX: Final = 900.0
"""For another process that reads; then this one reads too."""
ENTRIES_KEPT_MAX: Final = 4096
_HexDigest = Annotated[str, msgspec.Meta(min_length=64, max_length=64)]


def digests_of(paths: Sequence[Path], *, remember: bool = True) -> list[str]:
    """Hex sha256 of each file; `remember`: use the cache folder, and wait for other processes."""
    folder = _cache_folder() if remember else None
    if folder is None:
        return _read_all(paths)
    stamps = [file_stamp(path) for path in paths]
    place = folder / "weights.json"
    known = _remembered(place)
    if any(stamp not in known for stamp in stamps):
        with _alone(folder / "weights.lock"):
            known = _remembered(place)
            missing = {
                stamp: path for path, stamp in zip(paths, stamps, strict=True) if stamp not in known
            }
            began = time.time()
            found = dict(zip(missing, _read_all([*missing.values()]), strict=True))
            known |= found
            if any(stamps_settled([stamp], began) for stamp in found):
                _remember(place, {one: known[one] for one in known if stamps_settled([one], began)})
    return [known[stamp] for stamp in stamps]


def _read_all(paths: Sequence[Path]) -> list[str]:
    size_bytes = sum(path.stat().st_size for path in paths)
    level = logging.INFO if size_bytes >= LONG_BYTES else logging.DEBUG
    logger.log(level, "kvlake: reading %.0f GB of weights for their digest", size_bytes / 1e9)
    began = time.monotonic()
    with ThreadPoolExecutor(THREADS) as threads:
        reading = [threads.submit(file_digest, path) for path in paths]
        left: Collection[Future[str]] = reading
        while left:
            _, left = wait(left, timeout=PROGRESS_SECONDS)
            if left:
                logger.info("kvlake: %d of %d weight files are left to read", len(left), len(paths))
    logger.log(level, "kvlake: the weights were read in %.0f s", time.monotonic() - began)
    return [future.result() for future in reading]


def file_digest(path: Path) -> str:
    """SHA-256 of the file. Raises `OSError` if it changes while it is read."""
    before = file_stamp(path)
    with path.open("rb", buffering=0) as file:
        digest = hashlib.file_digest(file, "sha256")
    if file_stamp(path) != before:
        raise OSError(f"{path} was changed while it was read")
    return digest.hexdigest()


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

"""What a start checks besides its directories: memory, descriptors, the disk.

Owns warnings about them: `kvlake serve` logs them, `kvlake doctor` shows them. Checking changes
nothing.
"""

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from sidecar.config.model import Config
from tiers.kv.memfd import memory_kind
from tiers.sizes import approximate_size

FILES_PER_SESSION: Final = 3
"""Descriptors of an attached client: attach connection, jobs connection, index."""
FILES_BASE: Final = 256
"""Other descriptors: HTTP and clients in their handshake, at most 64 each, and the rest."""


class Shortage(NamedTuple):
    """A resource that is too small for the configuration, and the remedy."""

    about: str
    found: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.about}: {self.found}; {self.remedy}"


def shortages(config: Config) -> list[Shortage]:
    """All resources of this machine that are too small. The sidecar starts all the same."""
    return [*_disk(config), *_memory(config), *_open_files(config)]


def allow_open_files() -> None:
    """Raise the soft limit of open files to the hard one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Some sandboxes forbid it.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _disk(config: Config) -> Iterator[Shortage]:
    directory = config.host.directory
    with contextlib.suppress(OSError):
        if memory_kind(directory) is None:
            yield Shortage(
                f"host.directory {directory}",
                "it is on a disk, not in a memory file system (tmpfs or ramfs, as statfs says): "
                "stores and loads are slow, the disk wears, and the file outlives a reboot, which "
                "loses what is in it",
                "choose one such as /dev/shm",
            )


def _memory(config: Config) -> Iterator[Shortage]:
    directory, size = config.host.directory, config.host.size
    try:
        if memory_kind(directory) != "tmpfs":
            return
        there = config.pool_path.stat().st_blocks * 512
    except FileNotFoundError:
        there = 0
    except OSError:
        return
    for room, where in (machine_room(), cgroup_room()):
        if room is not None and room < size - there:
            yield Shortage(
                f"host.size {approximate_size(size)}",
                f"it needs {approximate_size(size - there)} more memory, and {where} has "
                f"{approximate_size(room)} left",
                "lower host.size, or give it more: else the kernel ends processes for want of it",
            )


def machine_room(root: Path = Path("/")) -> tuple[int | None, str]:
    """Available memory of the machine in bytes (MemAvailable), and its name in messages."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024, "the machine"
    return None, ""


def cgroup_room(root: Path = Path("/")) -> tuple[int | None, str]:
    """The smallest room in bytes of this process' cgroups, and its name in messages.

    Reclaimable page cache counts as room. A cgroup without a limit does not count.
    """
    found: list[tuple[int, str]] = []
    for folder, (limit, usage, cache) in _cgroup_folders(root):
        # Without a limit the file says `max`.
        with contextlib.suppress(OSError, ValueError):
            room = int((folder / limit).read_text()) - int((folder / usage).read_text())
            stats = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            room = max(0, room + int(stats.get(cache, 0)))
            found.append((room, f"the cgroup {folder} (a limit of the container or the service)"))
    return min(found, default=(None, ""))


def _cgroup_folders(root: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Folders of the cgroups of this process and above, with the file names of their version."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, inner = line.split(":", 2)
        base = root / "sys/fs/cgroup"
        names = ("memory.max", "memory.current", "inactive_file")
        if "memory" in controllers.split(","):
            base /= "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        elif controllers:
            continue
        # In a container the path may be the one on the host, whose upper part is not mounted.
        place = base / inner.lstrip("/")
        for folder in (place, *place.parents):
            if folder.is_relative_to(base):
                yield folder, names


def _open_files(config: Config) -> Iterator[Shortage]:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    store = config.store
    needed = FILES_BASE + FILES_PER_SESSION * config.limits.sessions_max
    if store is not None:
        needed += store.reads_inflight_max + store.writes_inflight_max
    if most != resource.RLIM_INFINITY and most < needed:
        yield Shortage(
            "open files",
            f"the limit is {most}, and limits.sessions_max={config.limits.sessions_max} may need "
            f"{needed}",
            "raise it (ulimit -n, LimitNOFILE=), or lower limits.sessions_max",
        )

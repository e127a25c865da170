"""What a machine has too little of for a configuration: it starts all the same, and goes badly.

Owns looking and the sentences. `kvlake serve` logs them at its start, `kvlake doctor` shows them.
Does not own what keeps a sidecar from starting (the modules that then raise `StartError`).

Invariant: looking changes nothing.
"""

from __future__ import annotations

import contextlib
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tiers.pool.memory_fs import memory_kind
from tiers.sizes import approximate_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sidecar.config.model import Config

FILES_PER_SESSION: Final = 3
"""Descriptors of an attached client: its connections for attaching and for jobs, and an index."""
FILES_OF_ITS_OWN: Final = 256
"""What else is open: HTTP and clients that have not attached yet, at most 64 each, and the rest."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """What there is too little of, and what to do about it."""

    about: str
    found: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.about}: {self.found}; {self.remedy}"


def shortages(config: Config) -> list[Shortage]:
    """Everything that this machine has too little of."""
    return [*_disk(config), *_memory(config), *_open_files(config)]


def allow_open_files() -> None:
    """Let this process open as many files as it may allow itself."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Not everywhere may a process do so.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _disk(config: Config) -> Iterator[Shortage]:
    directory = config.host.directory
    with contextlib.suppress(OSError):
        if memory_kind(directory) is None:
            yield Shortage(
                f"host.directory {directory}",
                "it is on a disk, not in a memory file system (tmpfs or hugetlbfs, as statfs says):"
                " stores and loads are slow, the disk wears, and the file outlives a reboot, which "
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
    """Bytes that the machine can still give out (MemAvailable), and how to call them."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024, "the machine"
    return None, ""


def cgroup_room(root: Path = Path("/")) -> tuple[int | None, str]:
    """Bytes that the cgroups of this process can still have, and how to call them."""
    found = [
        (room, f"the cgroup {folder} (a limit of the container or the service)")
        for folder, names in _cgroup_folders(root)
        if (room := _left(folder, *names)) is not None
    ]
    return min(found, default=(None, ""), key=lambda one: one[0] or 0)


def _cgroup_folders(root: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Folders of the cgroups that hold this process, with the files of each."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mount = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, inner = line.split(":", 2)
        if controllers == "":
            base, names = mount, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = mount / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # In a container the path may be that of the host, of which only the end is shown.
        place = base / inner.lstrip("/")
        while True:
            yield place, names
            if place == base:
                break
            place = place.parent


def _left(folder: Path, limit: str, usage: str, cache: str) -> int | None:
    """What is left of a cgroup's limit, with the page cache that it would give back."""
    try:
        most = int((folder / limit).read_text())
        used = int((folder / usage).read_text())
        stats = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, most - used + int(stats.get(cache, 0)))
    except (OSError, ValueError):
        # No limit is the word `max`.
        return None


def _open_files(config: Config) -> Iterator[Shortage]:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    store = config.store
    needed = FILES_OF_ITS_OWN + FILES_PER_SESSION * config.limits.sessions_max
    if store is not None:
        needed += store.reads_inflight_max + store.writes_inflight_max
    if most != resource.RLIM_INFINITY and most < needed:
        yield Shortage(
            "open files",
            f"the limit is {most}, and limits.sessions_max={config.limits.sessions_max} may need "
            f"{needed}",
            "raise it (ulimit -n, LimitNOFILE=), or lower limits.sessions_max",
        )

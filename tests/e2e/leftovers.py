"""What processes have open and mapped, counted so that two moments can be compared.

Owns reading /proc and naming what is found: `counts_of` says how many of each kind a process has,
whatever their numbers and addresses. TCP connections are left out: a store's client keeps some.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from pathlib import Path
from typing import Final

SHARED_MEMORY: Final = Path("/dev/shm")
_VLLMS: Final = (f"{SHARED_MEMORY}/psm_", f"{SHARED_MEMORY}/sem.")
_MEMFD: Final = re.compile(r"/memfd:(\S+)")
_UUID: Final = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_RANDOM: Final = re.compile(rf"{_UUID}|[0-9a-f]{{6,}}|[0-9]+")
_NUMBER: Final = re.compile(r"\[?\d+\]?")


def counts_of(pid: int) -> Counter[str]:
    """Open files and mappings of a process, by kind."""
    tcp = _tcp_sockets(pid)
    found: Counter[str] = Counter()
    for link in _links(pid):
        if link.startswith("socket:"):
            found["socket"] += link not in tcp
        elif memfd := _MEMFD.match(link):
            found[f"open {memfd[1]}"] += 1
        elif link.startswith("/"):
            found[f"open {_kind_of_path(link)}"] += 1
        else:
            found[_NUMBER.sub("", link).rstrip(":")] += 1
    for inode, name in mappings_of(pid):
        del inode
        found[f"mapped {name}"] += 1
    return +found


def mappings_of(pid: int) -> set[tuple[int, str]]:
    """Inode and name of every memfd and every file of shared memory that a process has mapped."""
    found: set[tuple[int, str]] = set()
    with contextlib.suppress(OSError):
        for line in (Path("/proc") / str(pid) / "maps").read_text().splitlines():
            _, _, _, _, inode, *path = line.split(maxsplit=5)
            if not path:
                continue
            if memfd := _MEMFD.match(path[0]):
                found.add((int(inode), memfd[1]))
            elif path[0].startswith(f"{SHARED_MEMORY}/"):
                found.add((int(inode), _kind_of_path(path[0])))
    return found


def shared_memory_of(pids: set[int]) -> set[Path]:
    """Files of /dev/shm that vLLM made for messages between these processes."""
    found: set[Path] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in (Path("/proc") / str(pid) / "maps").read_text().splitlines():
                path = line.split(maxsplit=5)[-1]
                if path.startswith(_VLLMS):
                    found.add(Path(path.removesuffix(" (deleted)")))
    return found


def group_of(leader: int) -> set[int]:
    """Processes of a process group."""
    found: set[int] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getpgid(int(process.name)) == leader:
                found.add(int(process.name))
    return found


def called(pids: set[int], name: str) -> int:
    """The one process of these whose command line begins with `name`."""
    found = [pid for pid in pids if _command(pid).startswith(name)]
    assert len(found) == 1, f"{name}: {found} of {sorted(pids)}"
    return found[0]


def alive(pid: int) -> bool:
    """Whether a process runs; one that waits for its parent does not."""
    with contextlib.suppress(OSError):
        state = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
        return state not in ("Z", "X")
    return False


def more_than(now: Counter[str], before: Counter[str]) -> list[str]:
    """What there is more of than before, in words."""
    return [f"{count} × {kind}" for kind, count in sorted((now - before).items())]


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return (Path("/proc") / str(pid) / "cmdline").read_text().replace("\0", " ").strip()
    return ""


def _links(pid: int) -> list[str]:
    links: list[str] = []
    for path in (Path("/proc") / str(pid) / "fd").iterdir():
        # Some are closed while they are looked at.
        with contextlib.suppress(OSError):
            links.append(str(path.readlink()))
    return links


def _tcp_sockets(pid: int) -> set[str]:
    found: set[str] = set()
    for name in ("tcp", "tcp6"):
        lines = (Path("/proc") / str(pid) / "net" / name).read_text().splitlines()[1:]
        found.update(f"socket:[{line.split()[9]}]" for line in lines)
    return found


def _kind_of_path(path: str) -> str:
    """A file's name without what differs between two runs of one program."""
    name = path.removesuffix(" (deleted)").rpartition("/")[2]
    if path.startswith(_VLLMS):
        return name[:4]
    return _RANDOM.sub("*", name)

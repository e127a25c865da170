"""What the kernel says of this process's mappings and descriptors.

Earlier tests of this process may have left mappings that Python collects at any time. Compare by
inode where a count or a sum must be exact.
"""

from __future__ import annotations

import os
import re
from pathlib import Path


def sizes_of(name: str) -> dict[int, int]:
    """The bytes that are mapped of each file whose path has `name` in it, by the file's inode."""
    found: dict[int, int] = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        match = re.match(r"(\w+)-(\w+) \S+ \S+ \S+ (\d+) +(.*)", line)
        if match and name in match[4]:
            inode = int(match[3])
            found[inode] = found.get(inode, 0) + int(match[2], 16) - int(match[1], 16)
    return found


def flags_of(name: str, inode: int | None = None) -> list[list[str]]:
    """The kernel's flags (`VmFlags`) of each mapping of a file whose path has `name` in it.

    With `inode`, of that file only.
    """
    found: list[list[str]] = []
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith("VmFlags:"):
            if inside:
                found.append(line.split()[1:])
        elif "-" in line.split(" ", 1)[0]:
            inside = name in line and inode in (None, int(line.split()[4]))
    return found


def huge_bytes_of(name: str, inode: int) -> int:
    """The bytes of a file that this process has mapped in huge pages (`ShmemPmdMapped`)."""
    total = 0
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith("ShmemPmdMapped:"):
            total += 1024 * int(line.split()[1]) if inside else 0
        elif "-" in line.split(" ", 1)[0]:
            inside = name in line and int(line.split()[4]) == inode
    return total


def open_fds() -> int:
    """Descriptors that this process has open."""
    return len(os.listdir("/proc/self/fd"))

"""What the kernel says of this process's mappings and descriptors.

Earlier tests of this process may have left mappings that Python collects at any time. Compare by
inode where a count or a sum must be exact.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
from pathlib import Path

import pytest


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


def policy_at(address: int) -> tuple[int, int]:
    """The NUMA policy of an address, as the kernel has it: its mode and the nodes as bits."""
    mode, nodes = ctypes.c_int(-1), ctypes.c_ulong(0)
    libc = ctypes.CDLL(None, use_errno=True)
    get_policy = {"x86_64": 239, "aarch64": 236}[platform.machine()]
    # The policy at an address, not the thread's own.
    flags, bits = ctypes.c_ulong(2), ctypes.c_ulong(64)
    page = ctypes.c_ulong(address)
    if libc.syscall(get_policy, ctypes.byref(mode), ctypes.byref(nodes), bits, page, flags):
        pytest.skip(f"this kernel or container tells no policy: {os.strerror(ctypes.get_errno())}")
    return mode.value, nodes.value

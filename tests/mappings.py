"""What the kernel says of this process's mappings."""

from __future__ import annotations

from pathlib import Path


def flags_of(name: str) -> list[list[str]]:
    """The kernel's flags (`VmFlags`) of each mapping of a file whose path has `name` in it."""
    found: list[list[str]] = []
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith("VmFlags:"):
            if inside:
                found.append(line.split()[1:])
        elif "-" in line.split(" ", 1)[0]:
            inside = name in line
    return found

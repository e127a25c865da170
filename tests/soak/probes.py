"""What a soak looks at: the processes, shared memory, the sidecar's status, the machine's speed.

Owns reading them. Does not own when, nor what the numbers mean (`verdicts.py`). Invariant: a
process that ends, or a sidecar that does not answer, is a gap in the samples and never an error.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np

PROC: Final = Path("/proc")
CALIBRATION_BYTES: Final = 16 << 20

Sample = dict[str, float]


def processes_of(session: int) -> list[int]:
    """Every process of a session: an engine with all that it started."""
    found: list[int] = []
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session:
                    found.append(int(entry.name))
    return found


def process_sample(pids: list[int], prefix: str) -> Sample:
    """Memory, descriptors, sockets, mappings, threads and zombies of some processes together."""
    total: Sample = {}
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, KeyError):
            for name, value in _one_process(PROC / str(pid)).items():
                key = f"{prefix}.{name}"
                total[key] = total.get(key, 0) + value
    return total


def _one_process(folder: Path) -> Sample:
    status = _fields(folder / "status")
    if (folder / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
        return {"zombies": 1}
    links = [os.readlink(entry) for entry in _entries(folder / "fd")]
    return {
        "rss_bytes": status["VmRSS"] * 1024,
        "anonymous_bytes": status["RssAnon"] * 1024,
        "shared_bytes": status["RssShmem"] * 1024,
        "threads": status["Threads"],
        "descriptors": len(links),
        "sockets": sum(link.startswith("socket:") for link in links),
        "mappings": (folder / "maps").read_text().count("\n"),
        "zombies": 0,
    }


def _entries(folder: Path) -> list[Path]:
    found: list[Path] = []
    for entry in folder.iterdir():
        with contextlib.suppress(OSError):
            os.readlink(entry)
            found.append(entry)
    return found


def _fields(path: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    for line in path.read_text().splitlines():
        name, _, rest = line.partition(":")
        first = rest.split()[:1]
        if first and first[0].isdigit():
            found[name] = int(first[0])
    return found


def shared_memory_sample(paths: Iterable[Path]) -> Sample:
    """How many files there are in shared memory, and the memory that they take."""
    sizes: list[int] = []
    for path in paths:
        with contextlib.suppress(OSError):
            sizes.append(path.stat().st_blocks * 512)
    return {"shm.files": len(sizes), "shm.bytes": sum(sizes)}


def status_sample(ask: Callable[[], dict[str, Any]]) -> Sample:
    """Slots, leases, lookups, queues and counters, as the sidecar tells them."""
    try:
        status = ask()
    except (OSError, http.client.HTTPException, ValueError):
        return {}
    host = status["tiers"]["host"]
    sample: Sample = {
        "slots.used": sum(one["slots_used"] for one in host["classes"]),
        "slots.free": sum(one["slots_free"] for one in host["classes"]),
        "chunks.host": host["chunks"],
        "chunks.store": (status["tiers"]["store"] or {}).get("chunks", 0),
        "leases": status["leases"],
        "lookups": status["lookups"],
        "sessions": len(status["sessions"]),
        "sidecar.tasks": status["tasks"],
    }
    for name, value in status["pending"].items():
        if isinstance(value, int | float):
            sample[f"pending.{name}"] = value
    for name, value in status["counters"].items():
        sample[f"counter.{name}"] = value
    return sample


class Calibration:
    """A fixed piece of work, timed: how fast the machine is now, whatever kvlake does."""

    def __init__(self) -> None:
        self._from = np.ones(CALIBRATION_BYTES, dtype=np.uint8)
        self._to = np.zeros(CALIBRATION_BYTES, dtype=np.uint8)

    def sample(self) -> Sample:
        """CPU seconds, not wall: what shares the cores takes turns, and is not what is asked."""
        started = time.thread_time()
        np.copyto(self._to, self._from)
        total = 0
        for number in range(60_000):
            total += number
        return {"calibration_seconds": time.thread_time() - started}

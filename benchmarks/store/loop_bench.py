"""How late the event loop of a real sidecar runs a task while it reads from the store at full rate.

A worker stores chunks of 4 MiB, which the sidecar writes; then a scheduler asks for one run of
them after the other. Host memory holds fewer than there are, so every one is read again: from a
server that costs next to nothing, as fast as the sidecar can. Lags are those of a task in its own
loop that wants to run every millisecond, of the time in which reads were running, and, for
comparison, of as long a time in which nothing was asked. On a machine that others use the lag is
mostly theirs. So `control` is that of a process that does nothing, in the same time, and the lag is
taken apart: `computing` is what the loop's own thread computed between two turns, `no_core` how
long it was ready and other threads and processes had the cores, and `lock` the rest: its wait for
Python's lock, which worker threads hold, some of them without a core. `--without-figures`
keeps nothing for operators that the settings can leave out. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from benchmarks.store.plain_server import plain_server
from sidecar.protocol import Outcome, Release
from tests.harness.sidecars import SidecarProcess
from tests.sidecar.client import BLOCK_TOKENS, BLOCKS_PER_CHUNK, Scheduler, Worker, key_of
from tiers.kv.layout import KVLayout, Segment

if TYPE_CHECKING:
    from collections.abc import Generator

LAYERS, HEADS, CONTENT_BYTES = 8, 8, 1024
CHUNKS: Final = 96
RUN: Final = 24
HOST_SIZE: Final = "224MiB"
"""Two runs of 24 chunks of 4 MiB, and a little."""
LOOKUP_MS: Final = 20_000
LAG_MS_MAX: Final = 5.0

FIGURES: Final = (
    "gone_keys_max",
    "prompts_kept",
    "transfers_kept",
    "curve_keys_max",
    "history_seconds",
)
"""Limits of what is kept for operators alone; 0 keeps nothing."""

Lags = npt.NDArray[np.float64]


def layout_of(num_blocks: int) -> KVLayout:
    """Blocks of 1 MiB."""
    head = CONTENT_BYTES * BLOCK_TOKENS
    block = head * HEADS
    layer = block * num_blocks
    return KVLayout(
        segment=Segment(0, LAYERS, 0, HEADS),
        num_blocks=num_blocks,
        block_tokens=BLOCK_TOKENS,
        content_bytes=CONTENT_BYTES,
        dtype="float16",
        encoding="plain",
        size_bytes=layer * LAYERS,
        layer_offsets_bytes=tuple(layer * number for number in range(LAYERS)),
        block_stride_bytes=block,
        head_stride_bytes=head,
        token_stride_bytes=CONTENT_BYTES,
    )


def fill_store(sidecar: SidecarProcess, keys: list[bytes]) -> None:
    """Store every chunk, one after the other, and see it written."""
    layout = layout_of(BLOCKS_PER_CHUNK)
    with Worker(Path(sidecar.socket), layout=layout) as worker:
        rng = np.random.default_rng(1)
        for number, key in enumerate(keys, start=1):
            worker.memory[:] = rng.integers(0, 256, worker.memory.nbytes, dtype=np.uint8)
            outcome = worker.store(number, key, range(BLOCKS_PER_CHUNK))
            assert outcome is Outcome.OK, outcome
            # One at a time: host memory does not hold all of them until they are written.
            _wait_written(sidecar, number)


def _wait_written(sidecar: SidecarProcess, count: int) -> None:
    def written(status: dict[str, Any]) -> bool:
        return bool(status["counters"]["chunks_written"] >= count)

    sidecar.wait("the chunk is written", written)


def measure(sidecar: SidecarProcess, keys: list[bytes], seconds: float) -> dict[str, Any]:
    """Read run after run for so long; when, how many bytes, and at what cost."""
    assert sidecar.process is not None
    pid = sidecar.process.pid
    runs = [keys[first : first + RUN] for first in range(0, len(keys), RUN)]
    layout = layout_of(BLOCKS_PER_CHUNK)
    with (
        # A worker is what tells the geometry of the chunks.
        Worker(Path(sidecar.socket), layout=layout),
        Scheduler(Path(sidecar.socket)) as scheduler,
    ):
        sidecar.wait("the store is listed", lambda now: now["tiers"]["store"]["chunks"] >= CHUNKS)
        idle_from = time.monotonic()
        time.sleep(seconds)
        before = sidecar.status()["tiers"]["store"]["verbs"]["read"]["num_bytes"]
        cpu, start, number = _cpu_seconds(pid), time.monotonic(), 0
        while time.monotonic() < start + seconds:
            number += 1
            ready = scheduler.lookup(number, runs[number % len(runs)], LOOKUP_MS).ready
            assert ready == RUN, f"{ready} of {RUN} chunks came"
            scheduler.send(Release(scheduler.epoch, [], [number]))
        end = time.monotonic()
        cpu = _cpu_seconds(pid) - cpu
        read = sidecar.status()["tiers"]["store"]["verbs"]["read"]["num_bytes"] - before
    return {"idle": idle_from, "start": start, "end": end, "bytes": read, "cpu": cpu}


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _percentiles(lags: Lags) -> dict[str, float]:
    p50, p99 = np.percentile(1000 * lags, [50, 99])
    return {
        "p50_ms": round(float(p50), 3),
        "p99_ms": round(float(p99), 3),
        "max_ms": round(float(1000 * lags.max()), 3),
    }


@contextlib.contextmanager
def control_loop(path: Path) -> Generator[None]:
    """A process that watches a loop in which nothing else runs; what it saw is there in the end."""
    words = [sys.executable, "-m", "benchmarks.store.watched_sidecar", str(path)]
    with subprocess.Popen(words) as process:
        try:
            yield
        finally:
            # `Popen` waits for its end.
            process.terminate()


def _between(path: Path, first: float, last: float) -> dict[str, Lags]:
    """What was noted in that time, by name."""
    moments, late, computing, no_core = np.fromfile(path).reshape(-1, 4).T
    then = (moments >= first) & (moments <= last)
    lock = np.maximum(0.0, late - computing - no_core)
    parts = {"lag": late, "computing": computing, "no_core": no_core, "lock": lock}
    return {name: part[then] for name, part in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--without-figures", action="store_true")
    options = parser.parse_args()
    without = dict.fromkeys(FIGURES, 0) if options.without_figures else {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(plain_server())
        keys = [key_of("loop", number) for number in range(CHUNKS)]
        config = {
            "host": {"size": HOST_SIZE},
            "limits": {"lookup_wait": "20s", **without},
            "store": {"url": server.url, "refresh_seconds": "1s", **server.settings},
        }
        lags = folder / "lags"
        program = ("-m", "benchmarks.store.watched_sidecar", str(lags))
        with (
            control_loop(folder / "control"),
            SidecarProcess(folder / "side", config, program=program) as sidecar,
        ):
            fill_store(sidecar, keys)
            found = measure(sidecar, keys, options.seconds)
        reading = _between(folder / "lags", found["start"], found["end"])
        idle = _between(folder / "lags", found["idle"], found["start"])
        control = _between(folder / "control", found["start"], found["end"])
    gigabytes, seconds = found["bytes"] / 1e9, found["end"] - found["start"]
    report: dict[str, Any] = {
        "gb_per_second": round(gigabytes / seconds, 3),
        "sidecar_cpu_seconds_per_gb": round(found["cpu"] / gigabytes, 3),
        "reading": {name: _percentiles(parts) for name, parts in reading.items()},
        "idle": {name: _percentiles(parts) for name, parts in idle.items()},
        "control": {name: _percentiles(parts) for name, parts in control.items()},
    }
    told = {
        f"reading.{name}.p99_ms <= {LAG_MS_MAX}": report["reading"][name]["p99_ms"] <= LAG_MS_MAX
        for name in ("lag", "computing", "lock")
    }
    print(json.dumps({**report, "holds": told}))


if __name__ == "__main__":
    main()

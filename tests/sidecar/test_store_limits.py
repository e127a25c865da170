"""What two sidecars leave in a real bucket while they write at full rate, and after they stop.

The server stops for longer than the deadline of a write. It may still carry the write out
afterwards, and then no catalog has the object.

A client of its own lists the bucket. docs/how-to/object-stores.md has the bound: twice the sum of
the limit and what the two have not heard of. How much that is depends on the machine, so a
namespace may take four times the limit here. If writes never stopped, it would take far more.
`test_config.py` shows where exactly writes stop.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.harness.sidecars import SidecarProcess
from tests.sidecar import altered
from tests.sidecar.bucketwatch import BucketWatch, Held
from tests.sidecar.client import WAIT_SECONDS_MAX
from tests.sidecar.fullrate import FullRate

if TYPE_CHECKING:
    from tests.harness.servers import S3Server

CONTENT_BYTES = 256
CHUNK_BYTES = 200_000
"""At least what an object of a chunk takes."""
SIZE_MAX = 32 << 20
OBJECTS_MAX = SIZE_MAX // CHUNK_BYTES
UNHEARD = 1
"""What each of the two writes before it hears of the other comes on top: with these settings a
fifth of a second's worth, of a limit that takes them seconds to fill. A machine may pause, so it
may be as much as the limit here."""
DEADLINE_SECONDS = 2.0
QUICK: dict[str, Any] = {
    "refresh_seconds": 0.1,
    "catalog_flush": 0.1,
    "deadline_seconds_max": DEADLINE_SECONDS,
    "gc": {"every": 1.0, "grace": DEADLINE_SECONDS + 0.2},
    "reconcile_every": 10.0,
}
SOON = {"YOUNG_SECONDS": 2 * DEADLINE_SECONDS}
"""What no catalog has is found this soon, in place of ten minutes."""

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_sidecars")]


@dataclass
class Pair:
    """Two sidecars on one bucket."""

    server: S3Server
    sidecars: tuple[SidecarProcess, SidecarProcess]
    watch: BucketWatch

    def total(self, name: str) -> int:
        """A counter of rounds of collection, of both."""
        told = [one.status()["tiers"]["store"]["collection"] for one in self.sidecars]
        return sum(int(one[name]) for one in told)

    def counted(self, name: str) -> int:
        """A counter of the engines, of both."""
        return sum(int(one.status()["counters"][name]) for one in self.sidecars)

    def stop_server(self, seconds: float) -> None:
        """Nothing is answered for this long."""
        os.kill(self.server.pid, signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            os.kill(self.server.pid, signal.SIGCONT)

    def wait(self, what: str, true: Callable[[], bool], seconds: float = WAIT_SECONDS_MAX) -> None:
        """Wait for a state of both, or of the bucket."""
        until = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < until, f"{what}: {self.watch.seen[-1]}"
            time.sleep(0.05)


@contextlib.contextmanager
def pair(
    folder: Path,
    server: S3Server,
    prefix: str,
    monkeypatch: pytest.MonkeyPatch,
    store: dict[str, Any],
    constants: dict[str, float],
) -> Generator[Pair]:
    """Two sidecars on one prefix, watched."""
    monkeypatch.setenv(altered.CONSTANTS, json.dumps(constants))
    settings = {"url": f"{server.url}/{prefix}", **server.settings, **QUICK, **store}
    config = {"store": settings, "host": {"size": "16MiB"}}
    one, two = (
        SidecarProcess(folder / name, config, program=("-m", altered.MODULE))
        for name in ("one", "two")
    )
    with one, two, BucketWatch(server, prefix) as watch:
        yield Pair(server, (one, two), watch)


def limited(held: Held, limit: str) -> int:
    """What this limit counts of the chunks."""
    return (held.size_bytes if limit == "size_max" else held.objects)["chunk"]


def written_in_rounds(pair: Pair, rounds: int, seconds: float = WAIT_SECONDS_MAX) -> None:
    """Write at full rate until objects were deleted in this many rounds, one after the other."""
    with contextlib.ExitStack() as stack:
        for one in pair.sidecars:
            stack.enter_context(FullRate(Path(one.socket), one.name, CONTENT_BYTES))
        pair.wait("a first write", lambda: pair.counted("bytes_written") > 0)
        pair.stop_server(1.5 * DEADLINE_SECONDS)
        for _ in range(rounds):
            before = pair.total("deleted")
            pair.wait("a round that deletes", lambda: pair.total("deleted") > before, seconds)  # noqa: B023


@pytest.mark.promise("bucket-bounds", "store-ttl")
@pytest.mark.parametrize(
    ("limit", "value", "chunk", "rounds"),
    [
        pytest.param("size_max", SIZE_MAX, CHUNK_BYTES, 2, id="bytes"),
        pytest.param("objects_max", OBJECTS_MAX, 1, 12, id="objects", marks=pytest.mark.nightly),
        pytest.param(
            "size_max", SIZE_MAX, CHUNK_BYTES, 12, id="bytes-long", marks=pytest.mark.nightly
        ),
    ],
)
def test_two_writers_at_full_rate_stay_within_four_times_the_limit_and_a_ttl_empties_the_bucket(
    short_directory: Path,
    seaweed: S3Server,
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
    value: int,
    chunk: int,
    rounds: int,
) -> None:
    prefix = short_directory.name
    with pair(short_directory, seaweed, prefix, monkeypatch, {limit: value}, SOON) as both:
        written_in_rounds(both, rounds, rounds * WAIT_SECONDS_MAX)
        most = both.watch.most("chunk")
        assert limited(most, limit) <= 2 * (1 + UNHEARD) * value, most
        assert both.counted("writes_refused_bound"), "they write no faster than is collected"
        assert both.counted("writes_expired"), "the server answered each write in time"
        print(both.watch.seen[-1], most, both.counted("bytes_written"))

        # Nothing is written any more: what is beyond the limit goes, and nothing else.
        def settled() -> bool:
            return value - chunk <= limited(both.watch.seen[-1], limit) <= value

        both.wait("back to the limit", settled)
    short = SOON | {"KEEP_SECONDS_MIN": 1.0, "ABANDONED_SECONDS": 2.0}
    with pair(short_directory, seaweed, prefix, monkeypatch, {"ttl": 1.0}, short) as both:

        def emptied() -> bool:
            objects = both.watch.seen[-1].objects
            return bool(objects["manifest"]) and not set(+objects) - {"manifest", "lease", "about"}

        both.wait("an empty bucket", emptied)
        left = both.watch.seen[-1]
        both.wait(
            "the last manifests and leases",
            lambda: (
                both.watch.seen[-1].objects["manifest"] == 3
                and both.watch.seen[-1].objects["lease"] <= 5
            ),
        )
        assert left.size_bytes["manifest"] < 10_000

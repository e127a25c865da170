"""What two sidecars leave in a real bucket while they write at full rate, and after they stop.

A client of its own lists the bucket. The bounds that are asserted here are those of
docs/how-to/object-stores.md.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.harness.sidecars import SidecarProcess
from tests.sidecar import altered
from tests.sidecar.bucketwatch import BucketWatch
from tests.sidecar.client import WAIT_SECONDS_MAX
from tests.sidecar.fullrate import FullRate

if TYPE_CHECKING:
    from tests.harness.servers import S3Server

CONTENT_BYTES = 256
CHUNK_BYTES = 200_000
"""At least what an object of a chunk takes."""
SIZE_MAX = 32 << 20
OBJECTS_MAX = SIZE_MAX // CHUNK_BYTES
SLACK = 2
"""What each of the two writes before it hears of the other comes on top: with these settings a
fifth of a second's worth, of a bound that takes them seconds to fill. A machine may pause."""
QUICK: dict[str, Any] = {
    "refresh_seconds": 0.1,
    "catalog_flush": 0.1,
    "deadline_seconds_max": 2.0,
    "gc": {"every": 1.0, "grace": 2.2},
}

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_sidecars")]


@dataclass
class Pair:
    """Two sidecars on one bucket."""

    sidecars: tuple[SidecarProcess, SidecarProcess]
    watch: BucketWatch

    def total(self, name: str) -> int:
        """A counter of rounds of collection, of both."""
        told = [one.status()["tiers"]["store"]["collection"] for one in self.sidecars]
        return sum(int(one[name]) for one in told)

    def counted(self, name: str) -> int:
        """A counter of the engines, of both."""
        return sum(int(one.status()["counters"][name]) for one in self.sidecars)

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
    constants: dict[str, float] | None = None,
) -> Generator[Pair]:
    """Two sidecars on one prefix, watched."""
    monkeypatch.setenv(altered.CONSTANTS, json.dumps(constants or {}))
    settings = {"url": f"{server.url}/{prefix}", **server.settings, **QUICK, **store}
    config = {"store": settings, "host": {"size": "16MiB"}}
    one, two = (
        SidecarProcess(folder / name, config, program=("-m", altered.MODULE))
        for name in ("one", "two")
    )
    with one, two, BucketWatch(server, prefix) as watch:
        yield Pair((one, two), watch)


def written_in_rounds(pair: Pair, rounds: int, seconds: float = WAIT_SECONDS_MAX) -> None:
    """Write at full rate until objects were deleted in this many rounds, one after the other."""
    with contextlib.ExitStack() as stack:
        for one in pair.sidecars:
            stack.enter_context(FullRate(Path(one.socket), one.name, CONTENT_BYTES))
        for _ in range(rounds):
            before = pair.total("deleted")
            pair.wait("a round that deletes", lambda: pair.total("deleted") > before, seconds)  # noqa: B023


@pytest.mark.promise("bucket-bounds", "store-ttl")
@pytest.mark.parametrize(
    ("limit", "rounds"),
    [
        pytest.param({"size_max": SIZE_MAX}, 2, id="bytes"),
        pytest.param({"objects_max": OBJECTS_MAX}, 12, id="objects", marks=pytest.mark.nightly),
        pytest.param({"size_max": SIZE_MAX}, 12, id="bytes-long", marks=pytest.mark.nightly),
    ],
)
def test_two_writers_at_full_rate_stay_within_twice_the_bound_and_a_ttl_empties_the_bucket(
    short_directory: Path,
    seaweed: S3Server,
    monkeypatch: pytest.MonkeyPatch,
    limit: dict[str, int],
    rounds: int,
) -> None:
    prefix = short_directory.name
    with pair(short_directory, seaweed, prefix, monkeypatch, {**limit}) as both:
        written_in_rounds(both, rounds, rounds * WAIT_SECONDS_MAX)
        most = both.watch.most("chunk")
        assert most.size_bytes["chunk"] <= 2 * SLACK * SIZE_MAX, most
        assert most.objects["chunk"] <= 2 * SLACK * limit.get("objects_max", most.objects["chunk"])
        assert both.counted("writes_refused_bound"), "they write no faster than is collected"
        print(both.watch.seen[-1], most, both.counted("bytes_written"))
        # Nothing is written any more: what is beyond the bound goes, and nothing else.
        least = SIZE_MAX - CHUNK_BYTES if "size_max" in limit else 0

        def settled() -> bool:
            held = both.watch.seen[-1]
            size_bytes, objects = held.size_bytes["chunk"], held.objects["chunk"]
            within = size_bytes <= limit.get("size_max", size_bytes)
            within &= objects <= limit.get("objects_max", objects)
            return within and size_bytes >= least

        both.wait("back to the bound", settled)
    short = {"KEEP_SECONDS_MIN": 1.0, "ABANDONED_SECONDS": 2.0}
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

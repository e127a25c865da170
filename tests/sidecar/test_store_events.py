"""What leaves the object store, in the stream of KV events of sidecars that run: of those that had
it listed alone, and of those that have it in host memory as well."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from sidecar.events.records import name_of
from sidecar.protocol import Outcome
from tests.sidecar.client import RunningSidecar, Scheduler, Worker, config_in, key_of
from tests.sidecar.configurations import with_events
from tests.sidecar.subscriber import Subscriber
from tiers.catalog.names import parse_name

KEYS = [key_of("of the store", number) for number in range(5)]
NAMES = {name_of(key) for key in KEYS}


def store_in(folder: Path, **given: Any) -> dict[str, Any]:
    return {
        "url": f"file://{folder}/bucket",
        "refresh_seconds": 0.05,
        "catalog_flush": 0.05,
        "gc": {"enabled": False},
        **given,
    }


class Two:
    """Two sidecars on one bucket: one has stored all of `KEYS`, the other has read of them."""

    def __init__(
        self, stack: ExitStack, folder: Path, subscribe: Callable[..., Subscriber]
    ) -> None:
        self._subscribe = subscribe
        configs = [
            with_events(folder, runtime={"name": name}, store=store_in(folder))
            for name in ("writes", "reads")
        ]
        self.sidecars = [stack.enter_context(RunningSidecar(config)) for config in configs]
        writer, reader = self.sidecars
        worker = stack.enter_context(Worker(writer.path))
        stack.enter_context(Worker(reader.path))
        self.asks = stack.enter_context(Scheduler(reader.path))
        # A look through the store might find objects before their rows are read.
        for sidecar in self.sidecars:
            sidecar.wait_until(lambda now: now["tiers"]["store"]["catalog"]["sweeps"] == 1)
        self.followers = [subscribe(sidecar) for sidecar in self.sidecars]
        for number, key in enumerate(KEYS):
            assert worker.store(number + 1, key, range(4)) is Outcome.OK
        self.until_stored(NAMES)

    def until_stored(self, names: set[bytes]) -> None:
        """Until both have told that the store holds just these; and so is told who comes late."""
        late = [self._subscribe(sidecar) for sidecar in self.sidecars]
        for follower, hosted in zip(self.followers, (NAMES, set()), strict=True):
            follower.until_equal({"STORAGE": names, "CPU": hosted})
        for follower, one in zip(self.followers, late, strict=True):
            one.see()
            assert one.grouped("STORAGE") == follower.grouped("STORAGE")
            assert one.grouped("CPU") == follower.grouped("CPU")


@pytest.mark.promise("events-tiers")
def test_what_is_collected_goes_from_the_store_alone(
    short_directory: Path, subscribe: Callable[..., Subscriber]
) -> None:
    with ExitStack() as stack:
        two = Two(stack, short_directory, subscribe)
        bounds = store_in(short_directory, objects_max=2, gc={"every": 1.0})
        collects = config_in(short_directory, runtime={"name": "collects"}, store=bounds)
        collector = stack.enter_context(RunningSidecar(collects))
        collector.wait_until(lambda now: now["tiers"]["store"]["collection"]["withdrawn"] == 3)

        def left() -> set[bytes]:
            flags = two.asks.flags(*KEYS)
            return {name_of(key) for key, flag in zip(KEYS, flags, strict=True) if flag}

        two.sidecars[1].wait_until(lambda _: len(left()) == 2)
        two.until_stored(left())


@pytest.mark.promise("events-tiers")
def test_what_is_found_damaged_goes_from_the_store_alone(
    short_directory: Path, subscribe: Callable[..., Subscriber]
) -> None:
    with ExitStack() as stack:
        two = Two(stack, short_directory, subscribe)
        bucket = short_directory / "bucket"
        damaged, lost = KEYS[:2]
        for path in bucket.glob("v1/*/??/*/*.arrow"):
            name = parse_name(str(path.relative_to(bucket)))
            assert name is not None
            if name.key == damaged:
                image = bytearray(path.read_bytes())
                image[5000] ^= 4
                path.write_bytes(image)
            elif name.key == lost:
                path.unlink()
        for number, key in enumerate((damaged, lost), 1):
            assert two.asks.lookup(number, [key]).ready == 0
        two.until_stored(NAMES - {name_of(damaged), name_of(lost)})
        counters = two.sidecars[1].status()["counters"]
        assert (counters["quarantined_store"], counters["reads_missing"]) == (1, 1)

"""Every deadline of the configuration: it ends in an outcome of its own, and is counted as that."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sidecar.config.sections import LimitsSettings
from sidecar.config.store import StoreSettings
from sidecar.exits import Exit
from sidecar.protocol import LoadChunk, LoadJob, Outcome, StoreJob
from tests.sidecar.client import RunningSidecar, Scheduler, Worker, config_in, key_of
from tests.sidecar.stores import Stalled, announce
from tiers.store.middleware import Verb

SHORT_SECONDS = 0.1
NEVER = 1 << 40
"""A fence that no worker reaches."""


@contextmanager
def running(
    directory: Path,
    *stalled: Verb,
    store: dict[str, Any] | None = None,
    after_stop: str = "remove",
    **limits: float,
) -> Iterator[RunningSidecar]:
    """A sidecar over a folder, of whose tier these verbs never answer."""
    settings = {"url": f"file://{directory}/bucket", "recompute": "never", **(store or {})}
    # A read that never ends would hold the drain up for as long as it may take.
    limits = {"drain_seconds_max": SHORT_SECONDS, **limits}
    host = {"after_stop": after_stop}
    config = config_in(directory, store=settings, limits=limits, host=host)
    with RunningSidecar(config, lambda tier: Stalled(tier, *stalled)) as sidecar:
        yield sidecar


def counted(sidecar: RunningSidecar, name: str) -> None:
    """Wait until a counter says one, in the metrics too."""
    sidecar.wait_until(lambda now: now["counters"].get(name, 1) == 1)
    told = sidecar.get("/metrics").decode()
    found = re.search(rf"^kvlake_{name}_total (\S+)$", told, re.MULTILINE)
    assert found, name
    assert float(found[1]) == 1


def lookup_wait(directory: Path) -> None:
    announce(directory / "bucket", 1)
    with (
        running(directory, "read", lookup_wait=SHORT_SECONDS) as sidecar,
        Worker(sidecar.path),
        Scheduler(sidecar.path) as scheduler,
    ):
        sidecar.wait_until(lambda now: now["tiers"]["store"]["chunks"] == 1)
        wait_ms = scheduler.attached.limits.lookup_wait_ms_max
        told = scheduler.lookup(1, [key_of(0)], deadline_ms=wait_ms)
        assert (wait_ms, told.ready, told.outcome) == (100, 0, Outcome.EXPIRED)
        counted(sidecar, "lookups_expired")


def load_deadline(directory: Path) -> None:
    with (
        running(directory, load_deadline=SHORT_SECONDS) as sidecar,
        Worker(sidecar.path) as worker,
    ):
        assert worker.store(1, key_of(0), [0]) is Outcome.OK
        worker.submit(loads=[LoadJob(2, [LoadChunk(key_of(0), 0, [1])])], fence=NEVER)
        assert worker.outcome(2) is Outcome.EXPIRED
        counted(sidecar, "loads_expired")


def store_deadline(directory: Path) -> None:
    with (
        running(directory, store_deadline=SHORT_SECONDS) as sidecar,
        Worker(sidecar.path) as worker,
    ):
        worker.submit(stores=[StoreJob(1, [worker.chunk(key_of(0), [0])])], fence=NEVER)
        assert worker.outcome(1) is Outcome.EXPIRED
        counted(sidecar, "stores_expired")


def lease_ttl(directory: Path) -> None:
    with (
        running(directory, lease_ttl=SHORT_SECONDS, load_deadline=SHORT_SECONDS) as sidecar,
        Worker(sidecar.path) as worker,
        Scheduler(sidecar.path) as scheduler,
    ):
        assert worker.store(1, key_of(0), [0]) is Outcome.OK
        scheduler.lease(2, [key_of(0)])
        counted(sidecar, "leases_expired")
        assert sidecar.status()["leases"] == 0


def attach_deadline(directory: Path) -> None:
    with (
        running(directory, attach_deadline=SHORT_SECONDS) as sidecar,
        socket.socket(socket.AF_UNIX) as silent,
    ):
        silent.settimeout(60)
        silent.connect(str(sidecar.path))
        assert silent.recv(1) == b""
        counted(sidecar, "attaches_expired")


def drain_seconds_max(directory: Path) -> None:
    # Host memory that is kept loses nothing: the next sidecar writes it.
    for after_stop, objects in (("remove", 1), ("keep", 0)):
        drain_in_part(directory, after_stop)
        for lost in (objects, 0):
            # The next sidecar says so, and not the one after it.
            with RunningSidecar(config_in(directory)) as sidecar:
                assert sidecar.status()["last_stop_objects_lost"] == lost
                metric = f"kvlake_last_stop_objects_lost {float(lost)}".encode()
                assert metric in sidecar.get("/metrics").splitlines()


def drain_in_part(directory: Path, after_stop: str) -> None:
    with (
        running(directory, "write", after_stop=after_stop) as sidecar,
        Worker(sidecar.path) as worker,
    ):
        assert worker.store(1, key_of(0), [0]) is Outcome.OK
        sidecar.wait_until(lambda now: now["pending"]["writes_running"] == 1)
        sidecar.stop()
    # What it ended with is its exit code: nobody scrapes a sidecar that has stopped.
    assert sidecar.code is Exit.LOSS


def read_request(directory: Path) -> None:
    announce(directory / "bucket", 1)
    with (
        running(directory, "read", store={"deadline_seconds_max": SHORT_SECONDS}) as sidecar,
        Worker(sidecar.path),
        Scheduler(sidecar.path) as scheduler,
    ):
        sidecar.wait_until(lambda now: now["tiers"]["store"]["chunks"] == 1)
        told = scheduler.lookup(1, [key_of(0)])
        assert (told.ready, told.outcome) == (0, Outcome.EXPIRED)
        counted(sidecar, "reads_expired")
        assert sidecar.status()["counters"]["lookups_expired"] == 0, "its own deadline was later"


def write_request(directory: Path) -> None:
    with (
        running(directory, "write", store={"deadline_seconds_max": SHORT_SECONDS}) as sidecar,
        Worker(sidecar.path) as worker,
    ):
        assert worker.store(1, key_of(0), [0]) is Outcome.OK
        sidecar.wait_until(lambda now: now["counters"]["writes_expired"] >= 1)
        assert sidecar.status()["tiers"]["host"]["chunks"] == 1, "it stays in host memory"


CASES: dict[str, tuple[Callable[[Path], None], ...]] = {
    "limits.lookup_wait": (lookup_wait,),
    "limits.load_deadline": (load_deadline,),
    "limits.store_deadline": (store_deadline,),
    "limits.lease_ttl": (lease_ttl,),
    "limits.attach_deadline": (attach_deadline,),
    "limits.drain_seconds_max": (drain_seconds_max,),
    "store.deadline_seconds_max": (read_request, write_request),
}


@pytest.mark.promise("deadlines")
@pytest.mark.parametrize("case", [case for cases in CASES.values() for case in cases])
def test_a_deadline_that_passes_is_an_outcome_and_is_counted(
    case: Callable[[Path], None], short_directory: Path
) -> None:
    case(short_directory)


@pytest.mark.promise("deadlines")
def test_every_deadline_of_the_configuration_is_among_them() -> None:
    durations = {
        f"limits.{name}"
        for name, one in LimitsSettings.model_fields.items()
        if one.annotation is float
    }
    # Nobody waits for it: it is how far back the figures go.
    durations.remove("limits.history_seconds")
    assert "deadline_seconds_max" in StoreSettings.model_fields
    assert durations | {"store.deadline_seconds_max"} == set(CASES)
    defaults = {f"limits.{name}": one.default for name, one in LimitsSettings.model_fields.items()}
    defaults["store.deadline_seconds_max"] = StoreSettings.model_fields[
        "deadline_seconds_max"
    ].default
    assert all(0 < defaults[name] <= 30 for name in CASES)

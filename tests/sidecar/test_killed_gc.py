"""`kvlake gc` that is killed (SIGKILL of its process) at each of its steps, and the next one.

The next one takes the lease over and finishes, whatever the first has left half done. A client of
its own looks at the bucket, a real S3 server's.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from sidecar.protocol import Outcome
from tests import warm
from tests.harness.sidecars import SidecarProcess
from tests.sidecar import altered
from tests.sidecar.bucketwatch import BucketWatch, kind_of
from tests.sidecar.client import PATIENT, WAIT_SECONDS_MAX, Worker, key_of

if TYPE_CHECKING:
    from tests.harness.servers import S3Server

CHUNKS, KEPT = 12, 4
CONFIG: dict[str, Any] = {"host": {"size": "64MiB"}, "limits": PATIENT}
QUICK: dict[str, Any] = {
    "refresh_seconds": 0.05,
    "catalog_flush": 0.05,
    "gc": {"enabled": False},
}
SOON: dict[str, Any] = {"deadline_seconds_max": 2.0, "gc": {"grace": 2.1}}
"""What is withdrawn is deleted soon. A configuration is only taken with requests that take no
longer than that; `altered.DEADLINE` lets them, as a machine that pauses is no store that fails."""
STAGES = (
    "write v1/lease after",
    "write /snapshot/ after",
    "write /log/c after",
    "write /manifest/ before",
    "write /manifest/ after",
    "delete .arrow before",
    "delete .arrow after",
)
LEASE_SECONDS = 60.0
"""As the product has it."""

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_sidecars")]


class Gc:
    """Runs `kvlake gc --wait` in a process of its own."""

    def __init__(self, folder: Path, store: dict[str, Any]) -> None:
        self._folder = folder
        self._path = folder / "gc.yaml"
        self._path.write_text(yaml.safe_dump({"store": {**store, **SOON, "objects_max": KEPT}}))

    def __call__(self, kill: str = "", lease_seconds: float = LEASE_SECONDS) -> tuple[int, str]:
        """Its exit code, and what it printed."""
        output = self._folder / "gc.log"
        constants = {"LEASE_SECONDS": lease_seconds, "LEASE_POLL_SECONDS": 0.2}
        environment = {
            **os.environ,
            altered.CONSTANTS: json.dumps(constants),
            altered.DEADLINE: str(WAIT_SECONDS_MAX),
        }
        if kill:
            environment[altered.KILL] = kill
        with output.open("wb") as log:
            process = warm.WarmProcess(
                altered.MODULE,
                ["gc", "--wait", "--json", "--config", str(self._path)],
                environment,
                stdout=log.fileno(),
                stderr=log.fileno(),
            )
        return process.wait(4 * WAIT_SECONDS_MAX), output.read_text()


@pytest.fixture
def store(short_directory: Path, seaweed: S3Server) -> dict[str, Any]:
    """A prefix of its own, which a sidecar has filled."""
    store = {"url": f"{seaweed.url}/{short_directory.name}", **seaweed.settings, **QUICK}
    sidecar = SidecarProcess(short_directory / "writer", {"store": store, **CONFIG})
    with sidecar, Worker(Path(sidecar.socket)) as worker:
        for number in range(CHUNKS):
            assert worker.store(number, key_of(number), range(4)) is Outcome.OK
        sidecar.wait("written", lambda now: now["counters"]["chunks_written"] == CHUNKS)
    return store


def lease_of(watch: BucketWatch) -> tuple[int, float]:
    """Which generation is the newest, and when it was created, by the store's clock."""
    return max(
        (int(name.rpartition("/")[2]), created)
        for name, _, created in watch.names()
        if kind_of(name) == "lease"
    )


def kill(gc: Gc, stage: str, lease_seconds: float) -> None:
    """Have one killed."""
    code, told = gc(stage, lease_seconds)
    assert code == -signal.SIGKILL, told


def finish(gc: Gc, folder: Path, store: dict[str, Any], watch: BucketWatch) -> None:
    """The next one does all that is to be done; catalog and objects agree."""
    code, told = gc()
    assert code == 0, told
    [report] = json.loads(told)["namespaces"]
    assert (report["objects"], report["waiting"]) == (KEPT, 0), report
    assert watch.held().objects["chunk"] == KEPT
    sidecar = SidecarProcess(folder / "reader", {"store": store, **CONFIG})
    with sidecar, Worker(Path(sidecar.socket)):
        sidecar.wait("offered", lambda now: now["tiers"]["store"]["chunks"] == KEPT)


@pytest.mark.promise("killed-collector")
def test_after_a_gc_that_was_killed_the_next_one_goes_on_and_finishes(
    short_directory: Path, seaweed: S3Server, store: dict[str, Any]
) -> None:
    gc = Gc(short_directory, store)
    kill(gc, "write /manifest/ before", lease_seconds=3.0)
    # It waits for that lease, withdraws, waits for the grace, and is killed itself.
    kill(gc, "delete .arrow after", lease_seconds=3.0)
    with BucketWatch(seaweed, short_directory.name) as watch:
        finish(gc, short_directory, store, watch)


@pytest.mark.promise("killed-collector")
@pytest.mark.nightly
@pytest.mark.parametrize("stage", STAGES)
def test_a_gc_that_was_killed_at_any_step_holds_the_next_one_up_for_its_lease(
    short_directory: Path, seaweed: S3Server, store: dict[str, Any], stage: str
) -> None:
    gc = Gc(short_directory, store)
    kill(gc, stage, LEASE_SECONDS)
    with BucketWatch(seaweed, short_directory.name) as watch:
        _, dead = lease_of(watch)
        created: list[float] = []

        def look() -> None:
            _generation, when = lease_of(watch)
            if when > dead:
                created.append(when)

        watch.each = look
        finish(gc, short_directory, store, watch)
    print(f"{stage}: taken over {min(created) - dead:.0f} s after its last sign")
    # The next one also has to start, and looks at the lease in turns.
    assert min(created) - dead >= LEASE_SECONDS - 1

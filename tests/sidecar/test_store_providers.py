"""Two sidecars on one bucket of each provider: one reads what the other wrote, by each client."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sidecar.protocol import Outcome
from tests.sidecar.client import RunningSidecar, Scheduler, Worker, config_in, key_of

if TYPE_CHECKING:
    from tests.harness.servers import S3Server
    from tests.object_servers import AzureServer, GcsServer


def settings_of(server: S3Server | GcsServer | AzureServer) -> dict[str, Any]:
    """The `store` section that reaches a server of the tests."""
    access = server.access_at()
    given = {name: getattr(access.credentials, name) for name in access.credentials.given()}
    section: dict[str, Any] = {
        "url": server.url,
        "prefix": secrets.token_hex(6),
        "endpoint": access.endpoint,
        "credentials": {"kind": access.credentials.kind, **given},
        "refresh_seconds": 0.1,
        "catalog_flush": 0.05,
    }
    if access.region is not None:
        section["region"] = access.region
    if access.account is not None:
        section["account"] = access.account
    return section


@pytest.mark.parametrize("backend", ["obstore", "fsspec"])
@pytest.mark.parametrize("provider", ["seaweed", "moto", "gcs", "azure"])
def test_what_one_sidecar_writes_another_reads(
    provider: str, backend: str, request: pytest.FixtureRequest, short_directory: Path
) -> None:
    store = {**settings_of(request.getfixturevalue(provider)), "backend": backend}
    keys = [key_of(provider, backend, number) for number in range(8)]
    blocks = [list(range(4 * number, 4 * number + 4)) for number in range(8)]

    def sidecar(name: str) -> RunningSidecar:
        (short_directory / name).mkdir()
        return RunningSidecar(config_in(short_directory / name, store=store))

    with sidecar("a") as first, Worker(first.path) as worker:
        content = worker.fill(range(32), seed=1)
        for number, key in enumerate(keys):
            assert worker.store(number + 1, key, blocks[number]) is Outcome.OK
        first.wait_until(lambda now: now["counters"]["chunks_written"] == len(keys))
        # The first look at the store, which says so, runs beside the writes.
        first.wait_until(lambda now: now["tiers"]["store"]["state"] == "ok")
    with sidecar("b") as second, Worker(second.path) as worker, Scheduler(second.path) as scheduler:
        second.wait_until(lambda now: now["tiers"]["store"]["chunks"] == len(keys))
        assert scheduler.lookup(1, keys, 15_000).ready == len(keys)
        worker.poison()
        for number, key in enumerate(keys):
            assert worker.load(number + 1, key, blocks[number]) is Outcome.OK
        assert [worker.read(block) for block in range(32)] == content
        # It is well once it was read to its end, which may be after the last of the chunks.
        now = second.wait_until(lambda now: now["tiers"]["store"]["state"] == "ok")
        told = now["tiers"]["store"]
        assert told["verbs"]["read"]["failures"] == {}

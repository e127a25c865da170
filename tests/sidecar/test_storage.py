"""The store from the configuration: limits, retries and rates as they reach a real server."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from sidecar.config.store import StoreSettings
from sidecar.errors import StartError
from sidecar.service.store_stack import open_store
from tests.faulty_proxy import Fault, faulty_proxy
from tests.tiers.tier_suite import NAME, image_of, slot
from tiers.errors import TierUnavailable

if TYPE_CHECKING:
    from tests.harness.servers import S3Server


def settings(server: S3Server, endpoint: str, backend: str, **more: Any) -> StoreSettings:
    place = {"url": server.url, "prefix": secrets.token_hex(6), "backend": backend}
    return StoreSettings.model_validate({**place, **server.settings_at(endpoint), **more})


@pytest.mark.parametrize("backend", ["obstore", "fsspec"])
class TestOpenStore:
    async def test_what_fails_in_passing_is_tried_again_as_often_as_told(
        self, seaweed: S3Server, backend: str
    ) -> None:
        async with faulty_proxy(seaweed.endpoint) as proxy:
            store = open_store(settings(seaweed, proxy.endpoint, backend, retries_max=2))
            await proxy.become(Fault.SLOW_DOWN)
            with pytest.raises(TierUnavailable):
                await store.write(NAME, image_of(10))
            assert len(proxy.exchanges) == 3
            assert store.retried == {"busy": 2}
            assert store.counts["write"].failures == {"busy": 1}
            await proxy.become(Fault.TOO_MANY, times=2)
            await store.write(NAME, image_of(10))
            assert len(proxy.exchanges) == 6
            assert store.counts["write"].succeeded == 1
            await proxy.become(Fault.FORBIDDEN)
            with pytest.raises(TierUnavailable):
                await store.read(NAME, slot())
            assert len(proxy.exchanges) == 7, "what only a person can mend is not tried again"
            await store.close()

    async def test_requests_do_not_begin_more_often_than_told(
        self, seaweed: S3Server, backend: str
    ) -> None:
        async with faulty_proxy(seaweed.endpoint) as proxy:
            store = open_store(
                settings(seaweed, proxy.endpoint, backend, requests_per_second_max=50)
            )
            start = anyio.current_time()
            async with anyio.create_task_group() as tasks:
                for number in range(16):
                    tasks.start_soon(store.write, f"{NAME}.{number}", image_of(10))
            assert anyio.current_time() - start >= 15 / 50
            assert len(proxy.exchanges) == 16
            await store.close()


def test_settings_that_no_client_can_follow_stop_the_start(seaweed: S3Server) -> None:
    chosen = StoreSettings.model_construct(
        url=seaweed.url, prefix="", backend="obstore", storage_options={"key": "x"}
    )
    with pytest.raises(StartError, match=r"store: store\.storage_options"):
        open_store(chosen)

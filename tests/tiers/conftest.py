"""A real S3 server behind a proxy that can be told to fail."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.faulty_proxy import FaultyProxy, faulty_proxy
from tests.object_servers import place
from tiers.store.object_tier import UrlObjects

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tests.harness.servers import S3Server


@pytest.fixture
async def proxy(seaweed: S3Server) -> AsyncGenerator[FaultyProxy]:
    async with faulty_proxy(seaweed.endpoint) as running:
        yield running


@pytest.fixture
async def behind_proxy(seaweed: S3Server, proxy: FaultyProxy) -> AsyncGenerator[UrlObjects]:
    tier = UrlObjects(place(seaweed), storage_options=seaweed.options_at(proxy.endpoint))
    yield tier
    await tier.close()


@pytest.fixture
async def fast_behind_proxy(seaweed: S3Server, proxy: FaultyProxy) -> AsyncGenerator[UrlObjects]:
    """The same through obstore."""
    tier = UrlObjects(place(seaweed), seaweed.access_at(proxy.endpoint))
    yield tier
    await tier.close()

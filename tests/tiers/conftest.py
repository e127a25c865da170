"""A real S3 server behind a proxy that can be told to fail."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import botocore.session
import pytest

from tests.faulty_proxy import FaultyProxy, faulty_proxy
from tests.object_servers import place
from tiers.store.access import Access
from tiers.store.object_tier import UrlObjects

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from tests.harness.servers import S3Server


@pytest.fixture(scope="session", autouse=True)
def _botocore_reads_its_descriptions_once() -> Iterator[None]:
    """Sessions share what they read of AWS's services: 20 ms of JSON for each of hundreds."""
    with pytest.MonkeyPatch.context() as patch:
        create = functools.cache(botocore.session.create_loader)
        patch.setattr(botocore.session, "create_loader", create)
        yield


@pytest.fixture
async def proxy(seaweed: S3Server) -> AsyncGenerator[FaultyProxy]:
    async with faulty_proxy(seaweed.endpoint) as running:
        yield running


@pytest.fixture
async def behind_proxy(seaweed: S3Server, proxy: FaultyProxy) -> AsyncGenerator[UrlObjects]:
    tier = UrlObjects(place(seaweed), Access(storage_options=seaweed.options_at(proxy.endpoint)))
    yield tier
    await tier.close()


@pytest.fixture
async def fast_behind_proxy(seaweed: S3Server, proxy: FaultyProxy) -> AsyncGenerator[UrlObjects]:
    """The same through obstore."""
    tier = UrlObjects(place(seaweed), seaweed.access_at(proxy.endpoint))
    yield tier
    await tier.close()

"""The contract of the tier on real servers: S3, GCS and Azure, by obstore and by fsspec."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.object_servers import place
from tests.tiers.tier_suite import TierSuite
from tiers.store.object_tier import UrlObjects

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tests.harness.servers import S3Server
    from tests.object_servers import AzureServer, GcsServer
    from tiers.store.access import Backend


@pytest.fixture(params=["obstore", "fsspec"])
def backend(request: pytest.FixtureRequest) -> Backend:
    chosen: Backend = request.param
    return chosen


class TestS3(TierSuite):
    @pytest.fixture
    async def tier(self, seaweed: S3Server, backend: Backend) -> AsyncGenerator[UrlObjects]:
        tier = UrlObjects(place(seaweed), seaweed.access_at(backend=backend))
        yield tier
        await tier.close()


class TestGcs(TierSuite):
    @pytest.fixture
    async def tier(self, gcs: GcsServer, backend: Backend) -> AsyncGenerator[UrlObjects]:
        tier = UrlObjects(place(gcs), gcs.access_at(backend=backend))
        yield tier
        await tier.close()


class TestAzure(TierSuite):
    @pytest.fixture
    async def tier(self, azure: AzureServer, backend: Backend) -> AsyncGenerator[UrlObjects]:
        tier = UrlObjects(place(azure), azure.access_at(backend=backend))
        yield tier
        await tier.close()

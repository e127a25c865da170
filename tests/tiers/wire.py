"""Tiers with the settings of a site, for each client, and a proxy that notes each request."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.faulty_proxy import Exchange, FaultyProxy
from tests.tiers.tier_suite import NAME, image_of, slot
from tiers.store.access import Access
from tiers.store.object_tier import UrlObjects

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tiers.store.access import Backend


@pytest.fixture(params=["obstore", "fsspec"])
def backend(request: pytest.FixtureRequest) -> Backend:
    chosen: Backend = request.param
    return chosen


@contextlib.asynccontextmanager
async def tier_of(url: str, access: Access) -> AsyncGenerator[UrlObjects]:
    tier = UrlObjects(url, access)
    try:
        yield tier
    finally:
        await tier.close()


def replaced(access: Access, **settings: object) -> Access:
    """A copy with other settings, which are checked."""
    return Access.model_validate({**dict(access), **settings})


async def written(url: str, access: Access, watch: FaultyProxy) -> Exchange:
    """Write one object and read it back; the request that wrote it."""
    image, into = image_of(5000), slot()
    async with tier_of(url, access) as tier:
        await tier.write(NAME, image)
        (put,) = watch.exchanges
        assert await tier.read(NAME, into) == image.nbytes
    assert np.array_equal(into[: image.nbytes], image)
    return put

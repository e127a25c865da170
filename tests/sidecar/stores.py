"""Stores for tests: what a catalog claims, and tiers that never answer."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import anyio

from tests.sidecar.client import NAMESPACE, key_of, layout_of
from tiers.catalog.log import new_writer
from tiers.catalog.names import LogName, catalog_folder, log_name, namespace_prefix
from tiers.catalog.rows import Row, digest_of, encode, rows_of
from tiers.store.middleware import Verb, Wrapper

if TYPE_CHECKING:
    from tiers.store.object_tier import ObjectTier

T = TypeVar("T")


def announce(bucket: Path, chunks: int) -> None:
    """Say in the bucket's catalog that it holds chunks 0 to `chunks`. None of them is there."""
    segment = layout_of().segment.name
    told = [Row(key_of(number), segment, 1, size_bytes=1, num_blocks=1) for number in range(chunks)]
    body = encode(rows_of(told))
    folder = catalog_folder(namespace_prefix(hashlib.sha256(NAMESPACE).digest()))
    path = bucket / log_name(folder, LogName(new_writer(), 0), digest_of(body))
    path.parent.mkdir(parents=True)
    path.write_bytes(body.tobytes())


class Stalled(Wrapper):
    """Some verbs never answer for chunks; the catalog is as it is."""

    def __init__(self, inner: ObjectTier, *verbs: Verb) -> None:
        super().__init__(inner)
        self._verbs = verbs

    async def _around(self, verb: Verb, name: str, call: Callable[[], Awaitable[T]]) -> T:
        if verb in self._verbs and "/catalog/" not in name:
            await anyio.sleep_forever()
        return await call()

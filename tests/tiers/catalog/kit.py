"""What the catalog's tests share: a store in memory that counts, and rows."""

from __future__ import annotations

import contextlib
import secrets
from typing import TYPE_CHECKING, TypeVar

import anyio
import anyio.lowlevel

from tiers.catalog import manifest as manifests
from tiers.catalog.log import LogWriter, new_writer
from tiers.catalog.manifest import Counts
from tiers.catalog.names import catalog_folder, namespace_prefix
from tiers.catalog.reader import CatalogReader
from tiers.catalog.rows import Row
from tiers.store.middleware import Billed, Metered
from tiers.store.object_tier import UrlObjects

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator

    from tiers.catalog.manifest import Manifest
    from tiers.catalog.rows import Bytes
    from tiers.store.object_tier import ObjectTier

T = TypeVar("T")

NAMESPACE = bytes(range(32))
PREFIX = namespace_prefix(NAMESPACE)
FOLDER = catalog_folder(PREFIX)
SEGMENT = "0-8.0-4"


def memory() -> Metered:
    objects = UrlObjects(f"memory://{secrets.token_hex(6)}")
    return Metered(objects, billed=Billed(objects))


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def row(
    number: int,
    written_at: int = 100,
    size_bytes: int = 1000,
    *,
    parent: int = 0,
    tenant: bytes = b"",
) -> Row:
    return Row(key(number), SEGMENT, written_at, size_bytes, 1, key(parent), tenant)


def writer(tier: ObjectTier, kind: str = "s") -> LogWriter:
    return LogWriter(tier, FOLDER, new_writer(kind), rows_max=10_000, seconds_max=1.0)


async def write_many_files(tier: ObjectTier) -> list[LogWriter]:
    """Three writers, each of which has written ten files."""
    logs = [writer(tier) for _ in range(3)]
    for log in logs:
        for number in range(10):
            log.append(row(number))
            await log.flush()
    return logs


def reader(tier: ObjectTier) -> CatalogReader:
    return CatalogReader(tier, FOLDER, Counts())


async def new_rows(of: CatalogReader) -> list[Row]:
    return [rows.row(index) async for rows in of.changes() for index in range(len(rows))]


def encode_manifest(manifest: Manifest) -> Bytes:
    return _at_once(manifests.encode(manifest))


def decode_manifest(body: Bytes, folder: str, generation: int) -> Manifest:
    return _at_once(manifests.decode(body, folder, generation))


def _at_once(work: Generator[None, None, T]) -> T:
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result


@contextlib.asynccontextmanager
async def others_turns() -> AsyncGenerator[Callable[[], int]]:
    """A task beside the test's: how many turns of the event loop it has had."""
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(other)
        yield lambda: turns
        tasks.cancel_scope.cancel()

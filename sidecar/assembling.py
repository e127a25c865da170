"""Assembling: one rank's segment out of objects that were cut for other ranks.

Owns reading the sources of one read, sharing one download among the ranks that need parts of the
same object at the same time, and building the slot: every source is verified as a whole, what
overlaps is copied, and the slot gets a checksum of its own. Does not own which sources there are
(`cuts.py`), nor the outcome (`mover.py`).

Invariants: nothing unverified reaches the slot; all sources are of the same chunk (key, parent,
tokens), or the read fails; at most `ASSEMBLIES_MAX` reads hold sources in memory at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import anyio
import numpy as np

from tiers.assembly import copy_overlap
from tiers.catalog.names import object_name
from tiers.errors import ChunkCorrupt, ImageChecksumMismatch, ImageKeyMismatch
from tiers.filesystems import run_to_end

if TYPE_CHECKING:
    import numpy.typing as npt

    from sidecar.commands import Read
    from sidecar.realms import Rank, Realm
    from tiers.arrow import SegmentMeta
    from tiers.objects import ObjectTier

    Bytes = npt.NDArray[np.uint8]

ASSEMBLIES_MAX: Final = 4


class SourceError(Exception):
    """One source failed. `__cause__` says how."""

    def __init__(self, bit: int, name: str) -> None:
        super().__init__(name)
        self.bit = bit
        self.name = name


class Assembled(NamedTuple):
    """A slot that was built and sealed."""

    meta: SegmentMeta
    num_bytes: int
    """Read for it, shared or not."""


class _Shared:
    """A download that several reads wait for."""

    def __init__(self) -> None:
        self.done = anyio.Event()
        self.image: Bytes | None = None
        self.error: Exception | None = None


class Assembler:
    """Reads and joins sources."""

    def __init__(self, store: ObjectTier, verifying: anyio.CapacityLimiter) -> None:
        self._store = store
        self._verifying = verifying
        self._limiter = anyio.CapacityLimiter(ASSEMBLIES_MAX)
        self._downloads: dict[str, _Shared] = {}

    async def assemble(self, realm: Realm, command: Read, slot: Bytes) -> Assembled:
        """Build the segment of `command.rank` in `slot`. Raises `SourceError`."""
        rank = realm.ranks[command.rank]
        async with self._limiter:
            images: list[Bytes | None] = [None] * len(command.sources)
            errors: list[SourceError] = []

            async def fetch(place: int, bit: int) -> None:
                source = realm.by_bit(bit)
                name = object_name(realm.namespace_digest, command.key, source.layout.segment)
                try:
                    images[place] = await self._download(name, source)
                except Exception as error:
                    failure = SourceError(bit, name)
                    failure.__cause__ = error
                    errors.append(failure)

            async with anyio.create_task_group() as tasks:
                for place, bit in enumerate(command.sources):
                    tasks.start_soon(fetch, place, bit)
            if errors:
                raise errors[0]
            read = [image for image in images if image is not None]
            parts = [(bit, realm.by_bit(bit)) for bit in command.sources]
            meta = await run_to_end(
                lambda: _build(rank, slot, command.key, parts, read), self._verifying
            )
            return Assembled(meta, sum(image.size for image in read))

    async def _download(self, name: str, source: Rank) -> Bytes:
        shared = self._downloads.get(name)
        if shared is None:
            shared = self._downloads[name] = _Shared()
            try:
                buffer = np.empty(source.templates.slot_bytes, dtype=np.uint8)
                shared.image = buffer[: await self._store.read(name, buffer)]
            except Exception as error:
                shared.error = error
                raise
            finally:
                # Whoever comes later reads again: only those who wait already share it.
                del self._downloads[name]
                shared.done.set()
            return shared.image
        await shared.done.wait()
        if shared.image is None:
            raise shared.error or ConnectionError("the read that was shared was cancelled")
        return shared.image


def _build(
    rank: Rank, slot: Bytes, key: bytes, parts: list[tuple[int, Rank]], images: list[Bytes]
) -> SegmentMeta:
    metas: list[SegmentMeta] = []
    for (bit, source), image in zip(parts, images, strict=True):
        try:
            meta = source.templates.for_image_bytes(len(image)).verify(image, key)
            _require_same(meta, metas)
        except ChunkCorrupt as error:
            raise SourceError(bit, source.layout.segment.name) from error
        metas.append(meta)
    meta = metas[0]
    template = rank.templates[meta.num_blocks]
    num_tokens = meta.num_blocks * rank.layout.block_tokens
    template.prepare(slot)
    for (_, source), image in zip(parts, images, strict=True):
        payload = source.templates[meta.num_blocks].payload(image)
        copy_overlap(source.layout, payload, rank.layout, template.payload(slot), num_tokens)
    template.seal(slot, key, meta.parent, meta.token_ids)
    return meta


def _require_same(meta: SegmentMeta, others: list[SegmentMeta]) -> None:
    for other in others:
        if (meta.num_blocks, meta.parent, meta.token_ids) != (
            other.num_blocks,
            other.parent,
            other.token_ids,
        ):
            raise ImageKeyMismatch(
                "the parts of a chunk differ in parent, length or tokens: one of them was stored "
                "under a wrong name; it is not used"
            )


def damaged(error: BaseException | None) -> bool:
    """Whether a source is damaged for everybody, rather than made otherwise than is read here.

    Another cluster's object may be intact and follow another geometry under the same name. Only
    whose header is as expected and whose bytes are not has surely been damaged.
    """
    return isinstance(error, ImageChecksumMismatch)

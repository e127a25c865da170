"""Assembling: one rank's segment out of objects that were made for other ranks or block sizes.

Owns reading the sources of one read, sharing one download among the ranks that need parts of the
same object at the same time, and building the slot: every source is verified as a whole, what
overlaps is copied, and the slot gets a checksum of its own. A source says itself of which size its
blocks are. Does not own which sources there are (`core/directory.py`), nor the outcome
(`executor.py`).

Invariants: nothing unverified reaches the slot; all sources are of the same chunk (key, parent,
tokens), or the read fails; at most `ASSEMBLIES_MAX` sets of sources are in memory at a time, and
all reads that are made of the same set use it before it goes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import anyio
import numpy as np

from tiers.catalog.names import object_name
from tiers.errors import ChunkCorrupt, ImageChecksumMismatch, ImageKeyMismatch, ObjectOdd
from tiers.kv.arrow_file import PAGE_BYTES
from tiers.kv.reshard import copy_overlap
from tiers.kv.slot_image import SegmentMeta, payload_hasher
from tiers.store.client import run_to_end

if TYPE_CHECKING:
    import numpy.typing as npt

    from sidecar.core.commands import Read
    from sidecar.sessions.namespaces import RankLayout, RealmLayout
    from tiers.kv.layout import ChunkLayout
    from tiers.store.object_tier import ObjectTier

    Bytes = npt.NDArray[np.uint8]

ASSEMBLIES_MAX: Final = 4
TOKEN_BYTES: Final = 4


SLACK_BYTES: Final = 2 * PAGE_BYTES
"""An image in blocks of another size has as large a payload, and other numbers in its header."""


class SourceError(Exception):
    """One source failed. `__cause__` says how."""

    def __init__(self, bit: int, name: str, came: bytes = b"") -> None:
        super().__init__(name)
        self.bit = bit
        self.name = name
        self.came = came
        """Fingerprint of the bytes that came; empty where none did."""


class Assembled(NamedTuple):
    """A slot that was built and sealed."""

    meta: SegmentMeta
    num_bytes: int
    """Read for it; what reads share is counted by the first of them."""


class _Shared:
    """A download that several reads wait for."""

    def __init__(self) -> None:
        self.done = anyio.Event()
        self.image: Bytes | None = None
        self.error: Exception | None = None


class _Group:
    """Reads that are made of the same sources. Those are kept until the last one has used them."""

    def __init__(self) -> None:
        self.users = 0
        self.done = anyio.Event()
        self.images: list[Bytes] = []
        self.num_bytes = 0
        """Read for these images; a download that another group had begun is not among them."""
        self.error: Exception | None = ConnectionError("the read that was shared was cancelled")


class Resharder:
    """Reads and joins sources."""

    def __init__(self, store: ObjectTier, verifying: anyio.CapacityLimiter) -> None:
        self._store = store
        self._verifying = verifying
        self._limiter = anyio.CapacityLimiter(ASSEMBLIES_MAX)
        self._downloads: dict[str, _Shared] = {}
        self._groups: dict[tuple[int, bytes, tuple[int, ...]], _Group] = {}

    async def assemble(self, realm: RealmLayout, command: Read, slot: Bytes) -> Assembled:
        """Build the segment of `command.rank` in `slot`. Raises `SourceError`."""
        rank = realm.ranks[command.rank]
        name = (realm.realm_id, command.key, command.sources)
        group = self._groups.get(name)
        is_first = group is None
        if group is None:
            group = self._groups[name] = _Group()
        group.users += 1
        try:
            if is_first:
                await self._fill(realm, command, group)
            await group.done.wait()
            if group.error is not None:
                raise group.error
            read = group.images
            parts = [(bit, realm.by_bit(bit)) for bit in command.sources]
            meta = await run_to_end(
                lambda: _build(rank, slot, command.key, parts, read), self._verifying
            )
            return Assembled(meta, group.num_bytes if is_first else 0)
        finally:
            group.users -= 1
            if not group.users:
                if self._groups.get(name) is group:
                    del self._groups[name]
                if group.images:
                    self._limiter.release_on_behalf_of(group)

    async def _fill(self, realm: RealmLayout, command: Read, group: _Group) -> None:
        """Read what a group is made of; its place among the `ASSEMBLIES_MAX` goes with it."""
        held = False
        try:
            await self._limiter.acquire_on_behalf_of(group)
            held = True
            group.images = await self._sources(realm, command, group)
            group.error = None
        except Exception as error:
            group.error = error
        finally:
            if not group.images:
                if held:
                    self._limiter.release_on_behalf_of(group)
                # Whoever comes now tries again.
                del self._groups[realm.realm_id, command.key, command.sources]
            group.done.set()

    async def _sources(self, realm: RealmLayout, command: Read, group: _Group) -> list[Bytes]:
        images: list[Bytes | None] = [None] * len(command.sources)
        errors: list[SourceError] = []

        async def fetch(place: int, bit: int) -> None:
            source = realm.by_bit(bit)
            name = object_name(realm.namespace_digest, command.key, source.layout.segment)
            try:
                images[place] = await self._download(name, source, group)
            except Exception as error:
                failure = SourceError(bit, name)
                failure.__cause__ = error
                errors.append(failure)

        async with anyio.create_task_group() as tasks:
            for place, bit in enumerate(command.sources):
                tasks.start_soon(fetch, place, bit)
        if errors:
            raise errors[0]
        return [image for image in images if image is not None]

    async def regroup(
        self, command: Read, rank: RankLayout, slot: Bytes, num_bytes: int
    ) -> SegmentMeta:
        """Make a rank's segment of its own object, which is in `slot` in blocks of another size.

        Raises `SourceError`.
        """
        async with self._limiter:
            return await run_to_end(
                lambda: _build(
                    rank, slot, command.key, [(command.rank, rank)], [slot[:num_bytes].copy()]
                ),
                self._verifying,
            )

    async def _download(self, name: str, source: RankLayout, group: _Group) -> Bytes:
        shared = self._downloads.get(name)
        if shared is None:
            shared = self._downloads[name] = _Shared()
            try:
                buffer = np.empty(source.templates.slot_bytes + SLACK_BYTES, dtype=np.uint8)
                shared.image = buffer[: await self._store.read(name, buffer)]
                group.num_bytes += shared.image.size
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
    rank: RankLayout,
    slot: Bytes,
    key: bytes,
    parts: list[tuple[int, RankLayout]],
    images: list[Bytes],
) -> SegmentMeta:
    metas: list[SegmentMeta] = []
    layouts: list[ChunkLayout] = []
    payloads: list[Bytes] = []
    for (bit, holder), image in zip(parts, images, strict=True):
        try:
            source = holder.as_stored(image)
            template = source.templates.for_image_bytes(len(image))
            meta = template.verify(image, key)
            _require_same(meta, metas)
            _require_whole_blocks(meta, rank.layout)
        except ChunkCorrupt as error:
            raise SourceError(bit, holder.layout.segment.name, fingerprint(image)) from error
        metas.append(meta)
        layouts.append(source.layout)
        payloads.append(template.payload(image))
    meta = metas[0]
    num_tokens = len(meta.token_ids) // TOKEN_BYTES
    template = rank.templates[num_tokens // rank.layout.block_tokens]
    template.prepare(slot)
    for layout, payload in zip(layouts, payloads, strict=True):
        copy_overlap(layout, payload, rank.layout, template.payload(slot), num_tokens)
    checksum = template.seal(slot, key, meta.parent, meta.token_ids)
    return SegmentMeta(key, meta.parent, meta.token_ids, checksum, template.num_blocks)


def _require_same(meta: SegmentMeta, others: list[SegmentMeta]) -> None:
    for other in others:
        if (meta.parent, meta.token_ids) != (other.parent, other.token_ids):
            raise ImageKeyMismatch(
                "the parts of a chunk differ in parent, length or tokens: one of them was stored "
                "under a wrong name; it is not used"
            )


def _require_whole_blocks(meta: SegmentMeta, layout: ChunkLayout) -> None:
    num_tokens = len(meta.token_ids) // TOKEN_BYTES
    if num_tokens % layout.block_tokens:
        raise ImageKeyMismatch(
            f"the image has {num_tokens} tokens, which are no whole blocks of "
            f"{layout.block_tokens}: nobody here can have asked for it; it is not used"
        )


def fingerprint(image: Bytes) -> bytes:
    """Tells two arrivals of one object apart."""
    hasher = payload_hasher()
    hasher.update(image.data)
    return hasher.digest()


def damaged(error: BaseException | None) -> bool:
    """Whether a source is damaged for everybody, rather than made otherwise than is read here.

    Another cluster's object may be intact and follow another geometry under the same name. Only
    whose header is as expected and whose bytes are not has surely been damaged.
    """
    return isinstance(error, ImageChecksumMismatch | ObjectOdd)

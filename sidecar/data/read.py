"""Reads one segment from the object store into a slot: fetch, verify, reshard.

`SegmentReader.read` is the whole pipeline. The parts follow in the order in which they run:

1. The rank's own object is fetched into the slot. `StreamingVerifier` hashes each piece in the
   thread that received it, while the piece is in that core's cache. Hashing it later would read
   the memory again, which takes half as long as receiving it.
2. Objects of other ranks or block sizes are fetched into buffers, verified whole, and resharded:
   the overlaps are copied into the slot, which gets a checksum of its own.
3. An object that arrived damaged is read once more before its damage is reported, because
   everybody loses an object that is reported as damaged.

Does not own which sources there are (`core/stored_table.py`), the fetch itself
(`tiers/store/object_tier.py`), the checks (`tiers/kv/slot_image.py`), or what follows from an
outcome (`core/reads.py`).

Invariants: no read succeeds with a byte that was not verified; all sources are of the same chunk
(key, parent, tokens), or the read fails; images of at most `RESHARDED_CHUNKS_MAX` chunks are in
buffers at a time, and all reads of a chunk that run at the same time share them; an object is
damaged only if the same bytes came twice and are wrong both times.
"""

import logging
from collections.abc import Callable
from typing import Final

import anyio
import numpy as np

from sidecar.core.commands import Read, ReadDone, StoreOutcome
from sidecar.logs import fields
from sidecar.sessions.namespaces import RankLayout, RealmLayout
from tiers.errors import (
    ChunkCorrupt,
    ChunkMissing,
    ImageChecksumMismatch,
    ImageFormatMismatch,
    ImageHeaderMismatch,
    ImageKeyMismatch,
    ImageTruncated,
    ObjectDenied,
    ObjectOdd,
    TierExpired,
    TierFull,
    TierUnavailable,
)
from tiers.kv.arrow_file import PAGE_BYTES
from tiers.kv.layout import Bytes, ChunkLayout
from tiers.kv.reshard import copy_overlap
from tiers.kv.slot_image import SegmentMeta, SlotTemplate, payload_hasher
from tiers.store.client import run_to_end
from tiers.store.object_tier import ObjectTier

RESHARDED_CHUNKS_MAX: Final = 4
REREADS_MAX: Final = 2
TOKEN_BYTES: Final = 4
SLACK_BYTES: Final = 2 * PAGE_BYTES
"""An image with blocks of another size has an equal payload and may have a longer header."""

_logger = logging.getLogger("kvlake.executor")


class SourceError(Exception):
    """One source of a read failed. `__cause__` says how."""

    def __init__(self, bit: int, received: bytes = b"") -> None:
        super().__init__(bit)
        self.bit = bit
        self.received = received
        """Fingerprint of the bytes that were received; empty where none were."""


class SegmentReader:
    """Carries out `Read` commands. `threads` limits the threads that verify and copy.

    `store_failed` is called with each error that says that the store does not work.
    """

    def __init__(
        self,
        store: ObjectTier,
        threads: anyio.CapacityLimiter,
        store_failed: Callable[[Exception], None],
    ) -> None:
        self._store = store
        self._threads = threads
        self._store_failed = store_failed
        self._chunks: dict[tuple[bytes, bytes], _SharedChunk] = {}
        self._chunks_limit = anyio.CapacityLimiter(RESHARDED_CHUNKS_MAX)
        self._rereads_limit = anyio.CapacityLimiter(REREADS_MAX)

    async def read(self, realm: RealmLayout, command: Read, slot: Bytes) -> ReadDone:
        """Bring one segment into `slot`. A failure is an outcome, never an exception."""
        try:
            if command.sources == (command.rank,):
                meta, num_bytes = await self._read_own(realm, command, slot)
            else:
                meta, num_bytes = await self.reshard(realm, command, slot)
        except SourceError as error:
            return await self._source_failed(realm, command, error)
        except Exception as error:
            name = realm.object_name(command.rank, command.key)
            return ReadDone(command.read_id, self._outcome(error, name, foreign=False))
        return ReadDone(command.read_id, StoreOutcome.OK, meta.num_blocks, meta.parent, num_bytes)

    async def _read_own(
        self, realm: RealmLayout, command: Read, slot: Bytes
    ) -> tuple[SegmentMeta, int]:
        """Fetch and verify the rank's own object, in whatever blocks it was stored."""
        rank = realm.ranks[command.rank]
        verifier = StreamingVerifier(rank, command.key, slot)
        name = realm.object_name(command.rank, command.key)
        try:
            num_bytes = await self._store.read(name, slot, seen=verifier)
        except ImageTruncated:
            # The header of an image in blocks of another size may be a page longer.
            return await self.reshard(realm, command, slot)
        try:
            if verifier.has_verified(num_bytes):
                meta = verifier.result(num_bytes)
            else:
                meta = await run_to_end(lambda: verifier.result(num_bytes), self._threads)
        except (ImageHeaderMismatch, ImageTruncated):
            # Another release may have written it: the slot gets our own header and footer.
            meta = None
        except ChunkCorrupt as error:
            received = await run_to_end(lambda: fingerprint(slot[:num_bytes]), self._threads)
            raise SourceError(command.rank, received) from error
        if meta is None:
            async with self._chunks_limit:
                meta = await run_to_end(
                    lambda: _build(
                        rank, slot, command.key, [(command.rank, rank, slot[:num_bytes].copy())]
                    ),
                    self._threads,
                )
        return meta, num_bytes

    async def reshard(
        self, realm: RealmLayout, command: Read, slot: Bytes
    ) -> tuple[SegmentMeta, int]:
        """Build the rank's segment in `slot` from the command's sources. Raises `SourceError`.

        Returns what the slot holds, and the bytes that were read for it. A shared download counts
        for the read that began it.
        """
        key = (realm.namespace_digest, command.key)
        chunk = self._chunks.setdefault(key, _SharedChunk())
        chunk.readers += 1
        try:
            async with chunk.lock:
                if not chunk.admitted:
                    await self._chunks_limit.acquire_on_behalf_of(chunk)
                    chunk.admitted = True
            images, num_bytes = await self._fetch_sources(realm, command, chunk)
            sources = [
                (bit, realm.by_bit(bit), image)
                for bit, image in zip(command.sources, images, strict=True)
            ]
            rank = realm.ranks[command.rank]
            meta = await run_to_end(lambda: _build(rank, slot, command.key, sources), self._threads)
            return meta, num_bytes
        finally:
            chunk.readers -= 1
            if not chunk.readers:
                del self._chunks[key]
                if chunk.admitted:
                    self._chunks_limit.release_on_behalf_of(chunk)

    async def _fetch_sources(
        self, realm: RealmLayout, command: Read, chunk: "_SharedChunk"
    ) -> tuple[list[Bytes], int]:
        images: dict[int, Bytes] = {}
        errors: list[tuple[int, Exception]] = []
        num_bytes = 0

        async def fetch(bit: int) -> None:
            nonlocal num_bytes
            name = realm.object_name(bit, command.key)
            try:
                download = chunk.downloads.get(name)
                if download is None:
                    download = chunk.downloads[name] = _Download()
                    await self._download(name, realm.by_bit(bit), chunk)
                    num_bytes += len(download.result())
                await download.ended.wait()
                images[bit] = download.result()
            except Exception as error:
                errors.append((bit, error))

        async with anyio.create_task_group() as tasks:
            for bit in command.sources:
                tasks.start_soon(fetch, bit)
        for bit, error in errors:
            raise SourceError(bit) from error
        return [images[bit] for bit in command.sources], num_bytes

    async def _download(self, name: str, holder: RankLayout, chunk: "_SharedChunk") -> None:
        download = chunk.downloads[name]
        try:
            buffer = np.empty(holder.templates.slot_bytes + SLACK_BYTES, dtype=np.uint8)
            download.image = buffer[: await self._store.read(name, buffer)]
        except Exception as error:
            download.error = error
        finally:
            if download.image is None:
                # Only those who wait already share the failure. A later read tries again.
                del chunk.downloads[name]
            download.ended.set()

    async def _source_failed(
        self, realm: RealmLayout, command: Read, error: SourceError
    ) -> ReadDone:
        cause: BaseException = error.__cause__ or error
        foreign = error.bit != command.rank
        failed = error.bit if foreign else -1
        name = realm.object_name(error.bit, command.key)
        if isinstance(cause, ChunkCorrupt) and not is_of_another_layout(cause, foreign=foreign):
            try:
                confirmed = await self._damaged_again(error, name, realm, command.key)
            except Exception as again:
                cause = again
            else:
                if not confirmed:
                    _logger.error(
                        "an object arrived damaged, and differently when it was read again: check "
                        "the memory of this node and any proxy before the store",
                        extra=fields(object=name, error=cause),
                    )
                    outcome = StoreOutcome.UNAVAILABLE
                    return ReadDone(command.read_id, outcome, failed=failed, garbled=True)
        outcome = self._outcome(cause, name, foreign=foreign)
        return ReadDone(command.read_id, outcome, failed=failed)

    async def _damaged_again(
        self, error: SourceError, name: str, realm: RealmLayout, key: bytes
    ) -> bool:
        """Whether the object itself is damaged. Raises what makes the second read fail.

        The second read has its own memory, so that a slot in failing memory accuses no object.
        """
        holder = realm.by_bit(error.bit)
        async with self._rereads_limit:
            buffer = np.empty(holder.templates.slot_bytes + SLACK_BYTES, dtype=np.uint8)
            try:
                image = buffer[: await self._store.read(name, buffer)]
            except ImageTruncated:
                return not error.received
            return await run_to_end(lambda: _same_damage(error, image, holder, key), self._threads)

    def _outcome(self, error: BaseException, name: str, *, foreign: bool) -> StoreOutcome:
        """The outcome of a failed read. Logs it, or reports it to the watch of the store."""
        told = fields(object=name, error=error)
        match error:
            case ChunkMissing():
                return StoreOutcome.MISSING
            case ObjectDenied():
                _logger.warning("an object must not be read", extra=told)
                return StoreOutcome.UNREADABLE
            case ChunkCorrupt():
                if is_of_another_layout(error, foreign=foreign):
                    _logger.warning("an object of another layout is not used", extra=told)
                    return StoreOutcome.UNREADABLE
                _logger.error("an object is corrupt", extra=told)
                return StoreOutcome.CORRUPT
            case TierExpired() | TierUnavailable() | TierFull():
                # A store that is down fails every request. Its watch logs that once.
                _logger.debug("read failed", extra=told)
                self._store_failed(error)
                expired = isinstance(error, TierExpired)
                return StoreOutcome.EXPIRED if expired else StoreOutcome.UNAVAILABLE
            case _:
                _logger.error("read failed", extra=fields(object=name), exc_info=error)
                return StoreOutcome.UNAVAILABLE


class _SharedChunk:
    """What reads of one chunk share while at least one of them runs."""

    def __init__(self) -> None:
        self.readers = 0
        self.lock = anyio.Lock()
        self.admitted = False
        """Whether it counts towards `RESHARDED_CHUNKS_MAX`."""
        self.downloads: dict[str, _Download] = {}
        """By the name of the source: realms number the same sources in their own way."""


class _Download:
    """One source, which may still be on its way."""

    def __init__(self) -> None:
        self.ended = anyio.Event()
        self.image: Bytes | None = None
        self.error: Exception = ConnectionError("the shared download was cancelled")

    def result(self) -> Bytes:
        if self.image is None:
            raise self.error
        return self.image


class StreamingVerifier:
    """Verifies one read of a rank's own segment while it arrives. It is the tier's `Seen`.

    The result covers all bytes of the object in the order in which they lie in the slot. Where a
    piece was not reported, or a retry has begun, `result` hashes the slot itself.
    """

    def __init__(self, rank: RankLayout, key: bytes, slot: Bytes) -> None:
        self._rank = rank
        self._key = key
        self._slot = slot
        self._template: SlotTemplate | None = None
        self._hasher = payload_hasher()
        self._received_bytes = 0
        self._verified_bytes = -1
        self._found: SegmentMeta | Exception | None = None

    def __call__(self, size_bytes: int, first: int, last: int) -> None:
        """In the receiving thread: these bytes are in the slot. A size of 0 begins a retry."""
        if not size_bytes:
            self._template, self._verified_bytes = None, -1
            return
        if first == 0:
            self._begin(size_bytes)
        template = self._template
        if template is None or first != self._received_bytes:
            self._template = None
            return
        self._received_bytes = last
        start = template.payload_offset
        payload = self._slot[max(first, start) : min(last, start + template.payload_bytes)]
        if payload.size:
            self._hasher.update(payload.data)
        if last == size_bytes:
            self._finish(size_bytes)

    def _begin(self, size_bytes: int) -> None:
        self._received_bytes, self._verified_bytes = 0, -1
        self._hasher = payload_hasher()
        try:
            self._template = self._rank.templates.for_image_bytes(size_bytes)
        except Exception:
            # Blocks of another size, damage, or a bug. `result` tells which, given all bytes.
            self._template = None

    def _finish(self, size_bytes: int) -> None:
        digest = self._hasher.digest()
        try:
            self._found = self._verify(self._slot[:size_bytes], digest)
        except Exception as error:
            # `result` raises it: for the receiving thread this is not a failure of the store.
            # Its traceback would keep this object, and through it a view of the slot.
            self._found = error.with_traceback(None)
        self._verified_bytes = size_bytes

    def has_verified(self, num_bytes: int) -> bool:
        """Whether an object of that size was hashed while it arrived."""
        return self._verified_bytes == num_bytes

    def result(self, num_bytes: int) -> SegmentMeta | None:
        """What the object holds; None where its blocks have another size. Raises `ChunkCorrupt`.

        Without `has_verified` this hashes the slot: call it in a thread.
        """
        if not self.has_verified(num_bytes):
            return self._verify(self._slot[:num_bytes], None)
        if isinstance(self._found, Exception):
            raise self._found
        return self._found

    def _verify(self, image: Bytes, digest: bytes | None) -> SegmentMeta | None:
        rank = self._rank
        if rank.as_stored(image) is not rank:
            return None
        template = rank.templates.for_image_bytes(len(image))
        return template.verify(image, self._key, digest=digest)


def _build(
    rank: RankLayout, slot: Bytes, key: bytes, sources: list[tuple[int, RankLayout, Bytes]]
) -> SegmentMeta:
    """In a thread: verify the sources, given as (bit, holder, image), and seal `slot` from them."""
    meta: SegmentMeta | None = None
    payloads: list[tuple[ChunkLayout, Bytes]] = []
    for bit, holder, image in sources:
        try:
            source = holder.as_stored(image)
            found, payload = source.templates.read(image, key)
            _require_compatible(found, meta or found, rank.layout)
        except ChunkCorrupt as error:
            raise SourceError(bit, fingerprint(image)) from error
        meta = meta or found
        payloads.append((source.layout, payload))
    assert meta is not None, "a read has a source"
    num_tokens = len(meta.token_ids) // TOKEN_BYTES
    template = rank.templates[num_tokens // rank.layout.block_tokens]
    template.prepare(slot)
    for layout, payload in payloads:
        copy_overlap(layout, payload, rank.layout, template.payload(slot), num_tokens)
    checksum = template.seal(slot, key, meta.parent, meta.token_ids)
    return SegmentMeta(key, meta.parent, meta.token_ids, checksum, template.num_blocks)


def _require_compatible(meta: SegmentMeta, first: SegmentMeta, layout: ChunkLayout) -> None:
    if (meta.parent, meta.token_ids) != (first.parent, first.token_ids):
        raise ImageKeyMismatch(
            "the parts of a chunk differ in parent, length or tokens: one of them was stored "
            "under a wrong name; it is not used"
        )
    num_tokens = len(meta.token_ids) // TOKEN_BYTES
    if num_tokens % layout.block_tokens:
        raise ImageKeyMismatch(
            f"the image has {num_tokens} tokens, which do not fill blocks of "
            f"{layout.block_tokens}: no engine here can have requested it; it is not used"
        )


def _same_damage(error: SourceError, image: Bytes, holder: RankLayout, key: bytes) -> bool:
    """In a thread: whether `image` is what came the first time, and is wrong again."""
    if fingerprint(image) != error.received:
        return False
    if not is_damaged(error.__cause__):
        return True
    # The bytes may have been right, and only the first hash of them wrong.
    try:
        holder.as_stored(image).templates.read(image, key)
    except ChunkCorrupt:
        return True
    return False


def fingerprint(image: Bytes) -> bytes:
    """Tells two arrivals of one object apart."""
    hasher = payload_hasher()
    hasher.update(image.data)
    return hasher.digest()


def is_of_another_layout(error: BaseException, *, foreign: bool) -> bool:
    """Whether a source may be intact, and is of use to others."""
    return isinstance(error, ImageFormatMismatch) or (foreign and not is_damaged(error))


def is_damaged(error: BaseException | None) -> bool:
    """Whether a source is damaged for every reader, and not only unusable here.

    An intact object of another cluster may have another geometry under the same name. Only an
    object with the expected header and other bytes is certainly damaged.
    """
    return isinstance(error, ImageChecksumMismatch | ObjectOdd)

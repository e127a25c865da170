"""The slot image: one segment as one Arrow IPC file, made by patching a template.

Owns how an image is made, and which bytes must be equal for it to be accepted. Does not own the
columns and their order (`arrow_file.py`), slots (`pool/host_pool.py`) or geometry (`layout.py`).

An image is header, payload, footer. Header and footer are constant for a geometry and written once
by pyarrow; an image is made by copying them and patching the row's fields in place.

Invariants:

* Images of one (layout, blocks, namespace) differ only in the patched fields and the payload, so
  two clusters that store the same chunk write the same object.
* Every byte of a verified image was checked: against the template, or by `row_xxh3` or `kv_xxh3`.
  Of 300 bit flips in an image's metadata Arrow readers accepted 20, with other data. Foreign bytes
  are therefore only compared, never parsed. Truncation shows in the length.
* `SlotTemplates.read` also takes row and payload out of an image with other bytes around them, as
  another release or pyarrow may write. Every byte that it returns was checked by a digest.
"""

import bisect
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash
from numpy.lib.stride_tricks import sliding_window_view

from tiers.errors import (
    ChunkCorrupt,
    ImageChecksumMismatch,
    ImageFormatMismatch,
    ImageHeaderMismatch,
    ImageKeyMismatch,
    ImageNamespaceMismatch,
    ImageTruncated,
    LayoutError,
)
from tiers.kv.arrow_file import (
    CHECKSUM_BYTES,
    FORMAT,
    KEY_BYTES,
    PAD_BYTES_MIN,
    PAGE_BYTES,
    Descriptor,
    find_descriptor,
    has_other_format,
    write_skeleton,
)
from tiers.kv.layout import Bytes, ChunkLayout, Segment

_ALIGNMENT_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class SegmentMeta:
    """The row of a verified image. `token_ids` are little-endian int32 bytes."""

    key: bytes
    parent: bytes
    token_ids: bytes
    checksum: bytes
    num_blocks: int


@dataclass(frozen=True, slots=True)
class SegmentReport:
    """The result of `inspect_image`. `error` is None for an intact image."""

    image_bytes: int
    descriptor: Descriptor | None
    meta: SegmentMeta | None
    error: ChunkCorrupt | None


class SlotTemplate:
    """The image of `num_blocks` blocks of one layout in one namespace.

    Arguments named `slot` are uint8 arrays of at least `image_bytes`, the image at their start.
    """

    def __init__(self, layout: ChunkLayout, num_blocks: int, namespace_digest: bytes) -> None:
        if len(namespace_digest) != KEY_BYTES:
            raise LayoutError(
                f"namespace_digest has {len(namespace_digest)} bytes: a digest has {KEY_BYTES}"
            )
        self.layout = layout
        self.num_blocks = num_blocks
        self.namespace_digest = namespace_digest
        self.token_bytes = num_blocks * layout.block_tokens * 4
        self.payload_bytes = layout.payload_bytes(num_blocks)
        skeleton = write_skeleton(layout, num_blocks, namespace_digest)
        offsets = skeleton.offsets
        self.payload_offset: int = offsets["kv"]
        """One page, but more for chunks of more than about 600 tokens."""
        self._header = bytes(skeleton.header)
        self._footer = bytes(skeleton.footer)
        self._footer_offset = self.payload_offset + self.payload_bytes
        self.image_bytes = self._footer_offset + len(self._footer)

        def field(name: str, size_bytes: int) -> slice:
            return slice(offsets[name], offsets[name] + size_bytes)

        self._key = field("block_hash", KEY_BYTES)
        self._parent = field("parent_hash", KEY_BYTES)
        self.checksum = field("kv_xxh3", CHECKSUM_BYTES)
        self._token_ids = field("token_ids", self.token_bytes)
        self.row_checksum = field("row_xxh3", CHECKSUM_BYTES)
        # The columns are adjacent: one hash covers key, parent, checksum and tokens.
        self.row = slice(self._key.start, self._token_ids.stop)
        # The padding after an odd number of token ids is constant.
        self._constant = (
            slice(0, self.row.start),
            slice(self.row.stop, self.row_checksum.start),
            slice(self.row_checksum.stop, self.payload_offset),
        )
        self._header_array: Bytes = np.frombuffer(self._header, dtype=np.uint8)
        self._footer_array: Bytes = np.frombuffer(self._footer, dtype=np.uint8)

    def payload(self, slot: Bytes) -> Bytes:
        """The payload in `slot`, as a view."""
        self._require_room(slot)
        return slot[self.payload_offset : self._footer_offset]

    def prepare(self, slot: Bytes) -> None:
        """Write header and footer. The image is complete with its payload and `seal`."""
        self._require_room(slot)
        slot[: self.payload_offset] = self._header_array
        slot[self._footer_offset : self.image_bytes] = self._footer_array

    def seal(
        self,
        slot: Bytes,
        key: bytes,
        parent: bytes,
        token_ids: bytes,
        *,
        checksum: bytes | None = None,
    ) -> bytes:
        """Patch the row; returns the payload's checksum.

        `token_ids` are little-endian int32 bytes, one id for each token of the blocks. `checksum`
        is the digest of a `payload_hasher` that saw the payload during its copy; without it the
        payload is hashed now. Raises `LayoutError` for a field of another size.
        """
        if checksum is None:
            checksum = _digest(self.payload(slot))
        fields = (
            ("key", KEY_BYTES, key),
            ("parent", KEY_BYTES, parent),
            ("checksum", CHECKSUM_BYTES, checksum),
            ("token_ids", self.token_bytes, token_ids),
        )
        for name, size_bytes, value in fields:
            if len(value) != size_bytes:
                raise LayoutError(
                    f"{name} has {len(value)} bytes: an image of {self.num_blocks} blocks of "
                    f"{self.layout.block_tokens} tokens needs exactly {size_bytes}"
                )
        row, view = b"".join((key, parent, checksum, token_ids)), slot.data
        view[self.row] = row
        view[self.row_checksum] = xxhash.xxh3_128_digest(row)
        return checksum

    def verify(
        self,
        image: Bytes | memoryview | bytes,
        key: bytes | None = None,
        *,
        digest: bytes | None = None,
    ) -> SegmentMeta:
        """Check every byte of a foreign `image`; with `key`, also that it is that chunk.

        `digest` is that of a `payload_hasher` that saw the payload arrive; without it the payload
        is hashed now. Raises, in the order of the checks: `ImageTruncated` (length),
        `ImageNamespaceMismatch` or `ImageHeaderMismatch` (constant bytes, then the row),
        `ImageKeyMismatch`, `ImageChecksumMismatch` (payload).
        """
        view: Bytes = np.frombuffer(image, dtype=np.uint8)
        if view.size != self.image_bytes:
            raise ImageTruncated(
                f"image has {view.size} bytes: {self.num_blocks} blocks of this layout make "
                f"exactly {self.image_bytes}; read it again or quarantine it"
            )
        header = view[: self.payload_offset].tobytes()
        if any(header[place] != self._header[place] for place in self._constant):
            raise self._header_error(header)
        if view[self._footer_offset :].tobytes() != self._footer:
            raise ImageHeaderMismatch(
                "the Arrow footer differs from this layout's template; quarantine the image"
            )
        if _digest(view[self.row]) != view[self.row_checksum].tobytes():
            raise ImageHeaderMismatch(
                "row_xxh3 differs from the hash of block_hash, parent_hash, kv_xxh3 and "
                "token_ids: the row was damaged; quarantine the image"
            )
        meta = SegmentMeta(
            key=view[self._key].tobytes(),
            parent=view[self._parent].tobytes(),
            token_ids=view[self._token_ids].tobytes(),
            checksum=view[self.checksum].tobytes(),
            num_blocks=self.num_blocks,
        )
        if key is not None and meta.key != key:
            raise ImageKeyMismatch(
                f"block_hash={meta.key.hex()}: the image is intact but {key.hex()} was asked for; "
                "it is stored under a wrong name"
            )
        self.check(view, _digest(self.payload(view)) if digest is None else digest)
        return meta

    def find(self, image: Bytes, key: bytes) -> tuple[SegmentMeta, Bytes] | None:
        """Row and payload of `key` in an image with another header or footer, else None.

        Its descriptor must be equal: then the columns have the same order and meaning, and both
        digests have to hold. The key tells where the columns begin.
        """
        header = image[: self.payload_offset + PAGE_BYTES].tobytes()
        shift = header.find(key) - self._key.start
        if shift < -self._key.start or find_descriptor(header) != find_descriptor(self._header):
            return None

        def column(place: slice) -> bytes:
            return header[place.start + shift : place.stop + shift]

        pad = self.row_checksum.stop + shift + PAD_BYTES_MIN
        start = -(-pad // PAGE_BYTES) * PAGE_BYTES
        payload = image[start : start + self.payload_bytes]
        checksum = column(self.checksum)
        if (
            xxhash.xxh3_128_digest(column(self.row)) != column(self.row_checksum)
            or payload.size != self.payload_bytes
            or _digest(payload) != checksum
        ):
            return None
        tokens = column(self._token_ids)
        return SegmentMeta(key, column(self._parent), tokens, checksum, self.num_blocks), payload

    def token_ids(self, slot: Bytes) -> list[int]:
        """The token ids in a sealed slot, unverified."""
        tokens: list[int] = slot[self._token_ids].view("<i4").tolist()
        return tokens

    def verify_payload(self, slot: Bytes) -> None:
        """Raise `ImageChecksumMismatch` unless the payload has the checksum in the row.

        Enough for a slot that this process sealed or verified before.
        """
        self.check(slot, _digest(self.payload(slot)))

    def check(self, slot: Bytes, found: bytes) -> None:
        """`verify_payload` with the digest of a `payload_hasher`."""
        expected = slot[self.checksum].tobytes()
        if found != expected:
            raise ImageChecksumMismatch(
                f"payload hashes to {found.hex()}, kv_xxh3 says {expected.hex()}: the bytes are "
                "not those that left the engine; quarantine the image"
            )

    def examine(
        self, memory: Bytes, offsets: npt.NDArray[np.int64]
    ) -> list[tuple[bytes, bytes] | None]:
        """Key and parent of the image at each offset, None for one that `verify` would refuse.

        Checks everything but the payload. Each image must lie within `memory`.
        """
        # Each row of this view is the header at one offset; indexing copies the selected ones.
        heads = sliding_window_view(memory, self.payload_offset)[offsets]
        feet = sliding_window_view(memory, len(self._footer))[offsets + self._footer_offset]
        good: npt.NDArray[np.bool_] = (feet == self._footer_array).all(axis=1)
        for place in self._constant:
            good &= (heads[:, place] == self._header_array[place]).all(axis=1)
        found: list[tuple[bytes, bytes] | None] = []
        for head, constant in zip(heads, good.tolist(), strict=True):
            row = head[self.row]
            if constant and _digest(row) == head[self.row_checksum].tobytes():
                found.append((head[self._key].tobytes(), head[self._parent].tobytes()))
            else:
                found.append(None)
        return found

    def _require_room(self, slot: Bytes) -> None:
        if slot.size < self.image_bytes:
            raise LayoutError(
                f"slot has {slot.size} bytes: an image of {self.num_blocks} blocks needs "
                f"{self.image_bytes}"
            )

    def _header_error(self, header: bytes) -> ChunkCorrupt:
        descriptor = find_descriptor(header)
        if descriptor is not None and descriptor.namespace != self.namespace_digest.hex():
            return ImageNamespaceMismatch(
                f"namespace={descriptor.namespace}: expected {self.namespace_digest.hex()}; the "
                "image was written for another model, dtype, geometry or encoding"
            )
        return ImageHeaderMismatch(
            "the Arrow header differs from this layout's template: the image was damaged, or "
            "another release wrote it"
        )


class SlotTemplates:
    """Templates of one layout and namespace, created on demand."""

    def __init__(self, layout: ChunkLayout, namespace_digest: bytes) -> None:
        if layout.block_payload_bytes < _ALIGNMENT_BYTES:
            raise LayoutError(
                f"block_payload_bytes={layout.block_payload_bytes}: must be at least "
                f"{_ALIGNMENT_BYTES}, Arrow's alignment, or images of different numbers of blocks "
                "have the same length"
            )
        self.layout = layout
        self.namespace_digest = namespace_digest
        self._by_blocks: dict[int, SlotTemplate] = {}
        """Two threads may create the same template at once; both are equal."""
        largest = self[layout.blocks_per_chunk].image_bytes
        self.slot_bytes = -(-largest // PAGE_BYTES) * PAGE_BYTES

    def __getitem__(self, num_blocks: int) -> SlotTemplate:
        """The template for `num_blocks`, between 1 and the layout's `blocks_per_chunk`."""
        template = self._by_blocks.get(num_blocks)
        if template is None:
            template = SlotTemplate(self.layout, num_blocks, self.namespace_digest)
            self._by_blocks[num_blocks] = template
        return template

    def for_image_bytes(self, image_bytes: int) -> SlotTemplate:
        """The template whose image has that length. Raises `ImageTruncated` without one."""
        full = self[self.layout.blocks_per_chunk]
        if image_bytes == full.image_bytes:
            # Nearly all are. A search would create some others first, a millisecond for each.
            return full
        counts = range(1, self.layout.blocks_per_chunk)
        place = bisect.bisect_left(counts, image_bytes, key=lambda blocks: self[blocks].image_bytes)
        template = self[1 + place]
        if template.image_bytes != image_bytes:
            raise ImageTruncated(
                f"image has {image_bytes} bytes: no number of blocks from 1 to "
                f"{self.layout.blocks_per_chunk} makes that length "
                f"({template.num_blocks} make {template.image_bytes}); quarantine it"
            )
        return template

    def read(self, image: Bytes, key: bytes) -> tuple[SegmentMeta, Bytes]:
        """Row and payload of a foreign image of `key`, verified, whatever release wrote it.

        Raises as `for_image_bytes` and `SlotTemplate.verify`, and `ImageFormatMismatch`.
        """
        try:
            template = self.for_image_bytes(len(image))
            return template.verify(image, key), template.payload(image)
        except (ImageHeaderMismatch, ImageTruncated) as error:
            header = image[:PAGE_BYTES].tobytes()
            if has_other_format(header):
                raise ImageFormatMismatch(
                    f"the image has another format than {FORMAT}: a later release wrote it; it is "
                    "not used"
                ) from error
            claimed = find_descriptor(header)
            if claimed is not None and 0 < claimed.blocks <= self.layout.blocks_per_chunk:
                found = self[claimed.blocks].find(image, key)
                if found is not None:
                    return found
            raise


def inspect_image(buffer: Bytes | memoryview | bytes) -> SegmentReport:
    """Verify an image of unknown origin against the template that its descriptor claims.

    Bad bytes raise nothing: the report has the error. No Arrow parser is involved.
    """
    view: Bytes = np.frombuffer(buffer, dtype=np.uint8)
    descriptor = find_descriptor(view[:PAGE_BYTES].tobytes())
    if descriptor is None:
        error = "no kvlake descriptor in the first page: not a segment image, or damaged"
        return SegmentReport(view.size, None, None, ImageHeaderMismatch(error))
    try:
        meta = claimed_template(descriptor, view.size).verify(view)
    except ChunkCorrupt as error:
        return SegmentReport(view.size, descriptor, None, error)
    return SegmentReport(view.size, descriptor, meta, None)


def claimed_template(descriptor: Descriptor, image_bytes: int) -> SlotTemplate:
    """The template of a foreign descriptor. Costs no more than the image's own size.

    Raises `ChunkCorrupt` for an impossible layout, or one of more than `image_bytes`.
    """
    if descriptor.format != FORMAT:
        raise ImageHeaderMismatch(
            f"format={descriptor.format}: this release reads format {FORMAT}; use one that "
            "reads both"
        )
    try:
        layout = ChunkLayout(
            segment=Segment.parse(descriptor.segment),
            blocks_per_chunk=descriptor.blocks,
            block_tokens=descriptor.block_tokens,
            content_bytes=descriptor.content_bytes,
            dtype=descriptor.dtype,
            encoding=descriptor.encoding,
            entry_tokens=descriptor.entry_tokens,
        )
        claimed_bytes = layout.payload_bytes(descriptor.blocks)
        claimed_bytes += descriptor.blocks * descriptor.block_tokens * 4
        if claimed_bytes > image_bytes:
            raise ImageTruncated(
                f"image has {image_bytes} bytes: its descriptor claims more than {claimed_bytes}"
            )
        return SlotTemplate(layout, descriptor.blocks, bytes.fromhex(descriptor.namespace))
    except ValueError as error:
        raise ImageHeaderMismatch(f"the descriptor claims an impossible layout: {error}") from error


def payload_hasher() -> xxhash.xxh3_128:
    """A running hash of a payload, for `seal` and `check`; its `update` takes pieces in order."""
    return xxhash.xxh3_128()


def _digest(view: Bytes) -> bytes:
    return xxhash.xxh3_128_digest(view.data)

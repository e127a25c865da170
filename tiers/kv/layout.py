"""Geometry of one worker's KV cache and of a chunk.

Owns what a layout means, and its checks, and the order of the tokens within the bytes of one
(block, head), for encodings with a known order. Does not own bytes (`copy.py` and `reshard.py` move
them), nor encodings' names (the connector's `namespace.py`). The connector imports this module, and
a peer's layout is decoded into it: numpy and msgspec only, and every number is bounded before it is
used.

Invariants, checked at construction:

* A layout is affine: `offset = layer_offset[layer] + block * block_stride + head * head_stride +
  token * token_stride`, and `content_bytes` bytes from there on belong to that coordinate alone.
  Recurrent layers keep one state for all tokens of a block: one entry on the token axis, which then
  stands for `entry_tokens` of them.
* Every such byte range lies inside the exported allocation.
* A payload is in C order `[blocks, layers, heads, tokens, content]`, whatever the engine's order.
"""

import functools
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tiers.errors import LayoutError

Bytes = npt.NDArray[np.uint8]

LAYERS_MAX: Final = 1024
HEADS_MAX: Final = 65_536
BLOCK_TOKENS_MAX: Final = 65_536
BLOCKS_PER_CHUNK_MAX: Final = 65_536
CHUNK_TOKENS_MAX: Final = 65_536
"""A chunk's token ids are in its image's header; the sidecar keeps a header for each length."""
BLOCK_ENTRIES_MAX: Final = 1 << 24
"""(layer, head, token) of one block: a copy plan has 8 bytes for each."""
CONTENT_BYTES_MAX: Final = 1 << 24
NUM_BLOCKS_MAX: Final = 1 << 31
SIZE_BYTES_MAX: Final = 1 << 47
ENCODING_CHARACTERS_MAX: Final = 128
PAYLOAD_BYTES_MAX: Final = (1 << 31) - 1
"""The width of a fixed-size list is an int32 in Arrow."""

ITEM_BYTES: Final[dict[str, int]] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "int8": 1,
    "uint8": 1,
}
"""Bytes of one element, by the torch name of its type."""

ROW_ENCODING: Final = "vllm-offloading"
"""Encoding of chunks that are rows of vLLM's own offloading: opaque, with unknown token ids."""

BY_TOKEN: Final = "+token"  # noqa: S105 (a token of text)
"""Suffix of an encoding that stores the content of a token contiguously, in any order."""

_AMX_TOKENS: Final = 16
_AMX_DIMENSIONS: Final = 16

_VECTOR_DTYPES: Final = ("float32", "float16", "bfloat16")
_ENCODING_DTYPES: Final[dict[str, tuple[str, ...]]] = {
    "cpu-x86-vec": _VECTOR_DTYPES,
    "cpu-x86-vec16": _VECTOR_DTYPES,
    "cpu-x86-amx": ("bfloat16",),
}
"""Encodings whose planes are known. The tests compare them with what the kernels write."""

_NUMBER = "(0|[1-9][0-9]{0,8})"
_SEGMENT_NAME = re.compile(rf"{_NUMBER}-{_NUMBER}\.{_NUMBER}-{_NUMBER}")
_ENCODING = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._+:-]{{0,{ENCODING_CHARACTERS_MAX - 1}}}")


def _require_range(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise LayoutError(f"{field}={value}: must be between {low} and {high}")


class Segment(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """The part of a model that one worker holds: a layer range times a KV head range."""

    first_layer: int
    num_layers: int
    first_head: int
    num_heads: int

    def __post_init__(self) -> None:
        _require_range("first_layer", self.first_layer, 0, LAYERS_MAX - 1)
        _require_range("num_layers", self.num_layers, 1, LAYERS_MAX)
        _require_range("first_head", self.first_head, 0, HEADS_MAX - 1)
        _require_range("num_heads", self.num_heads, 1, HEADS_MAX)

    @property
    def name(self) -> str:
        """Half-open ranges of layers and heads: layers 0 to 7, heads 0 to 3 is `0-8.0-4`."""
        last_layer = self.first_layer + self.num_layers
        last_head = self.first_head + self.num_heads
        return f"{self.first_layer}-{last_layer}.{self.first_head}-{last_head}"

    @classmethod
    def parse(cls, name: str) -> "Segment":
        """The segment of a canonical name. Raises `LayoutError` for any other."""
        # The slice keeps a hostile name of megabytes out of the expression and the message.
        match = _SEGMENT_NAME.fullmatch(name[:64])
        if match is None or len(name) > 64:
            raise LayoutError(
                f"segment={name[:64]!r}: must look like '0-8.0-4' (layers 0 to 7, heads 0 to 3)"
            )
        first_layer, last_layer, first_head, last_head = (int(part) for part in match.groups())
        return cls(first_layer, last_layer - first_layer, first_head, last_head - first_head)


class ChunkLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """A chunk of one worker outside the engine: shape, element type, encoding.

    Bytes are in C order `[blocks, layers, heads, tokens, content]`. `content_bytes` is the size of
    one (layer, head, token): K and V packed. An entry of the token axis stands for `entry_tokens`
    tokens: one, or all of a block for recurrent layers.
    """

    segment: Segment
    blocks_per_chunk: int
    block_tokens: int
    content_bytes: int
    dtype: str
    encoding: str
    entry_tokens: int = 1

    def __post_init__(self) -> None:
        _require_range("blocks_per_chunk", self.blocks_per_chunk, 1, BLOCKS_PER_CHUNK_MAX)
        _require_range("block_tokens", self.block_tokens, 1, BLOCK_TOKENS_MAX)
        _require_range("entry_tokens", self.entry_tokens, 1, self.block_tokens)
        if self.block_tokens % self.entry_tokens:
            raise LayoutError(
                f"entry_tokens={self.entry_tokens}: does not divide block_tokens="
                f"{self.block_tokens}"
            )
        if self.dtype not in ITEM_BYTES:
            raise LayoutError(f"dtype={self.dtype!r}: must be one of {', '.join(ITEM_BYTES)}")
        if not _ENCODING.fullmatch(self.encoding[: ENCODING_CHARACTERS_MAX + 1]):
            raise LayoutError(
                f"encoding={self.encoding[:ENCODING_CHARACTERS_MAX]!r}: must be 1 to "
                f"{ENCODING_CHARACTERS_MAX} letters, digits or ._+:- and start with a letter or "
                "digit"
            )
        _require_range("content_bytes", self.content_bytes, 1, CONTENT_BYTES_MAX)
        if self.content_bytes % self.itemsize:
            raise LayoutError(
                f"content_bytes={self.content_bytes}: must be a multiple of the {self.itemsize} "
                f"bytes of one {self.dtype}"
            )
        chunk_tokens = self.blocks_per_chunk * self.block_tokens
        _require_range("blocks_per_chunk * block_tokens", chunk_tokens, 1, CHUNK_TOKENS_MAX)
        entries = self.block_payload_bytes // self.content_bytes
        _require_range("layers * heads * block_entries", entries, 1, BLOCK_ENTRIES_MAX)
        payload_bytes = self.blocks_per_chunk * self.block_payload_bytes
        if payload_bytes > PAYLOAD_BYTES_MAX:
            raise LayoutError(
                f"blocks_per_chunk={self.blocks_per_chunk}: a chunk of {payload_bytes} bytes is "
                f"over the {PAYLOAD_BYTES_MAX} that Arrow can hold; use fewer tokens per chunk"
            )

    @property
    def itemsize(self) -> int:
        """Size of one element in bytes."""
        return ITEM_BYTES[self.dtype]

    @property
    def block_entries(self) -> int:
        """Entries of one (block, layer, head)."""
        return self.block_tokens // self.entry_tokens

    @functools.cached_property
    def block_payload_bytes(self) -> int:
        """Bytes of one block of this segment."""
        heads = self.segment.num_layers * self.segment.num_heads
        return heads * self.block_entries * self.content_bytes

    @property
    def geometry(self) -> "ChunkLayout":
        """The same layout for chunks of one block, so that it does not depend on the chunk size."""
        return msgspec.structs.replace(self, blocks_per_chunk=1)

    def payload_bytes(self, num_blocks: int) -> int:
        """Bytes of `num_blocks` blocks, between 1 and `blocks_per_chunk`."""
        _require_range("num_blocks", num_blocks, 1, self.blocks_per_chunk)
        return num_blocks * self.block_payload_bytes

    def shape(self, num_blocks: int) -> tuple[int, int, int, int, int]:
        """`(blocks, layers, heads, tokens, content elements)` of a chunk of `num_blocks`."""
        _require_range("num_blocks", num_blocks, 1, self.blocks_per_chunk)
        content = self.content_bytes // self.itemsize
        segment = self.segment
        return num_blocks, segment.num_layers, segment.num_heads, self.block_entries, content


class KVLayout(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, dict=True
):
    """Where one KV cache group lies in the memory that a worker exported.

    `size_bytes` is the exported allocation, `layer_offsets_bytes` has the offset of block 0,
    head 0, token 0 of each layer. A stride whose axis has one entry is not used. `entry_tokens` is
    as in `ChunkLayout`.
    """

    segment: Segment
    num_blocks: int
    block_tokens: int
    content_bytes: int
    dtype: str
    encoding: str
    size_bytes: int
    layer_offsets_bytes: tuple[int, ...]
    block_stride_bytes: int
    head_stride_bytes: int
    token_stride_bytes: int
    entry_tokens: int = 1

    def __post_init__(self) -> None:
        _require_range("num_blocks", self.num_blocks, 1, NUM_BLOCKS_MAX)
        _require_range("size_bytes", self.size_bytes, 1, SIZE_BYTES_MAX)
        self.chunk(1)  # Checks the fields that both have.
        if len(self.layer_offsets_bytes) != self.segment.num_layers:
            raise LayoutError(
                f"layer_offsets_bytes has {len(self.layer_offsets_bytes)} entries: must have one "
                f"for each of the segment's {self.segment.num_layers} layers"
            )
        axes = [
            ("block", self.block_stride_bytes, self.num_blocks),
            ("head", self.head_stride_bytes, self.segment.num_heads),
            ("token", self.token_stride_bytes, self.block_entries),
        ]
        for name, stride, _ in axes:
            _require_range(f"{name}_stride_bytes", stride, 0, SIZE_BYTES_MAX)
        nested = self._nest(axes)
        last = sum(stride * (count - 1) for _, stride, count in axes)
        for layer, offset in enumerate(self.layer_offsets_bytes):
            end = offset + last + self.content_bytes
            if offset < 0 or end > self.size_bytes:
                raise LayoutError(
                    f"layer_offsets_bytes[{layer}]={offset}: the layer spans bytes {offset} to "
                    f"{end}, outside the allocation of size_bytes={self.size_bytes}"
                )
        self._refuse_shared_layers(nested)

    @property
    def block_entries(self) -> int:
        """Entries of one (block, layer, head)."""
        return self.block_tokens // self.entry_tokens

    def _nest(self, axes: list[tuple[str, int, int]]) -> list[tuple[int, int]]:
        """(stride, count) of the used axes, outermost first. Raises if two axes overlap.

        Each stride must be at least the extent of everything inside it: stricter than needed, but
        all of vLLM's layouts nest, and the general check is a search.
        """
        used = sorted((stride, count, name) for name, stride, count in axes if count > 1)
        extent_bytes = self.content_bytes
        for stride, count, name in used:
            if stride < extent_bytes:
                raise LayoutError(
                    f"{name}_stride_bytes={stride}: must be at least {extent_bytes}, the extent of "
                    "what one entry of that axis holds, or entries overlap"
                )
            extent_bytes += stride * (count - 1)
        return [(stride, count) for stride, count, _ in reversed(used)]

    def _refuse_shared_layers(self, nested: list[tuple[int, int]]) -> None:
        """Raise if any byte belongs to two layers.

        All layers have the same shape, so only the distances between their offsets matter. At each
        axis the rest of a distance lies between its floor and its ceiling in strides (an entry is
        shorter than the stride), so two candidates per axis are enough.
        """
        offsets: npt.NDArray[np.int64] = np.array(self.layer_offsets_bytes, dtype=np.int64)
        offsets.sort()
        rows, columns = np.triu_indices(len(offsets), k=1)
        distances: npt.NDArray[np.int64] = np.unique(offsets[columns] - offsets[rows])
        rest = distances[:, np.newaxis]
        for stride, count in nested:
            steps = rest // stride
            candidates = np.concatenate((steps, steps + 1), axis=1).clip(1 - count, count - 1)
            rest = np.concatenate((rest, rest), axis=1) - candidates * stride
        shared = (np.abs(rest) < self.content_bytes).any(axis=1)
        if shared.any():
            raise LayoutError(
                f"layer_offsets_bytes: two layers that lie {int(distances[shared][0])} bytes apart "
                "share memory; give each layer that owns KV memory once"
            )

    @classmethod
    def from_views(
        cls,
        segment: Segment,
        views: Sequence[tuple[int, tuple[int, ...], tuple[int, ...]]],
        *,
        itemsize: int,
        dtype: str,
        encoding: str,
        size_bytes: int,
        entry_tokens: int = 1,
    ) -> "KVLayout":
        """The layout of per-layer views `(offset_bytes, shape, strides_bytes)`.

        Shapes are `(blocks, heads, tokens, content elements)`, as in vLLM's
        `create_kv_cache_views`. Raises `LayoutError` unless all shapes and strides are equal.
        """
        if ITEM_BYTES.get(dtype) != itemsize:
            raise LayoutError(
                f"itemsize={itemsize}: dtype {dtype!r} has {ITEM_BYTES.get(dtype, 'no known')} "
                "bytes per element"
            )
        shape, strides = views[0][1], views[0][2]
        if len(shape) != 4 or len(strides) != 4:
            raise LayoutError(
                f"views[0] has shape {shape} and strides {strides}: both must have the four axes "
                "blocks, heads, tokens, content"
            )
        for layer, (_, other_shape, other_strides) in enumerate(views):
            if (other_shape, other_strides) != (shape, strides):
                raise LayoutError(
                    f"views[{layer}] has shape {other_shape} and strides {other_strides}: all "
                    f"layers of a group must have those of layer 0, {shape} and {strides}"
                )
        if shape[3] > 1 and strides[3] != itemsize:
            raise LayoutError(
                f"views[0] has content stride {strides[3]}: content must be contiguous, a stride "
                f"of {itemsize} bytes"
            )
        if shape[1] != segment.num_heads:
            raise LayoutError(
                f"views[0] has {shape[1]} heads: the segment {segment.name} has {segment.num_heads}"
            )
        return cls(
            segment=segment,
            num_blocks=shape[0],
            block_tokens=shape[2] * entry_tokens,
            content_bytes=shape[3] * itemsize,
            dtype=dtype,
            encoding=encoding,
            size_bytes=size_bytes,
            layer_offsets_bytes=tuple(offset for offset, _, _ in views),
            block_stride_bytes=strides[0],
            head_stride_bytes=strides[1],
            token_stride_bytes=strides[2],
            entry_tokens=entry_tokens,
        )

    @functools.cached_property
    def block_payload_bytes(self) -> int:
        """Bytes of one block in a payload."""
        return self.chunk(1).block_payload_bytes

    def chunk(self, blocks_per_chunk: int) -> ChunkLayout:
        """Geometry of this worker's part of a chunk of `blocks_per_chunk` blocks."""
        return ChunkLayout(
            self.segment,
            blocks_per_chunk,
            self.block_tokens,
            self.content_bytes,
            self.dtype,
            self.encoding,
            self.entry_tokens,
        )


def head_segment(
    num_layers: int, num_heads: int, tp_rank: int, tp_size: int, *, first_layer: int = 0
) -> Segment:
    """Segment of a tensor-parallel rank that holds `num_layers` layers from `first_layer` on.

    Raises `LayoutError` if the ranks cannot share the model's KV heads equally, or would hold
    copies.
    """
    _require_range("tp_size", tp_size, 1, HEADS_MAX)
    _require_range("tp_rank", tp_rank, 0, tp_size - 1)
    if tp_size > num_heads:
        raise LayoutError(
            f"tp_size={tp_size}: is more than the model's {num_heads} KV heads, so ranks hold "
            "copies of a head and would store the same segment; use a tp_size up to the head count"
        )
    if num_heads % tp_size:
        raise LayoutError(
            f"tp_size={tp_size}: does not divide the model's {num_heads} KV heads; choose one "
            "that does"
        )
    heads = num_heads // tp_size
    return Segment(first_layer, num_layers, tp_rank * heads, heads)


class Plane(NamedTuple):
    """One part of a (block, head), K or V: `[rows, block tokens / group_tokens, unit_bytes]`.

    It is in C order. A group is the smallest number of tokens that are stored together: kernels
    place dimensions of the head outside of the tokens, or some tokens side by side, to load whole
    vectors. A block of twice the tokens has twice the groups in every row.
    """

    rows: int
    group_tokens: int
    unit_bytes: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all rows."""
        return self.rows * self.unit_bytes // self.group_tokens


def regroups(encoding: str, dtype: str) -> bool:
    """Whether blocks of this encoding can be converted to another block size."""
    return encoding.endswith(BY_TOKEN) or dtype in _ENCODING_DTYPES.get(encoding, ())


def planes_of(encoding: str, dtype: str, content_bytes: int) -> tuple[Plane, ...] | None:
    """The planes of an encoding, None if they are unknown.

    Engines with different block sizes do not share the chunks of an encoding without planes.
    `content_bytes` belong to a token in one layer and head: K and V, of equal size on CPUs.
    """
    if not regroups(encoding, dtype):
        return None
    if encoding.endswith(BY_TOKEN):
        return (Plane(1, 1, content_bytes),)
    item_bytes = ITEM_BYTES[dtype]
    half_bytes = content_bytes // 2
    if encoding == "cpu-x86-amx":
        # K as tiles of 16 tokens, V as rows of 16 dimensions with two tokens side by side.
        rows = half_bytes // item_bytes // _AMX_DIMENSIONS
        found = (
            Plane(1, _AMX_TOKENS, _AMX_TOKENS * half_bytes),
            Plane(rows, 2, 2 * _AMX_DIMENSIONS * item_bytes),
        )
    else:
        # K as [dimensions, tokens], V as [tokens, dimensions].
        found = (Plane(half_bytes // item_bytes, 1, item_bytes), Plane(1, 1, half_bytes))
    whole = sum(plane.token_bytes for plane in found) == content_bytes
    return found if whole else None

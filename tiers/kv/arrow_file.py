"""The Arrow file of one segment: its columns, its descriptor, and the offset of each column.

One row, in this order::

    block_hash   fixed_size_binary(32)     patched   the chunk's key
    parent_hash  fixed_size_binary(32)     patched   key of the chunk before it, or zeros
    kv_xxh3      fixed_size_binary(16)     patched   xxh3_128 of the bytes of `kv`
    token_ids    fixed_size_list<int32>[n] patched
    row_xxh3     fixed_size_binary(16)     patched   xxh3_128 of the four fields above, in the file
    pad          fixed_size_binary(p)      so that `kv` starts on a page
    kv           arrow.fixed_shape_tensor  [blocks, layers, heads, tokens, content]

The schema's metadata has one entry, `kvlake`: canonical JSON of `Descriptor`. Types that Arrow
lacks (bfloat16, float8) are stored as unsigned integers of their size; the descriptor names them.
It does not contain the blocks of a full chunk: engines with other chunk sizes share partial chunks.

Owns the file format; `slot_image.py` patches and verifies images.

Invariants: the result of `write_skeleton` depends on its arguments alone. Its bytes are what
pyarrow writes: if a release writes them differently, the golden files of the tests fail, and
`FORMAT` must be raised. Readers accept other bytes around the columns; those of releases up to
0.2 move such a file to `quarantine/`. Reading a foreign descriptor needs no Arrow parser.
"""

import io
import math
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import pyarrow as pa

from tiers.errors import LayoutError
from tiers.kv.layout import Bytes, ChunkLayout

FORMAT: Final = 1
PAGE_BYTES: Final = 4096
KEY_BYTES: Final = 32
CHECKSUM_BYTES: Final = 16
DESCRIPTOR_BYTES_MAX: Final = 1024
PAD_BYTES_MIN: Final = 8
T = TypeVar("T")

_DIMENSIONS: Final = ["blocks", "layers", "heads", "tokens", "content"]
_STORAGE: Final[dict[str, Any]] = {
    "float32": pa.float32(),
    "float16": pa.float16(),
    "int8": pa.int8(),
    "uint8": pa.uint8(),
}


class Descriptor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An image's own description in the schema's metadata: enough to rebuild its template.

    `entry_tokens` is omitted if it is 1, so that older files stay valid.
    """

    format: int
    namespace: str
    segment: str
    dtype: str
    encoding: str
    block_tokens: int
    content_bytes: int
    blocks: int
    entry_tokens: int = 1


_FIELDS: Final = frozenset(Descriptor.__struct_fields__)


def find_descriptor(header: bytes) -> Descriptor | None:
    """The descriptor in a header, None without a readable one.

    It is found by its first characters. Its length (uint32) is in front of it.
    """
    return _decode(header, Descriptor)


def has_other_format(header: bytes) -> bool:
    """Whether a header has a descriptor of another format, or with fields that are not known."""
    found = _decode(header, dict[str, msgspec.Raw])
    if found is None:
        return False
    return bytes(found["format"]) != b"%d" % FORMAT or not found.keys() <= _FIELDS


def _decode(header: bytes, kind: type[T]) -> T | None:
    start = header.find(b'{"format":')
    length = int.from_bytes(header[max(start - 4, 0) : max(start, 0)], "little")
    if start < 4 or length > DESCRIPTOR_BYTES_MAX:
        return None
    try:
        return msgspec.json.decode(header[start : start + length], type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


class _Skeleton(io.RawIOBase):
    """Bytes before and after the payload, and the offset of each column: what pyarrow wrote.

    pyarrow passes column data on as the given buffers, so an address identifies a column. The
    payload is zeros that were never accessed and costs no memory.
    """

    def __init__(self, columns: dict[str, Bytes]) -> None:
        super().__init__()
        self._names = {array.ctypes.data: name for name, array in columns.items()}
        self._position = 0
        self.offsets: dict[str, int] = {}
        self.header = bytearray()
        self.footer = bytearray()

    def write(self, data: Any, /) -> int:
        name = self._names.get(data.address) if isinstance(data, pa.Buffer) else None
        if name is not None:
            self.offsets[name] = self._position
        if name != "kv":
            (self.footer if "kv" in self.offsets else self.header).extend(memoryview(data))
        self._position += len(data)
        return len(data)

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position


def write_skeleton(layout: ChunkLayout, num_blocks: int, namespace_digest: bytes) -> _Skeleton:
    """Have pyarrow write the file twice: to find the offset of `kv`, then with the right pad."""
    first = _write(layout, num_blocks, namespace_digest, PAD_BYTES_MIN)
    natural = first.offsets.get("kv", 0)
    target = -(-natural // PAGE_BYTES) * PAGE_BYTES
    skeleton = _write(layout, num_blocks, namespace_digest, PAD_BYTES_MIN + target - natural)
    columns = ["block_hash", "parent_hash", "kv_xxh3", "token_ids", "row_xxh3", "pad", "kv"]
    if list(skeleton.offsets) != columns or skeleton.offsets["kv"] != target:
        raise LayoutError(
            f"pyarrow {pa.__version__} puts columns at {skeleton.offsets}, with kv expected at "
            f"{target}: this release cannot write the slot format; install another pyarrow"
        )
    return skeleton


def _write(layout: ChunkLayout, num_blocks: int, namespace: bytes, pad_bytes: int) -> _Skeleton:
    num_tokens = num_blocks * layout.block_tokens
    shape = layout.shape(num_blocks)
    value_type = _STORAGE.get(layout.dtype) or (pa.uint16() if layout.itemsize == 2 else pa.uint8())
    tensor = pa.fixed_shape_tensor(value_type, list(shape), dim_names=_DIMENSIONS)
    types: dict[str, tuple[Any, int]] = {
        "block_hash": (pa.binary(KEY_BYTES), KEY_BYTES),
        "parent_hash": (pa.binary(KEY_BYTES), KEY_BYTES),
        "kv_xxh3": (pa.binary(CHECKSUM_BYTES), CHECKSUM_BYTES),
        "token_ids": (pa.list_(pa.int32(), num_tokens), num_tokens * 4),
        "row_xxh3": (pa.binary(CHECKSUM_BYTES), CHECKSUM_BYTES),
        "pad": (pa.binary(pad_bytes), pad_bytes),
        "kv": (tensor, layout.payload_bytes(num_blocks)),
    }
    data: dict[str, Bytes] = {
        name: np.zeros(size, dtype=np.uint8) for name, (_, size) in types.items()
    }
    buffers = {name: pa.py_buffer(array) for name, array in data.items()}
    arrays: list[Any] = []
    for name, (kind, _) in types.items():
        if name == "token_ids":
            values = pa.Array.from_buffers(pa.int32(), num_tokens, [None, buffers[name]])
            arrays.append(pa.FixedSizeListArray.from_arrays(values, type=kind))
        elif name == "kv":
            values = pa.Array.from_buffers(value_type, math.prod(shape), [None, buffers[name]])
            storage = pa.FixedSizeListArray.from_arrays(values, type=tensor.storage_type)
            arrays.append(pa.ExtensionArray.from_storage(tensor, storage))
        else:
            arrays.append(pa.Array.from_buffers(kind, 1, [None, buffers[name]]))
    descriptor = Descriptor(
        format=FORMAT,
        namespace=namespace.hex(),
        segment=layout.segment.name,
        dtype=layout.dtype,
        encoding=layout.encoding,
        block_tokens=layout.block_tokens,
        content_bytes=layout.content_bytes,
        blocks=num_blocks,
        entry_tokens=layout.entry_tokens,
    )
    schema = pa.schema(
        [pa.field(name, kind, nullable=False) for name, (kind, _) in types.items()],
        metadata={b"kvlake": msgspec.json.encode(descriptor)},
    )
    skeleton = _Skeleton(data)
    options = pa.ipc.IpcWriteOptions(metadata_version=pa.ipc.MetadataVersion.V5)
    with (
        pa.PythonFile(skeleton, mode="w") as sink,
        pa.ipc.new_file(sink, schema, options=options) as writer,
    ):
        writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
    return skeleton

"""The order of the tokens within the bytes of one (block, head), for encodings with a known order.

Owns the table from an encoding's name to its planes, so that blocks of one size can be converted
to blocks of another. Does not own copying (`reshard.py`), nor encodings' names (the connector's
`namespace.py`).

A (block, head) is a sequence of planes (K and V). A plane is an array in C order
`[rows, groups, unit bytes]`. A group is the smallest number of tokens that are stored together:
kernels place dimensions of the head outside of the tokens, or some tokens side by side, to load
whole vectors. A block of twice the tokens has twice the groups in every row.

Invariants: pure. An encoding outside the table has no planes, and engines with different block
sizes do not share its chunks. The tests compare the table with what the kernels write.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from tiers.kv.layout import ITEM_BYTES

BY_TOKEN: Final = "+token"  # noqa: S105 (a token of text)
"""Suffix of an encoding that stores the content of a token contiguously, in any order."""

_AMX_TOKENS: Final = 16
_AMX_DIMENSIONS: Final = 16

_VECTOR_DTYPES: Final = ("float32", "float16", "bfloat16")
_DTYPES: Final[dict[str, tuple[str, ...]]] = {
    "cpu-x86-vec": _VECTOR_DTYPES,
    "cpu-x86-vec16": _VECTOR_DTYPES,
    "cpu-x86-amx": ("bfloat16",),
}


class Plane(NamedTuple):
    """One part of a (block, head): `[rows, block tokens / group_tokens, unit_bytes]`."""

    rows: int
    group_tokens: int
    unit_bytes: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all rows."""
        return self.rows * self.unit_bytes // self.group_tokens


def regroups(encoding: str, dtype: str) -> bool:
    """Whether blocks of this encoding can be converted to another block size."""
    return encoding.endswith(BY_TOKEN) or dtype in _DTYPES.get(encoding, ())


def planes_of(encoding: str, dtype: str, content_bytes: int) -> tuple[Plane, ...] | None:
    """The planes of an encoding, None if they are unknown.

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

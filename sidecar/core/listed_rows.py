"""Lines of the catalog as columns, as the engine is told them.

Owns the columns, taking parts of them, and making one offer for each key (`StoredColumns`). Does
not own what the lines come to (`store_view.py`), nor where they come from (`catalog/sync.py`).

Invariants: pure; columns have equal length and are never changed; of lines of one key the order is
kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from sidecar.core.stored_table import Longs, Masks, Words, packed, tags_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

KEY_BYTES: Final = 32

Keys = npt.NDArray[np.uint8]


class ListedRow(NamedTuple):
    """One line of the catalog."""

    key: bytes
    mask: int
    """Ranks whose segment it names, as bits, or the bit of a segment of another cut."""
    written_at: int
    """By the writer's clock: microseconds since 1970."""
    withdrawn: bool
    """The segments are not in the store any more, unless they were written later than that."""


@dataclass(frozen=True, slots=True, eq=False)
class ListedRows:
    """Columns of `ListedRow`."""

    keys: Keys
    """Shape [n, 32]."""
    masks: tuple[int, ...]
    """Those that there are; `masks[mask_ids[i]]` is line i's."""
    mask_ids: npt.NDArray[np.integer[Any]]
    written_at: Longs
    withdrawn: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[ListedRow]:
        columns = zip(
            self.key_list(),
            self.mask_ids.tolist(),
            self.written_at.tolist(),
            self.withdrawn.tolist(),
            strict=True,
        )
        for key, mask_id, written_at, withdrawn in columns:
            yield ListedRow(key, self.masks[mask_id], written_at, withdrawn)

    def take(self, chosen: slice | npt.NDArray[Any]) -> ListedRows:
        """The lines of this slice, of these indexes, or of this mask."""
        return ListedRows(
            self.keys[chosen],
            self.masks,
            self.mask_ids[chosen],
            self.written_at[chosen],
            self.withdrawn[chosen],
        )

    def within(self, known: int) -> ListedRows:
        """The lines that name one of the ranks in `known`, and only those ranks of them."""
        masks = tuple(mask & known for mask in self.masks)
        part = ListedRows(self.keys, masks, self.mask_ids, self.written_at, self.withdrawn)
        named = np.array(masks, dtype=object).astype(np.bool_)
        return part if named.all() else part.take(named[self.mask_ids])

    def key_list(self) -> list[bytes]:
        """The keys one by one."""
        return key_list(self.keys)


def key_list(keys: Keys) -> list[bytes]:
    """The rows of an array of keys."""
    joined = keys.tobytes()
    return [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]


def listed_rows(rows: Sequence[ListedRow]) -> ListedRows:
    """The columns of these lines."""
    masks = tuple(dict.fromkeys(row.mask for row in rows))
    number = {mask: index for index, mask in enumerate(masks)}
    joined = b"".join([row.key for row in rows])
    return ListedRows(
        keys=np.frombuffer(joined, dtype=np.uint8).reshape(len(rows), KEY_BYTES),
        masks=masks,
        mask_ids=np.array([number[row.mask] for row in rows], dtype=np.intp),
        written_at=np.array([row.written_at for row in rows], dtype=np.int64),
        withdrawn=np.array([row.withdrawn for row in rows], dtype=np.bool_),
    )


def by_key(rows: ListedRows) -> ListedRows:
    """The same lines in order of their keys, and those of one key in the order that they had."""
    high, low = tags_of(rows.keys)
    if _is_sorted(high, low):
        return rows
    return rows.take(np.lexsort((low, high)))


class StoredColumns(NamedTuple):
    """One line for each key, sorted: what all lines of it offer together."""

    keys: Keys
    high: Words
    low: Words
    masks: Masks
    written_at: Longs
    """When the newest was written."""


def offers_of(rows: ListedRows) -> StoredColumns:
    """What lines come to of which none withdraws, and none names no rank."""
    rows = by_key(rows)
    high, low = tags_of(rows.keys)
    width = max((mask.bit_length() + 7) // 8 for mask in rows.masks)
    masks = packed(list(rows.masks), width)[rows.mask_ids]
    written_at = np.maximum(rows.written_at, 1)
    new = np.ones(len(rows), dtype=np.bool_)
    new[1:] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
    if new.all():
        return StoredColumns(rows.keys, high, low, masks, written_at)
    starts = np.flatnonzero(new)
    return StoredColumns(
        rows.keys[starts],
        high[starts],
        low[starts],
        np.bitwise_or.reduceat(masks, starts, axis=0),
        np.maximum.reduceat(written_at, starts),
    )


def _is_sorted(high: Words, low: Words) -> bool:
    before, after = high[:-1], high[1:]
    return bool(np.all((before < after) | ((before == after) & (low[:-1] <= low[1:]))))

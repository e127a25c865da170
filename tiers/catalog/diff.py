"""Comparing a slice of the catalog with a listing of its objects.

Owns finding objects that no row names, rows whose object is gone, and which of the withdrawn
objects may be deleted, or were only missed. Does not own the listing, nor deleting anything
(`major_compaction.py`).

Invariants: pure; times of objects are the store's; an object that may be written or announced just
now is left alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from tiers.catalog.merge import both_have, newest_of_chunk, withdrawals
from tiers.catalog.names import segment_name
from tiers.catalog.orphans import rows_of_listing
from tiers.catalog.rows import SIZE_LARGEST
from tiers.store.client import Found

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tiers.catalog.rows import Rows

MARGIN_SECONDS: Final = 60.0
"""By how much the clocks of a writer and of the store may differ without an object being kept."""
YOUNG_SECONDS: Final = 600.0
"""Objects and rows younger than this are not compared: one may be there before the other."""

Objects = dict[str, tuple[int, float]]
"""Names of a slice's objects -> size and time."""


def compared(
    rows: Rows, objects: Mapping[str, tuple[int, float]], prefix: str, now_seconds: float
) -> tuple[Rows, Rows]:
    """Rows of objects that no row names, and rows that withdraw those without an object.

    `rows` are merged ones of the slice, all of each chunk.
    """
    old = now_seconds - YOUNG_SECONDS
    known = dict(zip(names_of(rows, prefix), range(len(rows)), strict=True))
    missing: list[Found] = []
    for name, (size_bytes, modified) in objects.items():
        if not 0 < modified < old:
            continue
        index = known.get(name)
        if index is None:
            missing.append(Found(name, size_bytes, modified))
        elif not rows.size_bytes[index]:
            withdrawn_seconds = rows.written_at[index] / 1e6
            if modified > withdrawn_seconds + MARGIN_SECONDS:
                missing.append(Found(name, size_bytes, modified))
    found = rows_of_listing(missing, prefix)
    newest = newest_of_chunk(rows)
    lost = np.array(
        [
            index
            for name, index in known.items()
            if rows.size_bytes[index] and name not in objects and newest[index] / 1e6 < old
        ],
        dtype=np.intp,
    )
    return found, withdrawals(rows.take(lost), newest[lost], missing=True)


def deletable(
    rows: Rows, withdrawn: Rows, objects: Mapping[str, tuple[int, float]], prefix: str
) -> tuple[Rows, list[str], Rows]:
    """The rows without those that are in `withdrawn` and done with, and objects to be deleted.

    Also rows that offer again what somebody missed, and is there: a reader may have asked a replica
    that lags behind, or the wrong server. Nothing is deleted on such a word alone.

    Args:
        rows: merged rows of the slice, all of each chunk.
        withdrawn: rows that have withdrawn for long enough.
        objects: all of the slice.
        prefix: the namespace's folder.
    """
    waiting = np.flatnonzero(rows.size_bytes == 0)
    due = waiting[both_have(rows.take(waiting), withdrawn)]
    doomed: list[str] = []
    missed: list[int] = []
    sizes: list[int] = []
    kept = np.ones(len(rows), dtype=np.bool_)
    some = rows.take(due)
    named = zip(due.tolist(), names_of(some, prefix), some.written_at.tolist(), strict=True)
    for index, name, written_at in named:
        there = objects.get(name)
        if there is not None:
            size_bytes, modified = there
            if not 0 < modified <= written_at / 1e6 + MARGIN_SECONDS:
                # Written again, and about to be announced.
                continue
            if size_bytes and not rows.num_blocks[index]:
                missed.append(index)
                sizes.append(min(size_bytes, SIZE_LARGEST))
                continue
            doomed.append(name)
        kept[index] = False
    # Later than all that was withdrawn of the chunk, so that it counts for readers.
    chosen = np.array(missed, dtype=np.intp)
    found = replace(
        rows.take(chosen),
        size_bytes=np.array(sizes, dtype=np.int64),
        written_at=newest_of_chunk(rows)[chosen] + 1,
    )
    return (rows.take(kept) if len(due) else rows), doomed, found


def names_of(rows: Rows, prefix: str) -> list[str]:
    """The object that each row names."""
    keys = rows.key_list(0, len(rows))
    ids = rows.segment_ids.tolist()
    return [
        segment_name(prefix, key, rows.segments[number])
        for key, number in zip(keys, ids, strict=True)
    ]

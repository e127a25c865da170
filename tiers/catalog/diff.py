"""Comparing a shard of the catalog with a listing of its objects.

Owns finding objects that no row names, rows whose object is gone, and which withdrawn objects may
be deleted or were only missed. Does not own the listing, or deleting (`major_compaction.py`).

Invariants: pure; times of objects are the store's; an object that may be written or announced at
this moment is left alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from tiers.catalog.merge import contained_in, newest_of_chunk, withdrawals
from tiers.catalog.names import segment_name
from tiers.catalog.orphans import rows_of_listing
from tiers.catalog.rows import SIZE_LARGEST
from tiers.store.client import Found

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tiers.catalog.rows import Rows

MARGIN_SECONDS: Final = 60.0
"""How far the clocks of a writer and of the store may differ without an object being kept."""
YOUNG_SECONDS: Final = 600.0
"""Younger objects and rows are not compared: one may be there before the other."""

Objects = dict[str, tuple[int, float]]
"""Names of a shard's objects -> size and time."""


def compare(
    rows: Rows, objects: Mapping[str, tuple[int, float]], prefix: str, now_seconds: float
) -> tuple[Rows, Rows]:
    """Rows of objects that no row names, and rows that withdraw those without an object.

    `rows` are merged ones of the shard, all of each chunk.
    """
    old = now_seconds - YOUNG_SECONDS
    known = dict(zip(object_names(rows, prefix), range(len(rows)), strict=True))
    unnamed: list[Found] = []
    for name, (size_bytes, modified) in objects.items():
        if not 0 < modified < old:
            continue
        index = known.get(name)
        withdrawn = index is not None and not rows.size_bytes[index]
        if index is None or (
            withdrawn and modified > rows.written_at[index] / 1e6 + MARGIN_SECONDS
        ):
            unnamed.append(Found(name, size_bytes, modified))
    newest = newest_of_chunk(rows)
    lost = np.array(
        [
            index
            for name, index in known.items()
            if rows.size_bytes[index] and name not in objects and newest[index] / 1e6 < old
        ],
        dtype=np.intp,
    )
    return (
        rows_of_listing(unnamed, prefix),
        withdrawals(rows.take(lost), newest[lost], missing=True),
    )


def find_deletable(
    rows: Rows, withdrawn: Rows, objects: Mapping[str, tuple[int, float]], prefix: str
) -> tuple[Rows, list[str], Rows]:
    """The rows without those in `withdrawn` that are done with, and objects to be deleted.

    Also rows that offer again an object that a reader missed, and that is there: the reader may
    have asked a replica that lags behind, or the wrong server. Nothing is deleted on such a report.

    Args:
        rows: merged rows of the shard, all of each chunk.
        withdrawn: rows that have withdrawn for long enough.
        objects: all of the shard.
        prefix: the namespace's folder.
    """
    waiting = np.flatnonzero(rows.size_bytes == 0)
    due = waiting[contained_in(rows.take(waiting), withdrawn)]
    doomed: list[str] = []
    missed: list[int] = []
    sizes: list[int] = []
    kept = np.ones(len(rows), dtype=np.bool_)
    some = rows.take(due)
    named = zip(due.tolist(), object_names(some, prefix), some.written_at.tolist(), strict=True)
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
    # Later than all withdrawals of the chunk, so that readers take it.
    chosen = np.array(missed, dtype=np.intp)
    found = replace(
        rows.take(chosen),
        size_bytes=np.array(sizes, dtype=np.int64),
        written_at=newest_of_chunk(rows)[chosen] + 1,
    )
    return (rows.take(kept) if len(due) else rows), doomed, found


def object_names(rows: Rows, prefix: str) -> list[str]:
    """The object that each row names."""
    keys = rows.key_list(0, len(rows))
    ids = rows.segment_ids.tolist()
    return [
        segment_name(prefix, key, rows.segments[number])
        for key, number in zip(keys, ids, strict=True)
    ]

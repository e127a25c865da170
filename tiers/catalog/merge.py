"""Merging rows: which of several rows of one segment holds.

Owns the rule of the catalog (of the rows of a segment the latest holds, and of the same time the
withdrawal; its parent and tenant are those that any of them names), sorting by key, and cutting
into shards by a key's first byte. Does not own I/O, or when any of this is done.

Invariants: pure; merging is associative, commutative and idempotent, so it does not matter which
compactor merged what, how often, or in which order.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tiers.catalog.rows import Bytes, Ints, Longs, Rows, joined

SHARDS: Final = 256


def merged(rows: Rows) -> Rows:
    """One row for each segment, sorted by key, of whom some row of the segment says it is."""
    if not len(rows):
        return rows
    words = np.ascontiguousarray(rows.keys).view(">u8").astype(np.uint64)
    withdrawn = rows.size_bytes == 0
    # The names, not their numbers: those are a file's own.
    names = np.argsort(np.argsort(np.array(rows.segments, dtype=object))).astype(np.int64)
    segments = names[rows.segment_ids]
    # The last column is the most significant. Size and blocks only make the choice a fixed one, and
    # that what falls to a bound does so though a reader missed it.
    order = np.lexsort(
        (
            rows.num_blocks,
            rows.size_bytes,
            withdrawn,
            rows.written_at,
            segments,
            words[:, 3],
            words[:, 2],
            words[:, 1],
            words[:, 0],
        )
    )
    words, segments = words[order], segments[order]
    last = np.ones(len(order), dtype=np.bool_)
    same = np.all(words[1:] == words[:-1], axis=1) & (segments[1:] == segments[:-1])
    last[:-1] = ~same
    found = rows.take(order[last])
    ends = np.flatnonzero(last) + 1
    lengths = np.diff(np.r_[0, ends])
    several = lengths > 1
    if several.any():
        # Whoever misses an object, or lists it, does not know whose it is, and others do. A key has
        # one parent and, as salts are part of it, one tenant; the largest makes it a fixed one.
        members = order[np.repeat(several, lengths)]
        found.parents[several] = _largest(rows.parents[members], lengths[several])
        found.tenants[several] = _largest(rows.tenants[members], lengths[several])
    return found


def _largest(column: Bytes, lengths: npt.NDArray[np.intp]) -> Bytes:
    """The largest of each run of values: shape [runs, width], for runs of these lengths."""
    starts = np.cumsum(lengths) - lengths
    words = np.ascontiguousarray(column).view(">u8").astype(np.uint64)
    tops = np.empty((len(lengths), words.shape[1]), dtype=">u8")
    level = np.ones(len(words), dtype=np.bool_)
    for at in range(words.shape[1]):
        word = np.where(level, words[:, at], np.uint64(0))
        top = np.maximum.reduceat(word, starts)
        level &= word == np.repeat(top, lengths)
        tops[:, at] = top
    return tops.view(np.uint8)


def shard_starts(rows: Rows) -> npt.NDArray[np.intp]:
    """Where each shard of sorted rows begins, and the end: shape [257]."""
    return np.searchsorted(rows.keys[:, 0], np.arange(SHARDS + 1))


def is_sorted(rows: Rows) -> bool:
    """Whether shards can be cut from these rows."""
    return bool(np.all(rows.keys[1:, 0] >= rows.keys[:-1, 0]))


def newest_of_chunk(rows: Rows) -> Longs:
    """When a segment of each row's chunk was last written or withdrawn, of sorted rows: shape [n].

    Readers keep one time for all segments of a chunk, this one: what is withdrawn as of any earlier
    time was written anew since, as far as they can tell.
    """
    if not len(rows):
        return rows.written_at
    new = np.r_[True, np.any(rows.keys[1:] != rows.keys[:-1], axis=1)]
    starts = np.flatnonzero(new)
    newest: Longs = np.maximum.reduceat(rows.written_at, starts)
    return np.repeat(newest, np.diff(np.r_[starts, len(rows)]))


def withdrawals(rows: Rows, written_at: Longs, *, missing: bool) -> Rows:
    """The rows that withdraw these, if they were not written after `written_at` (shape [n]).

    `missing`: because there is no object, and not because they fall to a bound. Such rows have no
    blocks, as those of a reader that found none: one that turns up after all is offered again.
    """
    zeros: Any = np.zeros_like(rows.size_bytes)
    num_blocks: Ints = np.zeros_like(rows.num_blocks) if missing else np.maximum(rows.num_blocks, 1)
    return Rows(
        rows.keys,
        rows.parents,
        rows.segments,
        rows.segment_ids,
        num_blocks,
        zeros,
        written_at,
        rows.tenants,
    )


def both_have(rows: Rows, others: Rows) -> npt.NDArray[np.bool_]:
    """Which of `rows` are also in `others`, by key, segment and time: shape [n]."""
    found: npt.NDArray[np.bool_] = np.zeros(len(rows), dtype=np.bool_)
    if not len(rows) or not len(others):
        return found
    both = joined([rows, others])
    words = np.ascontiguousarray(both.keys).view(">u8").astype(np.uint64)
    columns: list[npt.NDArray[Any]] = [both.written_at, both.segment_ids]
    columns += [words[:, at] for at in (3, 2, 1, 0)]
    order = np.lexsort(columns)
    same = np.ones(len(order) - 1, dtype=np.bool_)
    for column in columns:
        ordered = column[order]
        same &= ordered[1:] == ordered[:-1]
    run = np.cumsum(np.r_[True, ~same]) - 1
    other = order >= len(rows)
    there = np.zeros(int(run[-1]) + 1, dtype=np.bool_)
    there[run[other]] = True
    found[order[~other]] = there[run[~other]]
    return found

"""Merging rows: which of several rows of one segment holds.

Owns the catalog's rule: the latest row of a segment holds, and of the same time the withdrawal; its
parent and tenant are those that any of its rows names. Also owns sorting by key, and cutting into
shards by a key's first byte. Does not own I/O, or when any of this is done.

Invariants: pure; merging is associative, commutative and idempotent, so the result does not depend
on which process merged what, how often, or in which order.
"""

from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tiers.catalog.rows import Bytes, Longs, Rows, joined
from tiers.catalog.usage import Mask, Words, run_starts

SHARDS: Final = 256


def merged(rows: Rows) -> Rows:
    """One row for each segment, sorted by key."""
    if not len(rows):
        return rows
    words = _words(rows.keys)
    # A file numbers its segments in its own order; only their names can be compared.
    names = np.argsort(np.argsort(np.array(rows.segments, dtype=object))).astype(np.int64)
    segments = names[rows.segment_ids]
    # The last column is the most significant. Blocks and size make the choice deterministic, and
    # let a withdrawal by a limit win over one by a reader that found no object.
    order = np.lexsort(
        (
            rows.num_blocks,
            rows.size_bytes,
            rows.size_bytes == 0,
            rows.written_at,
            segments,
            *words.T[::-1],
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
        # A process that misses or lists an object does not know its parent and tenant, others do.
        # A key has one parent and, as salts are part of it, one tenant. The largest is taken.
        members = order[np.repeat(several, lengths)]
        found.parents[several] = _largest(rows.parents[members], lengths[several])
        found.tenants[several] = _largest(rows.tenants[members], lengths[several])
    return found


def _words(column: Bytes) -> Words:
    """A column of bytes as big-endian words: shape [n, width // 8]."""
    return np.ascontiguousarray(column).view(">u8").astype(np.uint64)


def _largest(column: Bytes, lengths: npt.NDArray[np.intp]) -> Bytes:
    """The largest of each run of values: shape [runs, width], for runs of these lengths."""
    starts = np.cumsum(lengths) - lengths
    words = _words(column)
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


def newest_of_chunk(rows: Rows) -> Longs:
    """When a segment of each row's chunk was last written or withdrawn, of sorted rows: shape [n].

    Readers keep one time for all segments of a chunk, this one. To them, a withdrawal as of an
    earlier time is older than the chunk.
    """
    starts = run_starts(rows.keys)
    newest: Longs = np.maximum.reduceat(rows.written_at, starts)
    return np.repeat(newest, np.diff(np.r_[starts, len(rows)]))


def withdrawals(rows: Rows, written_at: Longs, *, missing: bool) -> Rows:
    """The rows that withdraw these, unless they were written after `written_at` (shape [n]).

    `missing`: because there is no object, and not because of a limit. Such rows have no blocks, as
    those of a reader that found none: an object that turns up after all is offered again.
    """
    blocks = np.zeros_like(rows.num_blocks) if missing else np.maximum(rows.num_blocks, 1)
    return replace(
        rows, num_blocks=blocks, size_bytes=np.zeros_like(rows.size_bytes), written_at=written_at
    )


def contained_in(rows: Rows, others: Rows) -> Mask:
    """Which of `rows` are also in `others`, by key, segment and time: shape [n]."""
    if not len(rows) or not len(others):
        return np.zeros(len(rows), dtype=np.bool_)
    both = joined([rows, others])
    columns: list[npt.NDArray[Any]] = [both.written_at, both.segment_ids, *_words(both.keys).T]
    order = np.lexsort(columns)
    same = np.ones(len(order) - 1, dtype=np.bool_)
    for column in columns:
        ordered = column[order]
        same &= ordered[1:] == ordered[:-1]
    run = np.empty(len(order), dtype=np.intp)
    run[order] = np.cumsum(np.r_[True, ~same])
    return np.isin(run[: len(rows)], run[len(rows) :])

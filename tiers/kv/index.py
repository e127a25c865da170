"""The shared index: the chunks that can be loaded, in memory that other processes read.

It also names chunks that left the cache not long ago, so that an engine knows why it misses.

Owns a memfd with a header page and two columns: `states`, one 8-byte word per slot, and `tags`. A
tag is 16 bytes (`tag_of`): half of a chunk's key, XORed with the salt of its namespace and
topology, so that equal keys of two realms do not meet. Each tag has two buckets of eight slots and
is in one slot of one of them; a bucket's states are one cache line. A slot's state word is
56 bits of check over its tag, then 8 bits of flags; 0 is an empty slot.

Does not own when to grow: the owner runs an `IndexGrowth` when `needs_growth` says so, and sends
the new descriptor. What a killed writer published stays readable.

Invariants:

* One writer, one thread. Readers take no lock and write nothing: the memfd is sealed against
  resizing and new writable mappings, and the descriptor handed out is opened read-only.
* An entry never moves while it is present. One aligned 8-byte store of its state publishes it,
  after its tag; a store of 0 there withdraws it, before its slot is reused. So the load of the
  state decides: a hit for tag T with flags F means that the writer had published (T, F) when that
  word was loaded. A reader that meets a slot between two entries sees a tag and a check that do not
  match, in whatever order the stores become visible, and reads absent.
* No tombstones, no probe chains: a lookup reads 16 states, however many entries were removed.

Rejected: linear probing, or moving an entry to its other bucket (entries move under the readers); a
seqlock (a writer that is stopped between its two increments blocks every reader).
"""

import contextlib
import os
import struct
from collections.abc import Sequence
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from tiers.errors import LayoutError
from tiers.kv.layout import Bytes
from tiers.kv.mapping import map_shared, populate
from tiers.kv.memfd import NotSealed, check_sealed, read_only_memfd

FLAG_HOST: Final = 1
"""The chunk can be loaded from host memory now."""
FLAG_STORE: Final = 2
"""The object store is known to hold the chunk."""
ANYWHERE: Final = FLAG_HOST | FLAG_STORE
GONE_EVICTED: Final = 4
"""No tier holds the chunk any more: it was evicted, or removed from the store. Without tier flags,
as the next two. Only the last ones are known."""
GONE_EXPIRED: Final = 8
"""Its time had ended."""
GONE_QUOTA: Final = 12
"""It was evicted because its tenant was at its limit."""

KEY_BYTES: Final = 32
TAG_BYTES: Final = 16
CAPACITY_ENTRIES_MAX: Final = 1 << 30
FLAGS_MAX: Final = 0xFF
SLOTS_PER_PASS: Final = 1 << 14
"""Slots copied at a time while a table grows, in about a millisecond."""

_MAGIC: Final = 0x3158_4449_454B_564B  # "KVKEIDX1"
_VERSION: Final = 2
_HEADER_BYTES: Final = 4096
_WORD_BYTES: Final = 8
_SLOT_WORDS: Final = 3
_BUCKET_SLOTS: Final = 8
_HEADER_CLOSED: Final = 3
"""The word after magic, version and number of slots: not zero once the writer has closed."""

# With entries inserted and removed, both buckets were full in none of 2 million insertions at a
# load of 1/2, in 1 of 28,000 at 5/8 and in 1 of 120 at 3/4 (131,072 buckets).
_LOAD: Final = (5, 8)
_ENTRIES_PER_OVERFLOW: Final = 1 << 16
_SET_ONE_BY_ONE: Final = 16

_TAG: Final = struct.Struct("<QQ")
_BUCKET: Final = struct.Struct(f"={_BUCKET_SLOTS}Q")

_MASK64: Final = (1 << 64) - 1
_MIX_A: Final = 0x9E37_79B9_7F4A_7C15
_MIX_B: Final = 0xD6E8_FEB8_6659_FD93
_MIX_C: Final = 0xC2B2_AE3D_27D4_EB4F
_CHECK_MASK: Final = _MASK64 ^ FLAGS_MAX


Words = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]


def tag_of(key: bytes, salt: bytes) -> bytes:
    """Tag (16 bytes) of a chunk key (32 bytes) under a realm's salt (16 bytes)."""
    _check_salt(salt)
    word = int.from_bytes(key[:TAG_BYTES], "little") ^ int.from_bytes(salt, "little")
    return word.to_bytes(TAG_BYTES, "little")


def tags_of(keys: Sequence[bytes], salt: bytes) -> Words:
    """Tags of many keys as uint64 of shape (len(keys), 2): row i holds the bytes of `tag_of`."""
    joined = np.frombuffer(b"".join(keys), dtype=np.uint8)
    return tags_in(joined.reshape(len(keys), KEY_BYTES), salt)


def tags_in(keys: npt.NDArray[np.uint8], salt: bytes) -> Words:
    """`tags_of` keys as the rows of an array of shape (n, 32)."""
    _check_salt(salt)
    words: Words = np.ascontiguousarray(keys).view("<u8")
    return words[:, :2] ^ np.frombuffer(salt, dtype=np.uint64)


def _check_salt(salt: bytes) -> None:
    if len(salt) != TAG_BYTES:
        raise ValueError(f"salt has {len(salt)} bytes: it has {TAG_BYTES}, as Attached.index_salt")


def _mix(low: int, high: int) -> int:
    """A 64-bit hash of a tag; its two halves choose the buckets."""
    word = (low * _MIX_A + high) & _MASK64
    word ^= word >> 32
    word = (word * _MIX_B) & _MASK64
    return word ^ (word >> 29)


def mix_words(lows: Words, highs: Words) -> Words:
    """`_mix` of many tags; the arithmetic wraps."""
    words = lows * np.uint64(_MIX_A)
    words += highs
    words ^= words >> np.uint64(32)
    words *= np.uint64(_MIX_B)
    words ^= words >> np.uint64(29)
    return words


def _check(mixed: int) -> int:
    """State word of a tag without its flags. Bit 8 is set, so that it is never an empty slot."""
    return ((mixed * _MIX_C) & _CHECK_MASK) | (FLAGS_MAX + 1)


def _check_words(mixed: Words) -> Words:
    words = mixed * np.uint64(_MIX_C)
    words &= np.uint64(_CHECK_MASK)
    words |= np.uint64(FLAGS_MAX + 1)
    return words


def _buckets(mixed: Words, mask: np.uint64) -> Numbers:
    """The two buckets of each hash, shape (n, 2)."""
    buckets = np.empty((len(mixed), 2), dtype=np.uint64)
    buckets[:, 0] = mixed
    buckets[:, 1] = mixed >> np.uint64(32)
    buckets &= mask
    return buckets.view(np.int64)


class _Columns:
    """A mapping cut into its header and columns."""

    __slots__ = ("bucket_mask", "header", "rows", "states", "tags")

    def __init__(self, memory: Bytes, slots: int) -> None:
        words: Words = memory.view(np.uint64)
        start = _HEADER_BYTES // _WORD_BYTES
        self.header = words[:start]
        self.states = words[start : start + slots]
        self.rows = self.states.reshape(-1, _BUCKET_SLOTS)
        self.tags = words[start + slots : start + _SLOT_WORDS * slots].reshape(slots, 2)
        self.bucket_mask = np.uint64(slots // _BUCKET_SLOTS - 1)

    def flags(self, tags: Words) -> npt.NDArray[np.uint8]:
        """Flags of each tag; 0 means absent."""
        flags = np.zeros(len(tags), dtype=np.uint8)
        mixed = mix_words(tags[:, 0], tags[:, 1])
        states, hits, _ = self.find(tags, _check_words(mixed), _buckets(mixed, self.bucket_mask))
        flags[hits >> 4] = states.ravel()[hits]
        return flags

    def find(self, tags: Words, checks: Words, buckets: Numbers) -> tuple[Words, Numbers, Numbers]:
        """The states in the two buckets of each tag, XORed with its check, of shape (n, 16).

        Also, of the tags that are found: their places in these states (as in an array of one axis),
        and their slots.
        """
        found = buckets.ravel()
        # The only load of each state: it decides, the comparison of tags only confirms.
        states = self.rows.take(found, axis=0).reshape(-1, 2 * _BUCKET_SLOTS)
        # XOR leaves only the flags if the check is that of the tag, and a larger number if not.
        states ^= checks[:, np.newaxis]
        hits = np.flatnonzero(states <= np.uint64(FLAGS_MAX))
        slots = found[hits >> 3] * _BUCKET_SLOTS + (hits & 7)
        held = self.tags.take(slots, axis=0)
        held ^= tags.take(hits >> 4, axis=0)
        same = (held[:, 0] | held[:, 1]) == 0
        return states, hits[same], slots[same]


class IndexWriter:
    """The writing end, for one thread. `capacity_entries` entries fit before `needs_growth`.

    The number is rounded up to five eighths of a power of two. Raises `LayoutError` if it is out of
    range, and `OSError` if the kernel has no memory for the mapping (ENOSPC, ENOMEM).
    """

    def __init__(self, capacity_entries: int) -> None:
        if not 0 < capacity_entries <= CAPACITY_ENTRIES_MAX:
            raise LayoutError(
                f"capacity_entries={capacity_entries}: between 1 and {CAPACITY_ENTRIES_MAX}; "
                "give the number of chunks that host and store together are to hold"
            )
        slots = -(-capacity_entries * _LOAD[1] // _LOAD[0])
        self.slots = max(_BUCKET_SLOTS * 2, 1 << (slots - 1).bit_length())
        self.size_bytes = _HEADER_BYTES + _SLOT_WORDS * _WORD_BYTES * self.slots
        self._bucket_mask = self.slots // _BUCKET_SLOTS - 1
        self._entries = 0
        self.overflow: dict[bytes, int] = {}
        """Entries whose two buckets are full, tag -> flags: invisible to readers until growth."""
        self.changes: list[tuple[bytes, int]] | None = None
        """What was set since an `IndexGrowth` began to copy this table."""
        self._map, memory, self.fd = read_only_memfd("kvlake-index", self.size_bytes)
        self._columns = _Columns(memory, self.slots)
        # Item access through a memoryview takes a third of the time of a numpy array.
        self._states = self._columns.states.data
        self._tags = self._columns.tags.reshape(-1).data
        self._columns.header[:_HEADER_CLOSED] = _MAGIC, _VERSION, self.slots

    def __len__(self) -> int:
        """Entries that are set, including `overflow`."""
        return self._entries + len(self.overflow)

    @property
    def capacity_entries(self) -> int:
        """Entries above which `needs_growth` is True."""
        return self.slots * _LOAD[0] // _LOAD[1]

    @property
    def needs_growth(self) -> bool:
        """Whether the table is too full: grow it and hand out the new descriptor.

        `overflow` asks for growth at one entry in 65,536, and only in a table that is at least a
        quarter full: tags crafted to collide must not double the mapping again and again.
        """
        if len(self) > self.capacity_entries:
            return True
        lost = len(self.overflow) * _ENTRIES_PER_OVERFLOW > self._entries
        return lost and self._entries * 4 >= self.slots

    def lookup(self, tags: Words) -> npt.NDArray[np.uint8]:
        """What a reader finds of each tag; see `IndexReader.lookup`."""
        return self._columns.flags(tags)

    def set(self, tag: bytes, flags: int) -> None:
        """Publish `flags` (1 to 255) for `tag` (16 bytes), or withdraw it with 0.

        An entry without room is kept in `overflow` and becomes visible when the table grows.
        """
        assert 0 <= flags <= FLAGS_MAX, flags
        if self.changes is not None:
            self.changes.append((tag, flags))
        low, high = _TAG.unpack(tag)
        mixed = _mix(low, high)
        check = _check(mixed)
        first = (mixed & self._bucket_mask) * _BUCKET_SLOTS
        second = ((mixed >> 32) & self._bucket_mask) * _BUCKET_SLOTS
        first_row = _BUCKET.unpack_from(self._states, first * _WORD_BYTES)
        second_row = _BUCKET.unpack_from(self._states, second * _WORD_BYTES)
        for base, row in ((first, first_row), (second, second_row)):
            for slot, state in enumerate(row, base):
                if state & _CHECK_MASK != check:
                    continue
                if self._tags[2 * slot] == low and self._tags[2 * slot + 1] == high:
                    self._states[slot] = check | flags if flags else 0
                    self._entries -= not flags
                    return
        if self.overflow:
            self.overflow.pop(tag, None)
        if not flags:
            return
        first_free, second_free = first_row.count(0), second_row.count(0)
        if not first_free and not second_free:
            self.overflow[tag] = flags
            return
        # The emptier bucket takes it: this keeps both from being full at once.
        if first_free >= second_free:
            slot = first + first_row.index(0)
        else:
            slot = second + second_row.index(0)
        self._tags[2 * slot] = low
        self._tags[2 * slot + 1] = high
        self._states[slot] = check | flags
        self._entries += 1

    def set_many(self, tags: Words, flags: int) -> None:
        """`set` for many tags (shape (n, 2), see `tags_of`), which may repeat, with equal flags."""
        assert 0 <= flags <= FLAGS_MAX, flags
        left = tags
        while len(left) > _SET_ONE_BY_ONE:
            before = len(left)
            left = self._set_some(left, flags)
            if len(left) > before // 2:
                break  # Many compete for the same few slots.
        for tag in np.ascontiguousarray(left):
            self.set(tag.tobytes(), flags)

    def _set_some(self, tags: Words, flags: int) -> Words:
        """Set those that do not compete for a slot; returns the others."""
        if self.changes is not None:
            self.changes += [(tag.tobytes(), flags) for tag in np.ascontiguousarray(tags)]
        mixed = mix_words(tags[:, 0], tags[:, 1])
        checks = _check_words(mixed)
        buckets = _buckets(mixed, self._columns.bucket_mask)
        states, hits, slots = self._columns.find(tags, checks, buckets)
        numbers, news = hits >> 4, np.uint64(flags)
        # A repeated tag is counted once.
        first, counted = np.unique(slots, return_index=True)
        self._columns.states[first] = (checks[numbers[counted]] | news) if flags else 0
        self._entries -= 0 if flags else len(first)
        absent = np.ones(len(tags), dtype=np.bool_)
        absent[numbers] = False
        if self.overflow:
            return tags[absent]  # `set` looks for them in `overflow`, too.
        if not flags:
            return tags[:0]
        others = np.flatnonzero(absent)
        empty = (states[others] == checks[others, np.newaxis]).reshape(-1, 2, _BUCKET_SLOTS)
        free = empty.sum(axis=2)
        side = (free[:, 1] > free[:, 0]).astype(np.intp)
        row = np.arange(len(others))
        room = free[row, side] > 0
        slots = buckets[others, side] * _BUCKET_SLOTS + empty[row, side].argmax(axis=1)
        chosen, winners = np.unique(slots[room], return_index=True)
        winning = others[room][winners]
        self._columns.tags[chosen] = tags[winning]
        self._columns.states[chosen] = checks[winning] | news
        self._entries += len(chosen)
        absent[winning] = False
        return tags[absent]

    def copy_slots(self, smaller: Self, start: int) -> None:
        """Copy up to `SLOTS_PER_PASS` slots of a smaller table, from `start` on."""
        source = smaller._columns
        used = np.flatnonzero(source.states[start : start + SLOTS_PER_PASS]) + start
        tags = source.tags[used]
        mixed = mix_words(tags[:, 0], tags[:, 1])
        old, new = _buckets(mixed, source.bucket_mask), _buckets(mixed, self._columns.bucket_mask)
        # An entry of bucket b goes to a bucket whose number ends with the bits of b, chosen by more
        # bits of the same hash, and keeps its place in the bucket: no two get the same slot.
        target = np.where(old[:, 0] == used // _BUCKET_SLOTS, new[:, 0], new[:, 1])
        slots = target * _BUCKET_SLOTS + used % _BUCKET_SLOTS
        self._columns.tags[slots] = tags
        self._columns.states[slots] = source.states[used]
        self._entries += len(used)

    def close(self) -> None:
        """Make readers see everything as absent, then unmap. Idempotent."""
        if self._map.closed:
            return
        self._columns.header[_HEADER_CLOSED] = 1
        self._states.release()
        self._tags.release()
        del self._columns
        self._map.close()
        os.close(self.fd)


class IndexGrowth:
    """Copies `smaller` into the empty `larger`, a few slots at a time (a million in 50 ms).

    Until `finish` the owner writes only the smaller table. Its changes meanwhile are made up for.
    The smaller one stays readable until its `close`.
    """

    def __init__(self, smaller: IndexWriter, larger: IndexWriter) -> None:
        self._smaller = smaller
        self._larger = larger
        self._next = 0
        self._changes = smaller.changes = []

    def step(self) -> bool:
        """Copy some slots, in about a millisecond. True when none is left."""
        self._larger.copy_slots(self._smaller, self._next)
        self._next += SLOTS_PER_PASS
        return self._next >= self._smaller.slots

    def finish(self) -> IndexWriter:
        """The larger table, with all changes made meanwhile. Write only it from now on."""
        larger = self._larger
        for tag, flags in (*self._smaller.overflow.items(), *self._changes):
            # A tag that left its slot and came back may have been copied from several slots.
            entries = -1
            while entries != len(larger):
                entries = len(larger)
                larger.set(tag, 0)
            larger.set(tag, flags)
        return larger


class IndexReader:
    """A lock-free reader. Takes ownership of `fd` and closes it.

    Any thread may look up, except while another closes the reader. Raises `LayoutError` if the
    descriptor is not an index of `size_bytes`, or not sealed against shrinking.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        try:
            _check_descriptor(fd, size_bytes)
            self._map, memory = map_shared(fd, size_bytes, writable=False)
        finally:
            os.close(fd)
        # 400 keys access 800 pages: map them here and not in the first lookup.
        with contextlib.suppress(OSError):
            populate(memory)
        slots = (size_bytes - _HEADER_BYTES) // (_SLOT_WORDS * _WORD_BYTES)
        self._columns = _Columns(memory, slots)
        del memory
        header = self._columns.header[:_HEADER_CLOSED].tolist()
        if header != [_MAGIC, _VERSION, slots]:
            self.close()
            raise LayoutError(
                f"index header is {header}, expected {[_MAGIC, _VERSION, slots]}: "
                "install the same kvlake release for connector and sidecar"
            )

    def lookup(self, tags: Words) -> npt.NDArray[np.uint8]:
        """Flags of each tag (uint64 of shape (n, 2), see `tags_of`); 0 means absent.

        After the writer's `close`, everything is absent.
        """
        flags = self._columns.flags(tags)
        # Read last: an index that is open now was open when the states were loaded.
        if self._columns.header[_HEADER_CLOSED]:
            flags[:] = 0
        return flags

    def close(self) -> None:
        """Unmap. Idempotent."""
        if self._map.closed:
            return
        del self._columns
        self._map.close()


def _check_descriptor(fd: int, size_bytes: int) -> None:
    slots, rest = divmod(size_bytes - _HEADER_BYTES, _SLOT_WORDS * _WORD_BYTES)
    actual = os.fstat(fd).st_size
    if rest or slots < _BUCKET_SLOTS or slots & (slots - 1) or actual != size_bytes:
        raise LayoutError(
            f"size_bytes={size_bytes}, descriptor has {actual} bytes: an index has a header and a "
            "power of two of slots; use Attached.index_bytes with the descriptor it came with"
        )
    try:
        check_sealed("index", fd, size_bytes)
    except NotSealed as error:
        raise LayoutError(f"{error}; attach to a kvlake sidecar's own socket") from error

"""The shared index: what is loadable now, in memory that other processes read without asking.

Owns a memfd with a header page and two columns: `states`, one 8-byte word per slot, and `tags`. A
tag is 16 bytes (`tag_of`): half of a chunk's key, XORed with the salt of its namespace and
topology, so that equal keys of two realms do not meet. Each tag has two buckets of eight slots and
lives in one slot of one of them; a bucket's states are one cache line. A slot's state word is
56 bits of check over its tag, then 8 bits of flags; 0 is an empty slot.

Does not own: what the flags mean to a request, growth (the owner calls `grown`, or takes its time
with `index_growth.py`, when `needs_growth` says so, and sends the new descriptor), or the death of
the writer. A writer that is
killed leaves its last words readable; its clients learn of that from their socket and drop the
reader.

Invariants:

* One writer, one thread. Readers take no lock and write nothing: the memfd is sealed against
  resizing and new writable mappings, and the descriptor handed out is opened read-only.
* An entry never moves while it is present, and is published by one aligned 8-byte store of its
  state, after its tag; it is withdrawn by storing 0 there, before its slot is reused. So the load
  of the state decides: a hit for tag T with flags F means that the writer had published (T, F)
  when that word was loaded. A reader that meets a slot between two entries sees a tag and a check
  that do not belong together, whatever the order in which the stores reach it, and reads absent.
* No tombstones, no probe chains: a lookup reads 16 states, however many entries were removed.
* Growth keeps every entry's slot number within its bucket, so it is one vectorized pass.

Rejected: linear probing with backward shift (entries move under the readers, and
the longest probe chain outgrows any fixed window), moving an entry to its other bucket to make room
(a reader may look in the wrong one of the two), a seqlock (a writer that is stopped between its two
increments blocks every reader; a busy one starves them).
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from tiers.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Sequence

FLAG_HOST: Final = 1
"""The chunk can be loaded from host memory now."""
FLAG_STORE: Final = 2
"""The object store is known to hold the chunk."""

KEY_BYTES: Final = 32
TAG_BYTES: Final = 16
CAPACITY_ENTRIES_MAX: Final = 1 << 30
FLAGS_MAX: Final = 0xFF
SLOTS_PER_PASS: Final = 1 << 14
"""So many are copied in about a millisecond while a table grows."""

_MAGIC: Final = 0x3158_4449_454B_564B  # "KVKEIDX1"
_VERSION: Final = 1
_HEADER_BYTES: Final = 4096
_WORD_BYTES: Final = 8
_SLOT_WORDS: Final = 3
_BUCKET_SLOTS: Final = 8
_HEADER_MAGIC, _HEADER_VERSION, _HEADER_SLOTS, _HEADER_CLOSED = range(4)

# Entries that come and go found both buckets full in none of 2 million insertions at a load of 1/2,
# in 1 of 28,000 at 5/8 and in 1 of 120 at 3/4 (131,072 buckets).
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

_F_ADD_SEALS: Final = 1033
_F_GET_SEALS: Final = 1034
_SEAL_SEAL: Final = 0x1
_SEAL_SHRINK: Final = 0x2
_SEAL_GROW: Final = 0x4
_SEAL_FUTURE_WRITE: Final = 0x10
_MADV_POPULATE_READ: Final = 22
_MADV_POPULATE_WRITE: Final = 23

Words = npt.NDArray[np.uint64]


def tag_of(key: bytes, salt: bytes) -> bytes:
    """Tag (16 bytes) of a chunk key (32 bytes) under a realm's salt (16 bytes)."""
    if len(key) != KEY_BYTES:
        raise ValueError(f"key has {len(key)} bytes: a chunk key has {KEY_BYTES}")
    _check_salt(salt)
    word = int.from_bytes(key[:TAG_BYTES], "little") ^ int.from_bytes(salt, "little")
    return word.to_bytes(TAG_BYTES, "little")


def tags_of(keys: Sequence[bytes], salt: bytes) -> Words:
    """Tags of many keys as uint64 of shape (len(keys), 2): row i holds the bytes of `tag_of`."""
    joined = b"".join(keys)
    if len(joined) != KEY_BYTES * len(keys):
        raise ValueError(
            f"{len(keys)} keys have {len(joined)} bytes together: a chunk key has {KEY_BYTES}"
        )
    return tags_in(np.frombuffer(joined, dtype=np.uint8).reshape(len(keys), KEY_BYTES), salt)


def tags_in(keys: npt.NDArray[np.uint8], salt: bytes) -> Words:
    """`tags_of` keys as the rows of an array of shape (n, 32)."""
    _check_salt(salt)
    words = np.ascontiguousarray(keys).view("<u8")
    tags: Words = np.bitwise_xor(words[:, :2], np.frombuffer(salt, dtype="<u8"))
    return tags


def _check_salt(salt: bytes) -> None:
    if len(salt) != TAG_BYTES:
        raise ValueError(f"salt has {len(salt)} bytes: it has {TAG_BYTES}, as Attached.index_salt")


def _mix(low: int, high: int) -> int:
    """One 64-bit hash of a tag; its two halves choose the buckets."""
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


def _size_bytes(slots: int) -> int:
    return _HEADER_BYTES + _SLOT_WORDS * _WORD_BYTES * slots


def _slots_for(capacity_entries: int) -> int:
    slots = -(-capacity_entries * _LOAD[1] // _LOAD[0])
    return max(_BUCKET_SLOTS * 2, 1 << (slots - 1).bit_length())


class _Columns:
    """A mapping cut into its header and columns."""

    __slots__ = ("header", "states", "tags")

    def __init__(self, buffer: mmap.mmap, slots: int) -> None:
        words: Words = np.frombuffer(buffer, dtype=np.uint64)
        start = _HEADER_BYTES // _WORD_BYTES
        self.header = words[:start]
        self.states = words[start : start + slots]
        self.tags = words[start + slots : start + _SLOT_WORDS * slots].reshape(slots, 2)


class IndexWriter:
    """The writing end. Not thread-safe: the sidecar's event loop is its only caller.

    Args:
        capacity_entries: entries that fit before `needs_growth`; rounded up to what a power of two
            of slots holds when five eighths of them are full.

    Raises:
        LayoutError: the capacity is out of range.
        OSError: the kernel has no memory for the mapping (ENOSPC, ENOMEM).
    """

    def __init__(self, capacity_entries: int) -> None:
        if not 0 < capacity_entries <= CAPACITY_ENTRIES_MAX:
            raise LayoutError(
                f"capacity_entries={capacity_entries}: between 1 and {CAPACITY_ENTRIES_MAX}; "
                "give the number of chunks that host and store together are to hold"
            )
        self.slots = _slots_for(capacity_entries)
        self.size_bytes = _size_bytes(self.slots)
        self._bucket_mask = self.slots // _BUCKET_SLOTS - 1
        self._entries = 0
        # Entries whose two buckets are full: known here, invisible to readers until growth.
        self.overflow: dict[bytes, int] = {}
        self._changes: list[tuple[bytes, int]] | None = None
        self._map, self.fd = _create_mapping(self.size_bytes)
        self._columns = _Columns(self._map, self.slots)
        # Item access through a memoryview costs a third of that through a numpy array.
        self._states = self._columns.states.data
        self._tags = self._columns.tags.reshape(-1).data
        header = self._columns.header
        header[_HEADER_VERSION] = _VERSION
        header[_HEADER_SLOTS] = self.slots
        header[_HEADER_MAGIC] = _MAGIC

    def __len__(self) -> int:
        """Entries that are set, those that wait for growth included."""
        return self._entries + len(self.overflow)

    @property
    def capacity_entries(self) -> int:
        """Entries above which `needs_growth` is True."""
        return self.slots * _LOAD[0] // _LOAD[1]

    @property
    def needs_growth(self) -> bool:
        """Whether lookups start to lose entries: call `grown` and hand out the new descriptor.

        Entries that found both their buckets full ask for growth where they are one in 65,536, and
        only in a table that is at least a quarter full: tags crafted to collide must not double
        the mapping again and again.
        """
        if len(self) > self.capacity_entries:
            return True
        lost = len(self.overflow) * _ENTRIES_PER_OVERFLOW > self._entries
        return lost and self._entries * 4 >= self.slots

    def set(self, tag: bytes, flags: int) -> None:
        """Publish `flags` (1 to 255) for `tag` (16 bytes), or withdraw it with 0.

        An entry that finds no room is kept aside and becomes visible with `grown`.
        """
        if len(tag) != TAG_BYTES or not 0 <= flags <= FLAGS_MAX:
            raise ValueError(
                f"tag of {len(tag)} bytes, flags={flags}: a tag has {TAG_BYTES} bytes (tag_of), "
                f"flags are 0 to {FLAGS_MAX}"
            )
        if self._changes is not None:
            self._changes.append((tag, flags))
        low, high = _TAG.unpack(tag)
        mixed = _mix(low, high)
        check = _check(mixed)
        first = (mixed & self._bucket_mask) * _BUCKET_SLOTS
        second = ((mixed >> 32) & self._bucket_mask) * _BUCKET_SLOTS
        first_row = _BUCKET.unpack_from(self._states, first * _WORD_BYTES)
        second_row = _BUCKET.unpack_from(self._states, second * _WORD_BYTES)
        for base, row in ((first, first_row), (second, second_row)):
            for slot, state in enumerate(row, base):
                if state & _CHECK_MASK == check and self._holds(slot, low, high):
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
        # The emptier bucket takes it: this is what keeps both from being full at once.
        if first_free >= second_free:
            slot = first + first_row.index(0)
        else:
            slot = second + second_row.index(0)
        self._tags[2 * slot] = low
        self._tags[2 * slot + 1] = high
        self._states[slot] = check | flags
        self._entries += 1

    def _holds(self, slot: int, low: int, high: int) -> bool:
        return self._tags[2 * slot] == low and self._tags[2 * slot + 1] == high

    def set_many(self, tags: Words, flags: int) -> None:
        """`set` for many tags (shape (n, 2), see `tags_of`), which may repeat, with equal flags."""
        if not 0 <= flags <= FLAGS_MAX:
            raise ValueError(f"flags={flags}: flags are 0 to {FLAGS_MAX}")
        left = tags
        while len(left) > _SET_ONE_BY_ONE:
            before = len(left)
            left = self._set_some(left, flags)
            if len(left) > before // 2:
                # Many that want the same few slots.
                break
        for tag in np.ascontiguousarray(left):
            self.set(tag.tobytes(), flags)

    def _set_some(self, tags: Words, flags: int) -> Words:
        """Set those that do not get into each other's way; returns the others."""
        if self._changes is not None:
            self._changes += [(tag.tobytes(), flags) for tag in np.ascontiguousarray(tags)]
        mixed = mix_words(tags[:, 0], tags[:, 1])
        checks = _check_words(mixed)
        buckets = np.empty((len(tags), 2), dtype=np.uint64)
        buckets[:, 0] = mixed
        buckets[:, 1] = mixed >> np.uint64(32)
        buckets &= np.uint64(self._bucket_mask)
        bases = buckets.view(np.int64) * _BUCKET_SLOTS
        rows = self._columns.states.reshape(-1, _BUCKET_SLOTS)
        states = rows.take(buckets.view(np.int64).ravel(), axis=0).reshape(-1, 2 * _BUCKET_SLOTS)
        hits = np.flatnonzero((states ^ checks[:, np.newaxis]) <= np.uint64(FLAGS_MAX))
        numbers, places = hits >> 4, hits & 15
        slots = bases[numbers, places >> 3] + (places & 7)
        same = np.all(self._columns.tags[slots] == tags[numbers], axis=1)
        numbers, slots = numbers[same], slots[same]
        news = np.uint64(flags)
        # A tag that is given twice is counted once.
        first, counted = np.unique(slots, return_index=True)
        self._columns.states[first] = (checks[numbers[counted]] | news) if flags else 0
        self._entries -= 0 if flags else len(first)
        absent = np.ones(len(tags), dtype=np.bool_)
        absent[numbers] = False
        if self.overflow:
            # Few, and theirs is the dict as much as the table.
            return tags[absent]
        if not flags:
            return tags[:0]
        others = np.flatnonzero(absent)
        empty = states[others].reshape(-1, 2, _BUCKET_SLOTS) == 0
        free = empty.sum(axis=2)
        side = (free[:, 1] > free[:, 0]).astype(np.intp)
        row = np.arange(len(others))
        room = free[row, side] > 0
        slots = bases[others, side] + empty[row, side].argmax(axis=1)
        chosen, winners = np.unique(slots[room], return_index=True)
        winning = others[room][winners]
        self._columns.tags[chosen] = tags[winning]
        self._columns.states[chosen] = checks[winning] | news
        self._entries += len(chosen)
        absent[winning] = False
        return tags[absent]

    def grown(self) -> IndexWriter:
        """A copy with twice the slots. This one stays as it is until `close`.

        Takes about 50 ms per million slots. From now on only the copy is to be written.
        """
        larger = IndexWriter(self.capacity_entries * 2)
        for start in range(0, self.slots, SLOTS_PER_PASS):
            larger.adopt(self, start)
        for tag, flags in self.overflow.items():
            larger.set(tag, flags)
        return larger

    def follow(self) -> list[tuple[bytes, int]]:
        """From now on every `set`, also in `set_many`, is added to this list."""
        self._changes = []
        return self._changes

    @property
    def waiting(self) -> dict[bytes, int]:
        """Entries that readers see only after growth: tag -> flags."""
        return self.overflow

    def replace(self, tag: bytes, flags: int) -> None:
        """`set` where `adopt` may have taken the same tag over from several slots."""
        entries = -1
        while entries != self._entries:
            entries = self._entries
            self.set(tag, 0)
        self.set(tag, flags)

    def adopt(self, smaller: IndexWriter, start: int) -> None:
        """Take over what is in up to `SLOTS_PER_PASS` slots of a smaller table, from `start` on."""
        source = smaller._columns
        stop = min(start + SLOTS_PER_PASS, smaller.slots)
        used = np.flatnonzero(source.states[start:stop]) + start
        tags = source.tags[used]
        mixed = mix_words(tags[:, 0], tags[:, 1])
        mask = np.uint64(self._bucket_mask)
        fewer = np.uint64(smaller._bucket_mask)
        buckets = (used // _BUCKET_SLOTS).astype(np.uint64)
        # What was in bucket b goes to one of those whose number ends with the bits of b, by more
        # bits of the hash that brought it there, and keeps its place in the bucket: two never meet.
        by_first = (mixed & fewer) == buckets
        target = np.where(by_first, mixed & mask, (mixed >> np.uint64(32)) & mask)
        slots = (target * np.uint64(_BUCKET_SLOTS)).astype(np.intp) + used % _BUCKET_SLOTS
        self._columns.tags[slots] = tags
        self._columns.states[slots] = source.states[used]
        self._entries += len(used)

    def close(self) -> None:
        """Tell readers that nothing here is true any more, then unmap. Idempotent."""
        if self._map.closed:
            return
        self._columns.header[_HEADER_CLOSED] = 1
        self._states.release()
        self._tags.release()
        del self._columns
        self._map.close()
        os.close(self.fd)


class IndexReader:
    """A lock-free reader. Takes ownership of `fd`, which it closes once it is mapped, or refused.

    Any thread may look up; none may be doing so when another closes the reader.

    Raises:
        LayoutError: the descriptor is not an index of `size_bytes`, or could shrink under us.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        try:
            _check_descriptor(fd, size_bytes)
            self._map = mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        # 400 keys touch 800 pages: faulting them in here keeps that out of the first lookup.
        with contextlib.suppress(OSError, ValueError):
            self._map.madvise(_MADV_POPULATE_READ)
        slots = (size_bytes - _HEADER_BYTES) // (_SLOT_WORDS * _WORD_BYTES)
        self._columns = _Columns(self._map, slots)
        self._rows = self._columns.states.reshape(-1, _BUCKET_SLOTS)
        self._bucket_mask = np.uint64(slots // _BUCKET_SLOTS - 1)
        header = self._columns.header[: _HEADER_SLOTS + 1].tolist()
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
        count = len(tags)
        flags = np.zeros(count, dtype=np.uint8)
        mixed = mix_words(tags[:, 0], tags[:, 1])
        buckets = np.empty((count, 2), dtype=np.uint64)
        buckets[:, 0] = mixed
        buckets[:, 1] = mixed >> np.uint64(32)
        buckets &= self._bucket_mask
        found = buckets.view(np.int64).ravel()
        # The one load of each state: what it says decides, what comes later only confirms.
        states = self._rows.take(found, axis=0).reshape(count, 2 * _BUCKET_SLOTS)
        # XOR leaves the flags alone where the check is the tag's own, and more than that elsewhere.
        states ^= _check_words(mixed)[:, np.newaxis]
        hits = np.flatnonzero(states <= np.uint64(FLAGS_MAX))
        rows = hits >> 4
        slots = found[hits >> 3] * _BUCKET_SLOTS + (hits & 7)
        held = self._columns.tags.take(slots, axis=0)
        held ^= tags.take(rows, axis=0)
        same = (held[:, 0] | held[:, 1]) == 0
        flags[rows[same]] = states.ravel()[hits[same]]
        # Read last: an index that is open now was open when the states were loaded.
        if self._columns.header[_HEADER_CLOSED]:
            flags[:] = 0
        return flags

    def close(self) -> None:
        """Unmap. Idempotent."""
        if self._map.closed:
            return
        del self._rows, self._columns
        self._map.close()


def _create_mapping(size_bytes: int) -> tuple[mmap.mmap, int]:
    """A writable mapping of a new memfd, and the only other way to it: a read-only descriptor."""
    fd = os.memfd_create("kvlake-index", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # fallocate, not only truncate: a full tmpfs is an error here and a SIGBUS later.
        os.posix_fallocate(fd, 0, size_bytes)
        mapping = mmap.mmap(fd, size_bytes)
        try:
            with contextlib.suppress(OSError, ValueError):
                mapping.madvise(_MADV_POPULATE_WRITE)
            os.fchmod(fd, 0o400)
            # FUTURE_WRITE spares the mapping made above and refuses every later one, even to a
            # process that reopens the descriptor as root. Kernels before 5.1 have only the mode.
            with contextlib.suppress(OSError):
                fcntl.fcntl(fd, _F_ADD_SEALS, _SEAL_FUTURE_WRITE)
            fcntl.fcntl(fd, _F_ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW | _SEAL_SEAL)
            return mapping, os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        except BaseException:
            mapping.close()
            raise
    finally:
        os.close(fd)


def _check_descriptor(fd: int, size_bytes: int) -> None:
    slots, rest = divmod(size_bytes - _HEADER_BYTES, _SLOT_WORDS * _WORD_BYTES)
    actual = os.fstat(fd).st_size
    if rest or slots < _BUCKET_SLOTS or slots & (slots - 1) or actual != size_bytes:
        raise LayoutError(
            f"size_bytes={size_bytes}, descriptor has {actual} bytes: an index has a header and a "
            "power of two of slots; use Attached.index_bytes with the descriptor it came with"
        )
    try:
        sealed = fcntl.fcntl(fd, _F_GET_SEALS) & _SEAL_SHRINK
    except OSError:
        sealed = 0
    if not sealed:
        raise LayoutError(
            "index descriptor is not sealed against shrinking: reading it could kill this process "
            "(SIGBUS); attach to a kvlake sidecar's own socket"
        )

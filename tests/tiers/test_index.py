"""The shared index against a dict, against hostile descriptors, and under a writer in a hurry."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import mmap
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiers.errors import LayoutError
from tiers.kv.index import (
    FLAG_HOST,
    FLAG_STORE,
    IndexGrowth,
    IndexReader,
    IndexWriter,
    mix_words,
    tag_of,
    tags_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

SALT = bytes(range(16))


def key(number: int) -> bytes:
    return random.Random(number).randbytes(32)


@contextlib.contextmanager
def reading(writer: IndexWriter) -> Iterator[IndexReader]:
    reader = IndexReader(os.dup(writer.fd), writer.size_bytes)
    try:
        yield reader
    finally:
        reader.close()


def words_of(tags: list[bytes]) -> npt.NDArray[np.uint64]:
    return np.frombuffer(b"".join(tags), dtype=np.uint64).reshape(-1, 2)


def look(reader: IndexReader, tags: list[bytes]) -> list[int]:
    return [int(flags) for flags in reader.lookup(words_of(tags))]


def test_tags_of_many_keys_are_the_tags_of_each() -> None:
    keys = [key(number) for number in range(7)]
    assert tags_of(keys, SALT).tobytes() == b"".join(tag_of(one, SALT) for one in keys)
    assert tags_of([], SALT).shape == (0, 2)
    assert tag_of(keys[0], SALT) != tag_of(keys[0], bytes(16))
    assert tag_of(keys[0], bytes(16)) == keys[0][:16]


def test_tags_of_odd_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot reshape array of size 63"):
        tags_of([bytes(31), bytes(32)], SALT)
    with pytest.raises(ValueError, match="salt has 3 bytes"):
        tags_of([bytes(32)], b"abc")


def test_set_change_and_remove() -> None:
    writer = IndexWriter(100)
    tags = [tag_of(key(number), SALT) for number in range(3)]
    with reading(writer) as reader:
        assert look(reader, tags) == [0, 0, 0]
        writer.set(tags[0], FLAG_HOST)
        writer.set(tags[1], FLAG_STORE)
        assert look(reader, tags) == [FLAG_HOST, FLAG_STORE, 0]
        writer.set(tags[0], FLAG_HOST | FLAG_STORE)
        writer.set(tags[1], 0)
        writer.set(tags[2], 0)
        assert look(reader, [tags[0], tags[1], tags[0], tags[2]]) == [3, 0, 3, 0]
        assert len(writer) == 1
        assert look(reader, []) == []
    writer.close()


def test_all_zero_tag_is_a_tag_like_others() -> None:
    writer = IndexWriter(10)
    with reading(writer) as reader:
        assert look(reader, [bytes(16)]) == [0]
        writer.set(bytes(16), FLAG_HOST)
        assert look(reader, [bytes(16)]) == [FLAG_HOST]
    writer.close()


def test_a_capacity_of_nothing_is_refused() -> None:
    with pytest.raises(LayoutError, match="capacity_entries=0"):
        IndexWriter(0)


ONE = st.tuples(st.integers(0, 120), st.integers(0, 3))
MANY = st.tuples(st.lists(st.integers(0, 120), max_size=80), st.integers(0, 3))


@settings(max_examples=60, deadline=None)
@given(st.lists(ONE | MANY, max_size=100), st.booleans())
def test_reader_sees_what_a_dict_would_hold(
    steps: list[tuple[int, int] | tuple[list[int], int]], slowly: bool
) -> None:
    writer = IndexWriter(12)
    growth: IndexGrowth | None = None
    model: dict[bytes, int] = {}
    tags = [tag_of(key(number), SALT) for number in range(121)]
    for numbers, flags in steps:
        if isinstance(numbers, int):
            writer.set(tags[numbers], flags)
        else:
            writer.set_many(words_of([tags[number] for number in numbers]), flags)
        for number in [numbers] if isinstance(numbers, int) else numbers:
            model.pop(tags[number], None)
            if flags:
                model[tags[number]] = flags
        while writer.needs_growth and growth is None:
            growth = IndexGrowth(writer, IndexWriter(2 * writer.capacity_entries))
            assert growth.step()
            if not slowly:
                writer, growth = over(writer, growth), None
        assert len(writer) == len(model)
        if growth is not None and flags == 3:
            writer, growth = over(writer, growth), None
            assert len(writer) == len(model)
    if growth is not None:
        writer = over(writer, growth)
    while writer.needs_growth:
        writer, before = grown(writer), writer
        before.close()
    with reading(writer) as reader:
        assert look(reader, tags) == [model.get(tag, 0) for tag in tags]
    writer.close()


def grown(writer: IndexWriter) -> IndexWriter:
    growth = IndexGrowth(writer, IndexWriter(2 * writer.capacity_entries))
    while not growth.step():
        pass
    return growth.finish()


def over(before: IndexWriter, growth: IndexGrowth) -> IndexWriter:
    larger = growth.finish()
    before.close()
    return larger


def test_many_at_once_are_as_many_one_by_one() -> None:
    writer, generator = IndexWriter(200_000), np.random.default_rng(3)
    tags = generator.integers(0, 2**64, size=(200_000, 2), dtype=np.uint64)
    for first in range(0, len(tags), 5000):
        writer.set_many(tags[first : first + 5000], FLAG_STORE)
    # Told again, or one half told to hold more and the other to be gone.
    writer.set_many(np.concatenate([tags[:9000], tags[:9000]]), FLAG_STORE)
    assert len(writer) == len(tags)
    writer.set_many(tags[::2], FLAG_STORE | FLAG_HOST)
    writer.set_many(np.concatenate([tags[1::2], tags[1::2]]), 0)
    assert len(writer) == len(tags) // 2
    assert not writer.overflow
    with reading(writer) as reader:
        flags = reader.lookup(tags)
        assert np.all(flags[::2] == FLAG_STORE | FLAG_HOST)
        assert not np.any(flags[1::2])
        assert not np.any(reader.lookup(tags ^ np.uint64(1)))
    writer.close()


def test_changes_during_growth_are_in_the_larger_table() -> None:
    """Also what was copied already and leaves its slot to another, and comes back elsewhere."""
    writer, generator = IndexWriter(100_000), random.Random(4)
    held = [generator.randbytes(16) for _ in range(writer.capacity_entries)]
    writer.set_many(words_of(held), FLAG_HOST)
    growth = IndexGrowth(writer, IndexWriter(2 * writer.capacity_entries))
    gone: list[bytes] = []
    while not growth.step():
        for _ in range(2000):
            gone.append(held.pop(generator.randrange(len(held))))
            writer.set(gone[-1], 0)
            held.append(gone.pop(0) if generator.random() < 0.5 else generator.randbytes(16))
            writer.set(held[-1], FLAG_HOST)
        writer.set_many(words_of(held[-500:]), FLAG_HOST)
    larger = growth.finish()
    assert len(larger) == len(held)
    with reading(larger) as reader:
        assert all(look(reader, held))
        assert not any(look(reader, gone))
    # Nothing is there twice.
    larger.set_many(words_of(held), 0)
    assert len(larger) == 0
    with reading(larger) as reader:
        assert not any(look(reader, held))
    writer.close()
    larger.close()


def test_growth_keeps_every_entry_and_the_old_mapping_until_it_is_closed() -> None:
    writer = IndexWriter(1000)
    capacity = writer.capacity_entries
    tags = [tag_of(key(number), SALT) for number in range(capacity + 1)]
    for number, tag in enumerate(tags):
        assert not writer.needs_growth
        writer.set(tag, 1 + number % 3)
    assert writer.needs_growth
    larger = grown(writer)
    expected = [1 + number % 3 for number in range(len(tags))]
    with reading(writer) as before, reading(larger) as after:
        assert larger.capacity_entries == 2 * capacity
        assert not larger.needs_growth
        assert look(after, tags) == expected
        assert sum(map(bool, look(before, tags))) >= capacity - 1
        for tag in tags[:50]:
            larger.set(tag, 0)
        assert look(after, tags) == [0] * 50 + expected[50:]
        writer.close()
        writer.close()
        assert not any(look(before, tags))
        assert look(after, tags) == [0] * 50 + expected[50:]
    larger.close()


def test_reader_outlives_the_writers_mapping() -> None:
    writer = IndexWriter(10)
    writer.set(bytes(16), FLAG_HOST)
    with reading(writer) as reader:
        writer.close()
        assert look(reader, [bytes(16)]) == [0]


def test_colliding_tags_overflow_and_do_not_ask_for_growth() -> None:
    writer = IndexWriter(512)
    generator = np.random.default_rng(7)
    words = generator.integers(0, 2**64, size=(1 << 20, 2), dtype=np.uint64)
    mixed = mix_words(words[:, 0], words[:, 1])
    mask = np.uint64(writer.slots // 8 - 1)
    crowded = words[((mixed & mask) == 0) & (((mixed >> np.uint64(32)) & mask) == 0)]
    tags = [row.tobytes() for row in crowded[:20]]
    assert len(tags) == 20
    with reading(writer) as reader:
        for tag in tags:
            writer.set(tag, FLAG_STORE)
        assert len(writer) == 20
        assert look(reader, tags) == [FLAG_STORE] * 8 + [0] * 12
        assert not writer.needs_growth
        writer.set(tags[0], 0)
        writer.set(tags[19], FLAG_HOST)
        writer.set(tags[18], 0)
        assert look(reader, tags) == [0] + [FLAG_STORE] * 7 + [0] * 11 + [FLAG_HOST]
        assert len(writer) == 18
    larger = grown(writer)
    assert len(larger) == 18
    writer.close()
    larger.close()


def test_no_entry_is_lost_below_capacity() -> None:
    """Random tags, inserted and evicted for long, always find room in one of their buckets."""
    writer = IndexWriter(3000)
    generator = random.Random(3)
    held = [generator.randbytes(16) for _ in range(writer.capacity_entries)]
    for tag in held:
        writer.set(tag, FLAG_HOST)
    for _ in range(20_000):
        place = generator.randrange(len(held))
        writer.set(held[place], 0)
        held[place] = generator.randbytes(16)
        writer.set(held[place], FLAG_HOST)
    with reading(writer) as reader:
        assert all(look(reader, held))
    writer.close()


def test_the_descriptor_is_read_only() -> None:
    writer = IndexWriter(10)
    assert fcntl.fcntl(writer.fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    assert not os.get_inheritable(writer.fd)
    with pytest.raises(PermissionError):
        mmap.mmap(writer.fd, writer.size_bytes, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(OSError, match=r"Bad file descriptor|not permitted"):
        os.write(writer.fd, b"x")
    with pytest.raises(OSError, match=r"Invalid argument|not permitted"):
        os.ftruncate(writer.fd, 0)
    # A reader that opens it again for writing (root may) is stopped by the seals.
    with contextlib.suppress(PermissionError):
        again = os.open(f"/proc/self/fd/{writer.fd}", os.O_RDWR)
        try:
            with pytest.raises(PermissionError):
                mmap.mmap(again, writer.size_bytes, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            with pytest.raises(PermissionError):
                os.write(again, b"x")
            with pytest.raises(PermissionError):
                os.ftruncate(again, 4096)
        finally:
            os.close(again)
    writer.set(bytes(16), FLAG_HOST)
    writer.close()


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_refused_descriptors_are_closed() -> None:
    writer = IndexWriter(10)
    before = open_descriptors()
    with pytest.raises(LayoutError, match="size_bytes=4096"):
        IndexReader(os.dup(writer.fd), 4096)
    with pytest.raises(LayoutError, match="descriptor has"):
        IndexReader(os.dup(writer.fd), 4096 + 24 * 32768)
    unsealed = os.memfd_create("unsealed")
    os.truncate(unsealed, writer.size_bytes)
    with pytest.raises(LayoutError, match="not sealed"):
        IndexReader(unsealed, writer.size_bytes)
    foreign = os.memfd_create("foreign", os.MFD_ALLOW_SEALING)
    os.truncate(foreign, writer.size_bytes)
    fcntl.fcntl(foreign, 1033, 0x2)
    with pytest.raises(LayoutError, match="index header is"):
        IndexReader(foreign, writer.size_bytes)
    # Python may close others of earlier tests at any time.
    assert open_descriptors() <= before
    writer.close()


def test_nothing_stays_open() -> None:
    before = open_descriptors()
    writer = IndexWriter(10)
    with reading(writer):
        pass
    writer.close()
    assert open_descriptors() <= before


# --- a writer in another process ---------------------------------------------------------------

KEYS = 240
ALLOWED = (frozenset({1}), frozenset({2}), frozenset({1, 3}))
"""Flags that the writer below gives to tag i: ALLOWED[i % 3]."""

WRITER = """
    import random, socket, sys
    from tiers.kv.index import IndexWriter

    # Far fewer slots than tags: every slot changes hands all the time.
    generator = random.Random(int(sys.argv[2]))
    tags = [random.Random(number).randbytes(16) for number in range(240)]
    writer = IndexWriter(40)
    channel = socket.socket(fileno=int(sys.argv[1]))
    socket.send_fds(channel, [writer.size_bytes.to_bytes(8, "little")], [writer.fd])
    held = []
    while True:
        number = generator.randrange(240)
        writer.set(tags[number], (1, 2, generator.choice((1, 3)))[number % 3])
        held.append(number)
        if len(held) > 40:
            writer.set(tags[held.pop(generator.randrange(len(held)))], 0)
"""


@contextlib.contextmanager
def busy_writer(seed: int) -> Iterator[tuple[subprocess.Popen[bytes], IndexReader]]:
    ours, theirs = socket.socketpair()
    script = textwrap.dedent(WRITER)
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(theirs.fileno()), str(seed)],
            pass_fds=[theirs.fileno()],
        )
        try:
            theirs.close()
            ours.settimeout(60)
            header, fds, _, _ = socket.recv_fds(ours, 8, 1)
            reader = IndexReader(fds[0], int.from_bytes(header, "little"))
            try:
                yield process, reader
            finally:
                reader.close()
        finally:
            process.kill()
            process.wait()


def torn_tags(tags: list[bytes]) -> list[bytes]:
    """Tags that were never set, made of halves of tags that were."""
    pairs = random.Random(5).sample(list(itertools.permutations(range(len(tags)), 2)), 500)
    return [tags[one][:8] + tags[other][8:] for one, other in pairs]


@pytest.mark.parametrize("seed", [1, 2])
def test_readers_never_see_a_torn_or_foreign_entry(seed: int) -> None:
    tags = [random.Random(number).randbytes(16) for number in range(KEYS)]
    never = torn_tags(tags) + [
        random.Random(10_000 + number).randbytes(16) for number in range(200)
    ]
    asked = tags + never
    words: npt.NDArray[np.uint64] = np.frombuffer(b"".join(asked), dtype=np.uint64).reshape(-1, 2)
    seen: set[tuple[int, int]] = set()
    pictures: set[bytes] = set()
    with busy_writer(seed) as (process, reader):

        def check() -> None:
            flags = reader.lookup(words)
            pictures.add(flags.tobytes())
            hits = np.flatnonzero(flags)
            seen.update(zip(hits.tolist(), flags[hits].tolist(), strict=True))

        while len(pictures) < 1500:
            assert process.poll() is None
            check()
        # Killed between two stores, as likely as not; what it left stays readable and true.
        process.send_signal(signal.SIGKILL)
        process.wait()
        pictures.clear()
        for _ in range(50):
            check()
        assert len(pictures) == 1
    wrong = [(at, flags) for at, flags in seen if at >= KEYS or flags not in ALLOWED[at % 3]]
    assert wrong == []
    assert {at for at, _ in seen} == set(range(KEYS))
    assert {flags for _, flags in seen} == {1, 2, 3}


def test_a_dead_writers_successor_starts_empty() -> None:
    """A restarted sidecar makes a new index; the old mapping does not leak into it."""
    with busy_writer(3) as (process, before):
        tags = [random.Random(number).randbytes(16) for number in range(KEYS)]
        while not any(look(before, tags)):
            assert process.poll() is None
        process.kill()
        process.wait()
        successor = IndexWriter(40)
        with reading(successor) as after:
            assert not any(look(after, tags))
            successor.set(tags[0], FLAG_STORE)
            assert look(after, tags[:2]) == [FLAG_STORE, 0]
        assert any(look(before, tags))
        successor.close()

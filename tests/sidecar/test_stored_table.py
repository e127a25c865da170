"""The table of what the store holds, against a dict."""

from __future__ import annotations

import hashlib
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.stored_table import StoredChunks, packed, tags_of


def key(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def names_of(count: int) -> list[bytes]:
    keys = np.random.default_rng(1).bytes(32 * count)
    return [keys[at : at + 32] for at in range(0, len(keys), 32)]


def offer(stored: StoredChunks, found: dict[bytes, tuple[int, int]]) -> list[int]:
    """Offer all of these at once; what they had before, in order of their keys."""
    names = sorted(found)
    keys = np.frombuffer(b"".join(names), dtype=np.uint8).reshape(-1, 32)
    masks = packed([found[name][0] for name in names], stored.width)
    times = np.array([found[name][1] for name in names], dtype=np.int64)
    before = stored.add(*tags_of(keys), masks, times)
    return [int.from_bytes(row.tobytes(), "little") for row in before]


STEP = st.tuples(st.integers(0, 40), st.integers(0, 3), st.integers(1, 9))
OFFERS = st.dictionaries(
    st.integers(0, 40), st.tuples(st.sampled_from([1, 2, 256]), st.integers(1, 9)), min_size=1
)


@given(steps=st.lists(STEP | OFFERS, max_size=60), alike=st.sampled_from([0, 1, 8]))
def test_it_is_a_dict(
    steps: list[tuple[int, int, int] | dict[int, tuple[int, int]]], alike: int
) -> None:
    """Whatever the keys: spread, all in one shard, or alike in the first half of what counts."""

    def name_of(number: int) -> bytes:
        return (bytes(alike) + key(number))[:32]

    stored, model = StoredChunks(16), dict[bytes, tuple[int, int]]()
    for step in steps:
        if isinstance(step, tuple):
            number, mask, time = step
            stored.set(name_of(number), mask, time)
            model[name_of(number)] = (mask, time)
            continue
        found = {name_of(number): value for number, value in step.items()}
        was = {name: model.get(name, (0, 0))[0] for name in found}
        assert offer(stored, found) == [was[name] for name in sorted(found)]
        for name, (mask, time) in found.items():
            held, since = model.get(name, (0, 0))
            model[name] = (held | mask, max(time, since if held else 0))
    live = {name: value for name, value in model.items() if value[0]}
    assert len(stored) == len(live)
    assert sorted(mask for _, mask in stored.names()) == sorted(mask for mask, _ in live.values())
    for name in model:
        assert stored.entry(name) == live.get(name, (0, 0))
    assert stored.entry(key(99)) == (0, 0)


def test_many_entries_come_and_go_in_bounded_memory() -> None:
    stored, names = StoredChunks(8), names_of(20_000)
    for _ in range(2):
        for name in names:
            stored.set(name, 255, 7)
        assert len(stored) == len(names)
        assert stored.size_bytes < 150 * len(names)
        for name in names:
            stored.set(name, 0, 7)
        assert len(stored) == 0
        assert stored.size_bytes < 50 * len(names)


def test_those_that_come_by_the_thousand_take_no_more_than_their_columns() -> None:
    stored, names = StoredChunks(40), sorted(names_of(100_000))
    for first in range(0, len(names), 5000):
        offer(stored, dict.fromkeys(names[first : first + 5000], (1, 5)))
    assert 29 * len(names) <= stored.size_bytes < 50 * len(names)
    assert all(map(stored.mask, names))
    # Offered again they are what they were, and so are few among many.
    assert offer(stored, dict.fromkeys(names, (1, 9))) == [1] * len(names)
    assert offer(stored, dict.fromkeys(names[:7], (2, 5))) == [1] * 7
    assert [stored.entry(name) for name in (names[6], names[7])] == [
        (3, 9),
        (1, 9),
    ]
    assert len(stored) == len(names)


def test_as_many_ranks_as_a_world_has() -> None:
    stored, mask = StoredChunks(100), (1 << 100) - 2
    stored.set(key(2), 1, 1)
    stored.set(key(1), mask, 1 << 60)
    assert stored.entry(key(1)) == (mask, 1 << 60)
    found = {key(1): (1, 1), key(2): (256, 1)}
    assert offer(stored, found) == [mask if name == key(1) else 1 for name in sorted(found)]
    assert (stored.mask(key(1)), stored.mask(key(2))) == (mask | 1, 257)


def test_masks_become_wider_and_keep_what_they_hold() -> None:
    stored, names = StoredChunks(1), names_of(20_000)
    offer(stored, dict.fromkeys(names[::2], (1, 5)))
    for name in names[1:400:2]:
        stored.set(name, 1, 6)
    for bits in (40, 33):
        stored.widen(bits)
        assert stored.width == 5
    assert {stored.entry(name) for name in names[::2]} == {(1, 5)}
    assert {stored.entry(name) for name in names[1:400:2]} == {(1, 6)}
    assert offer(stored, dict.fromkeys(names[:100], (1 << 39, 7))) == [1] * 100
    stored.set(names[-1], 1 << 39, 8)
    assert (stored.mask(names[0]), stored.mask(names[-1])) == (1 << 39 | 1, 1 << 39)
    assert len(stored) == 10_201


def test_keys_made_to_collide_take_no_more_time_than_others() -> None:
    stored, count = StoredChunks(1), 20_000
    names = [bytes(8) + number.to_bytes(8, "big") + bytes(16) for number in range(count)]
    for name in names[::2]:
        stored.set(name, 1, 1)
    assert offer(stored, dict.fromkeys(names[1::2], (1, 1))) == [0] * (count // 2)
    assert len(stored) == sum(map(stored.mask, names)) == count


def test_names_can_be_walked_while_the_tables_change() -> None:
    stored = StoredChunks(1)
    stay = [key(number) for number in range(3000)]
    for one in stay:
        stored.set(one, 1, 1)
    told: Counter[bytes] = Counter()
    for count, (name, _) in enumerate(stored.names()):
        told[name] += 1
        # Grows every table at some time of the walk; half of it is removed again.
        for number in range(10_000 + 4 * count, 10_004 + 4 * count if count < 3000 else 0):
            stored.set(key(number), 1, 1)
            stored.set(key(number), number % 2, 1)
    assert all(told[one[:16]] == 1 for one in stay)

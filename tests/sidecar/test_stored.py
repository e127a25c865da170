"""The table of what the store holds, against a dict."""

from __future__ import annotations

import hashlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sidecar.stored import PROBES_MAX, StoredChunks


def key(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


@given(
    steps=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3), st.integers(1, 9))),
    crowded=st.booleans(),
)
def test_it_is_a_dict(steps: list[tuple[int, int, int]], crowded: bool) -> None:
    stored, model = StoredChunks(2), dict[bytes, tuple[int, int]]()
    for number, mask, time in steps:
        name = number.to_bytes(16, "big") + bytes(16) if crowded else key(number)
        assert stored.set(name, mask, time)
        model[name] = (mask, time)
    live = {name: value for name, value in model.items() if value[0]}
    assert len(stored) == len(live)
    assert sorted(stored.masks()) == sorted(mask for mask, _ in live.values())
    for name in model:
        assert (stored.get(name), stored.time(name)) == live.get(name, (0, 0))
    assert stored.get(key(99)) == stored.time(key(99)) == 0


def test_many_entries_come_and_go_in_bounded_memory() -> None:
    stored = StoredChunks(8)
    keys = np.random.default_rng(1).bytes(32 * 20_000)
    names = [keys[at : at + 32] for at in range(0, len(keys), 32)]
    for _ in range(3):
        for name in names:
            stored.set(name, 255, 7)
        assert len(stored) == len(names)
        assert stored.size_bytes < 60 * len(names)
        for name in names:
            stored.set(name, 0, 7)
        assert len(stored) == 0
    assert stored.refused == 0


def test_as_many_ranks_as_a_world_has() -> None:
    stored = StoredChunks(100)
    mask = (1 << 100) - 2
    stored.set(key(1), mask, 1 << 60)
    assert (stored.get(key(1)), stored.time(key(1))) == (mask, 1 << 60)


def test_keys_made_to_collide_are_refused_and_take_no_memory() -> None:
    stored = StoredChunks(1)
    for number in range(4 * PROBES_MAX):
        stored.set(bytes(8) + number.to_bytes(8, "little") + bytes(16), 1, 1)
    assert stored.refused > 0
    assert len(stored) <= PROBES_MAX
    assert stored.size_bytes < 100_000 + 100 * PROBES_MAX

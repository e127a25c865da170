"""Who pins what is counted, and nobody pins more than its share."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from sidecar.core.directory import Directory
from sidecar.core.fair_share import Share
from sidecar.core.pins import Pins
from tests.engine_invariants import pin_counts

CHUNK_BYTES = 10


@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 3), st.sets(st.integers(0, 7))), max_size=40)
)
def test_a_chunk_costs_a_session_once_and_is_given_back(
    steps: list[tuple[bool, int, set[int]]],
) -> None:
    directory = Directory(readable=True)
    realm = directory.open_realm(0, 1)
    realm.slot_bytes[0] = CHUNK_BYTES
    share = Share("pinned", 80, 7)
    pins = Pins(directory, share)
    held: list[tuple[int, list[int]]] = []
    for taking, session_id, numbers in steps:
        if taking:
            chunks = [directory.open_chunk(realm, bytes([n]) * 32) for n in sorted(numbers)]
            fitting = pins.fitting(session_id, chunks)
            pins.pin(session_id, chunks[:fitting])
            for chunk in chunks[fitting:]:
                directory.drop_if_unused(chunk)
            held.append((session_id, sorted(numbers)[:fitting]))
        elif held:
            owner, owned = held.pop(0)
            pins.unpin(owner, [realm.chunks[bytes([n]) * 32] for n in owned])
        distinct: dict[int, set[int]] = {}
        for owner, owned in held:
            distinct.setdefault(owner, set()).update(owned)
        wanted = {owner: CHUNK_BYTES * len(owned) for owner, owned in distinct.items() if owned}
        assert share.by_session == wanted
        assert share.used <= share.limit
        counts = {chunk.key[0]: count for chunk, count in pin_counts(pins).items()}
        assert counts == {key[0]: chunk.pins for key, chunk in realm.chunks.items()}

"""The transition table, the flags that are told, and what stays of a chunk."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from sidecar.core.directory import (
    HISTORY_LINES_MAX,
    TRANSITIONS,
    Cause,
    Chunk,
    Directory,
    HostSegment,
    IllegalTransition,
    Realm,
    SegmentState,
)

KEY = bytes(range(32))


def make(world_size: int = 2) -> tuple[Directory, Realm, Chunk]:
    directory = Directory(readable=True)
    realm = directory.open_realm(0, world_size)
    return directory, realm, directory.open_chunk(realm, KEY)


def bring(directory: Directory, segment: HostSegment, *causes: Cause) -> None:
    for cause in causes:
        directory.move(segment, cause)


PATHS = {
    SegmentState.ABSENT: (),
    SegmentState.STORING: (Cause.GATHER,),
    SegmentState.READING: (Cause.READ,),
    SegmentState.HOST: (Cause.GATHER, Cause.FILLED),
    SegmentState.ZOMBIE: (Cause.GATHER, Cause.DETACHED),
}


@pytest.mark.parametrize("state", SegmentState)
@pytest.mark.parametrize("cause", Cause)
def test_every_pair_of_state_and_cause(state: SegmentState, cause: Cause) -> None:
    directory, _, chunk = make()
    segment = chunk.segments[1]
    bring(directory, segment, *PATHS[state])
    assert segment.state is state
    after = TRANSITIONS.get((state, cause))
    if after is None:
        with pytest.raises(IllegalTransition, match=f"{state.name} \\+ {cause.name}"):
            directory.move(segment, cause)
        assert segment.state is state
    else:
        directory.move(segment, cause)
        assert segment.state is after


def test_illegal_transition_tells_the_history_of_its_chunk_alone() -> None:
    directory, realm, chunk = make()
    other = directory.open_chunk(realm, bytes(32))
    bring(directory, other.segments[0], Cause.READ)
    bring(directory, chunk.segments[0], Cause.GATHER, Cause.FAILED)
    with pytest.raises(IllegalTransition) as caught:
        directory.move(chunk.segments[0], Cause.FILLED)
    text = str(caught.value)
    assert KEY.hex()[:16] in text
    assert "rank 0: ABSENT + GATHER; rank 0: STORING + FAILED" in text
    assert "READ" not in text


def test_history_is_bounded() -> None:
    directory, realm, chunk = make()
    bring(directory, chunk.segments[0], Cause.GATHER)
    other = directory.open_chunk(realm, bytes(32)).segments[0]
    for _ in range(HISTORY_LINES_MAX):
        bring(directory, other, Cause.GATHER, Cause.FAILED)
    assert "no transition is remembered" in directory.history(0, KEY)


def test_chunk_is_loadable_with_its_last_rank() -> None:
    directory, realm, chunk = make()
    bring(directory, chunk.segments[0], Cause.GATHER, Cause.FILLED)
    assert directory.take_changes() == []
    bring(directory, chunk.segments[1], Cause.READ, Cause.FILLED)
    [change] = directory.take_changes()
    assert (change.was, change.now, change.chunk) == ((False, False), (True, False), chunk)
    assert realm.hosted_chunks == 1
    assert directory.take_changes() == []


def test_change_that_is_undone_is_not_told() -> None:
    directory, realm, chunk = make(world_size=1)
    bring(directory, chunk.segments[0], Cause.GATHER, Cause.FILLED, Cause.EVICTED)
    directory.set_stored(realm, KEY, 1, 5)
    directory.set_stored(realm, KEY, 0, 5)
    assert directory.take_changes() == []


def test_eviction_tells_what_the_chunk_was() -> None:
    directory, realm, chunk = make(world_size=1)
    bring(directory, chunk.segments[0], Cause.GATHER, Cause.FILLED)
    directory.take_changes()
    directory.move(chunk.segments[0], Cause.EVICTED)
    directory.drop_if_unused(chunk)
    assert not realm.chunks
    [change] = directory.take_changes()
    assert change.chunk is chunk
    assert change.now == (False, False)


def test_detached_chunk_makes_room_for_another_of_its_key() -> None:
    directory, realm, chunk = make()
    bring(directory, chunk.segments[0], Cause.GATHER, Cause.FILLED)
    bring(directory, chunk.segments[1], Cause.GATHER)
    directory.detach(chunk)
    assert [segment.state for segment in chunk.segments] == [SegmentState.ZOMBIE] * 2
    assert not chunk.loadable
    assert directory.open_chunk(realm, KEY) is not chunk
    directory.move(chunk.segments[0], Cause.ENDED)
    assert directory.take_changes() == []


def test_pinned_chunk_stays_without_a_slot() -> None:
    directory, realm, chunk = make()
    chunk.pins += 1
    directory.drop_if_unused(chunk)
    assert realm.chunks == {KEY: chunk}
    chunk.pins -= 1
    directory.drop_if_unused(chunk)
    assert not realm.chunks


def test_a_chunk_is_in_the_store_with_all_of_its_segments() -> None:
    directory, realm, _ = make()
    directory.set_stored(realm, KEY, 0b10, 5)
    assert not realm.in_store(KEY)
    directory.set_stored(realm, KEY, 0b11, 5)
    assert realm.in_store(KEY)
    assert realm.stored.mask(KEY) == realm.full_mask


def test_store_that_is_not_read_is_not_offered() -> None:
    directory = Directory(readable=False)
    realm = directory.open_realm(0, 1)
    directory.set_stored(realm, KEY, 1, 5)
    assert realm.stored.mask(KEY)
    assert directory.take_changes() == []


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=30))
def test_counts_follow_the_store(steps: list[tuple[int, int]]) -> None:
    directory = Directory(readable=True)
    realm = directory.open_realm(0, 2)
    model: dict[int, int] = {}
    for number, mask in steps:
        directory.set_stored(realm, bytes([number]) * 32, mask, 5)
        model[number] = mask
        directory.take_changes()
    assert realm.stored_chunks == sum(mask == 0b11 for mask in model.values())
    assert len(realm.stored) == sum(mask != 0 for mask in model.values())

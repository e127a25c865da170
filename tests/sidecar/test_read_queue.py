"""Reads wait in turns: of sessions first, of their own asking second."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from sidecar.core.directory import Directory, HostSegment
from sidecar.core.reads import ReadQueue
from tests.engine_invariants import check_queue


def segments_of(count: int) -> list[HostSegment]:
    directory = Directory(readable=True)
    realm = directory.open_realm(0, 1)
    return [directory.open_chunk(realm, bytes([n]) * 32).segments[0] for n in range(count)]


@pytest.fixture
def segments() -> list[HostSegment]:
    return segments_of(10)


def taken(queue: ReadQueue) -> list[HostSegment]:
    found: list[HostSegment] = []
    while (segment := queue.take()) is not None:
        check_queue(queue)
        found.append(segment)
    return found


def test_sessions_take_turns(segments: list[HostSegment]) -> None:
    queue = ReadQueue()
    for segment in segments[:6]:
        queue.add(1, segment)
    queue.add(2, segments[6])
    queue.add(2, segments[7])
    order = [segments.index(segment) for segment in taken(queue)]
    assert order == [0, 6, 1, 7, 2, 3, 4, 5]


def test_what_two_want_is_read_once_at_the_first_turn(segments: list[HostSegment]) -> None:
    queue = ReadQueue()
    for segment in segments[:4]:
        queue.add(1, segment)
    queue.add(2, segments[3])
    queue.add(2, segments[3])
    assert len(queue) == 4
    order = [segments.index(segment) for segment in taken(queue)]
    assert order == [0, 3, 1, 2]


def test_a_session_that_leaves_takes_only_what_nobody_else_wants(
    segments: list[HostSegment],
) -> None:
    queue = ReadQueue()
    for segment in segments[:4]:
        queue.add(1, segment)
    queue.add(2, segments[3])
    queue.close_session(1)
    assert list(queue.sessions_of) == [segments[3]]
    queue.discard(segments[3])
    check_queue(queue)
    assert len(queue) == 0
    assert queue.take() is None


def test_a_backlog_of_another_counts_as_far_as_it_comes_before(segments: list[HostSegment]) -> None:
    queue = ReadQueue()
    for segment in segments[:6]:
        queue.add(1, segment)
    assert queue.ahead(1, 2) == 6
    assert queue.ahead(2, 2) == 2
    queue.add(2, segments[6])
    assert queue.ahead(2, 2) == 1 + 3


@given(st.lists(st.tuples(st.sampled_from("aaadlt"), st.integers(1, 3), st.integers(0, 9))))
def test_nothing_is_lost_and_nothing_is_left(steps: list[tuple[str, int, int]]) -> None:
    segments = segments_of(10)
    queue = ReadQueue()
    wanted: dict[int, set[int]] = {}
    for what, session_id, number in steps:
        match what:
            case "a":
                queue.add(session_id, segments[number])
                wanted.setdefault(number, set()).add(session_id)
            case "d":
                queue.discard(segments[number])
                wanted.pop(number, None)
            case "l":
                queue.close_session(session_id)
                for sessions in wanted.values():
                    sessions.discard(session_id)
                wanted = {number: sessions for number, sessions in wanted.items() if sessions}
            case _:
                segment = queue.take()
                assert (segment is None) == (not wanted)
                if segment is not None:
                    del wanted[segments.index(segment)]
        check_queue(queue)
        assert {segments.index(segment) for segment in queue.sessions_of} == set(wanted)
    assert {segments.index(segment) for segment in taken(queue)} == set(wanted)

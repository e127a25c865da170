"""Requests that vLLM schedules as new more than once, as it tells a manager of tiers."""

from __future__ import annotations

from vllm.v1.kv_offload.base import ScheduleEndContext

from connector.streams import Streams


def step(streams: Streams, *new: str, preempted: tuple[str, ...] = ()) -> None:
    streams.step(ScheduleEndContext(list(new), preempted))


def test_a_request_that_goes_on_is_a_stream_until_it_ends() -> None:
    streams = Streams()
    step(streams, "a", "b")
    assert "a" not in streams
    step(streams, "c", "a")
    step(streams)
    assert [name in streams for name in "abc"] == [True, False, False]
    streams.ended("a")
    # vLLM may use its name again.
    step(streams, "a")
    assert "a" not in streams
    streams.ended("nobody")


def test_one_that_was_preempted_is_none() -> None:
    streams = Streams()
    step(streams, "a")
    step(streams, preempted=("a",))
    step(streams, "a")
    assert "a" not in streams
    step(streams, "a", preempted=("b",))
    assert "a" in streams
    # What it is it remains.
    step(streams, preempted=("a",))
    step(streams, "a")
    assert "a" in streams

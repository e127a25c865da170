"""FIFO keeps the order of arrival."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tiers.policy.fifo import FifoPolicy


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["touch", "remove"])), max_size=60))
def test_order_is_that_of_arrival(steps: list[tuple[int, str]]) -> None:
    policy = FifoPolicy()
    model: dict[int, None] = {}
    for key, otherwise in steps:
        if key not in model:
            policy.add(key, key - 1)
            model[key] = None
        elif otherwise == "touch":
            policy.touch(key)
        else:
            policy.remove(key)
            del model[key]
        assert list(policy.victims()) == list(model)
    assert len(policy) == len(model)

"""FIFO keeps the order of arrival."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.tiers.policy import caches
from tiers.policy.fifo import FifoPolicy

KEYS = [caches.key(number) for number in range(10)]


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from(["use", "use more", "remove"])), max_size=60
    )
)
def test_order_is_that_of_arrival(steps: list[tuple[int, str]]) -> None:
    policy = FifoPolicy()
    model: dict[tuple[int, bytes], None] = {}
    for number, otherwise in steps:
        key = KEYS[number]
        if key not in model:
            policy.add(key, KEYS[number - 1] if number else None)
            model[key] = None
        elif otherwise == "use":
            policy.use([key], 512)
        elif otherwise == "use more":
            policy.use(KEYS[: number + 1], 512 * (number + 1))
        else:
            policy.remove(key)
            del model[key]
        assert list(policy.victims()) == list(model)
    assert len(policy) == len(model)

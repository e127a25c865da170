"""LRU over chains: the order against a model that sorts."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tiers.policy.lru import LruPolicy


def chain(policy: LruPolicy, name: str, length: int) -> list[str]:
    keys = [f"{name}{number}" for number in range(length)]
    for number, key in enumerate(keys):
        policy.add(key, keys[number - 1] if number else None)
    return keys


def test_tail_goes_before_head() -> None:
    policy = LruPolicy()
    keys = chain(policy, "a", 4)
    assert list(policy.victims()) == keys[::-1]
    for key in keys:
        policy.touch(key)
    assert list(policy.victims()) == keys[::-1]
    for key in reversed(keys):
        policy.touch(key)
    assert list(policy.victims()) == keys[::-1]


def test_least_recently_used_chain_goes_first() -> None:
    policy = LruPolicy()
    one, two = chain(policy, "a", 3), chain(policy, "b", 3)
    assert list(policy.victims()) == one[::-1] + two[::-1]
    for key in one:
        policy.touch(key)
    assert list(policy.victims()) == two[::-1] + one[::-1]


def test_using_a_tail_uses_its_head() -> None:
    policy = LruPolicy()
    one, two = chain(policy, "a", 3), chain(policy, "b", 3)
    policy.touch(one[2])
    assert list(policy.victims()) == two[::-1] + one[::-1]
    policy.touch(two[1])
    assert list(policy.victims()) == [two[2], *one[::-1], two[1], two[0]]


def test_branches_of_one_prompt_are_ordered_by_use() -> None:
    policy = LruPolicy()
    policy.add("system", None)
    for name in ("a", "b", "c"):
        policy.add(name, "system")
        policy.add(name + name, name)
    assert list(policy.victims()) == ["aa", "a", "bb", "b", "cc", "c", "system"]
    for key in ("system", "a", "aa"):
        policy.touch(key)
    assert list(policy.victims()) == ["bb", "b", "cc", "c", "aa", "a", "system"]
    policy.touch("b")
    assert list(policy.victims()) == ["bb", "cc", "c", "aa", "a", "b", "system"]


def test_parent_that_comes_after_its_child_goes_after_it() -> None:
    policy = LruPolicy()
    policy.add("child", "parent")
    policy.add("parent", "grandparent")
    policy.add("grandparent", None)
    assert list(policy.victims()) == ["child", "parent", "grandparent"]
    policy.add("other", None)
    policy.touch("child")
    assert list(policy.victims()) == ["other", "child", "parent", "grandparent"]


def test_touch_does_not_reach_over_a_missing_ancestor() -> None:
    policy = LruPolicy()
    keys = chain(policy, "a", 3)
    policy.remove(keys[1])
    policy.touch(keys[2])
    assert list(policy.victims()) == [keys[0], keys[2]]
    policy.add(keys[1], keys[0])
    assert list(policy.victims()) == [keys[2], keys[1], keys[0]]


def test_evicting_in_order_leaves_prefixes() -> None:
    policy = LruPolicy()
    one, two = chain(policy, "a", 5), chain(policy, "b", 5)
    for key in one[:2]:
        policy.touch(key)
    held = set(one + two)
    while held:
        victim = next(policy.victims())
        policy.remove(victim)
        held.discard(str(victim))
        for keys in (one, two):
            kept = [key in held for key in keys]
            assert kept == sorted(kept, reverse=True)


KEYS = 8


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 3), min_size=KEYS, max_size=KEYS),
    st.lists(st.tuples(st.integers(0, KEYS - 1), st.integers(0, 4)), max_size=60),
)
def test_order_is_that_of_the_last_use_of_any_descendant(
    distances: list[int], steps: list[tuple[int, int]]
) -> None:
    """The parent of a key is `distances[key]` below it. One step in five removes, where it can."""
    policy = LruPolicy()
    used: dict[int, int] = {}

    def parent(key: int) -> int | None:
        return key - distances[key] if key >= distances[key] else None

    def depth(key: int) -> int:
        above = parent(key)
        return 0 if above is None else 1 + depth(above)

    for now, (key, action) in enumerate(steps):
        if key in used and action == 0:
            policy.remove(key)
            del used[key]
        else:
            if key in used:
                policy.touch(key)
            else:
                policy.add(key, parent(key))
            above: int | None = key
            while above == key or above in used:
                used[above] = now
                above = parent(above)
        expected = sorted(used, key=lambda key: (used[key], -depth(key)))
        assert list(policy.victims()) == expected
        position = {key: place for place, key in enumerate(expected)}
        for key in expected:
            above = parent(key)
            assert above not in position or position[key] < position[above]
    assert len(policy) == len(used)

"""LRU over chains: the order against a model that sorts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiers.policy import caches
from tiers.policy.lru import LruPolicy

if TYPE_CHECKING:
    from tiers.policy.key import CacheKey

TOKENS = 512


def chain(policy: LruPolicy, name: str, length: int) -> list[CacheKey]:
    keys = caches.chain(name, length=length)
    for number, key in enumerate(keys):
        policy.add(key, keys[number - 1] if number else None)
    return keys


def test_tail_goes_before_head() -> None:
    policy = LruPolicy()
    keys = chain(policy, "a", 4)
    assert list(policy.victims()) == keys[::-1]
    policy.use(keys, 4 * TOKENS)
    assert list(policy.victims()) == keys[::-1]
    for key in keys:
        policy.use([key], TOKENS)
    assert list(policy.victims()) == keys[::-1]
    for key in reversed(keys):
        policy.use([key], TOKENS)
    assert list(policy.victims()) == keys[::-1]


def test_least_recently_used_chain_goes_first() -> None:
    policy = LruPolicy()
    one, two = chain(policy, "a", 3), chain(policy, "b", 3)
    assert list(policy.victims()) == one[::-1] + two[::-1]
    policy.use(one, 3 * TOKENS)
    assert list(policy.victims()) == two[::-1] + one[::-1]


def test_a_request_uses_what_is_cached_of_its_prompt() -> None:
    policy = LruPolicy()
    one, two = chain(policy, "a", 3), chain(policy, "b", 3)
    policy.use([*one[:2], caches.key("new"), caches.key("newer")], 4 * TOKENS)
    assert list(policy.victims()) == [one[2], *two[::-1], one[1], one[0]]


def test_using_a_tail_uses_its_head() -> None:
    policy = LruPolicy()
    one, two = chain(policy, "a", 3), chain(policy, "b", 3)
    policy.use([one[2]], TOKENS)
    assert list(policy.victims()) == two[::-1] + one[::-1]
    policy.use([two[1]], TOKENS)
    assert list(policy.victims()) == [two[2], *one[::-1], two[1], two[0]]


def test_branches_of_one_prompt_are_ordered_by_use() -> None:
    policy = LruPolicy()
    keys = {name: caches.key(name) for name in ("system", "a", "aa", "b", "bb", "c", "cc")}

    def order(*names: str) -> bool:
        return list(policy.victims()) == [keys[name] for name in names]

    policy.add(keys["system"], None)
    for name in ("a", "b", "c"):
        policy.add(keys[name], keys["system"])
        policy.add(keys[name + name], keys[name])
    assert order("aa", "a", "bb", "b", "cc", "c", "system")
    policy.use([keys["system"], keys["a"], keys["aa"]], 3 * TOKENS)
    assert order("bb", "b", "cc", "c", "aa", "a", "system")
    policy.use([keys["b"]], TOKENS)
    assert order("bb", "cc", "c", "aa", "a", "b", "system")


def test_parent_that_comes_after_its_child_goes_after_it() -> None:
    policy = LruPolicy()
    grandparent, parent, child = caches.chain("a", length=3)
    policy.add(child, parent)
    policy.add(parent, grandparent)
    policy.add(grandparent, None)
    assert list(policy.victims()) == [child, parent, grandparent]
    other = caches.key("other")
    policy.add(other, None)
    policy.use([child], TOKENS)
    assert list(policy.victims()) == [other, child, parent, grandparent]


def test_use_does_not_reach_over_a_missing_ancestor() -> None:
    policy = LruPolicy()
    keys = chain(policy, "a", 3)
    policy.remove(keys[1])
    policy.use([keys[2]], TOKENS)
    assert list(policy.victims()) == [keys[0], keys[2]]
    policy.add(keys[1], keys[0])
    assert list(policy.victims()) == [keys[2], keys[1], keys[0]]


def test_evicting_in_order_leaves_prefixes() -> None:
    policy = LruPolicy()
    one, two = chain(policy, "a", 5), chain(policy, "b", 5)
    policy.use(one[:2], 2 * TOKENS)
    held = set(one + two)
    while held:
        victim = next(policy.victims())
        policy.remove(victim)
        held.discard(victim)
        for keys in (one, two):
            kept = [key in held for key in keys]
            assert kept == sorted(kept, reverse=True)


def test_what_was_refused_goes_first_until_it_is_used() -> None:
    policy = LruPolicy()
    keys = chain(policy, "a", 2)
    late = caches.key("late")
    policy.add(late, keys[-1], first=True)
    assert list(policy.victims()) == [late, keys[1], keys[0]]
    chain(policy, "b", 1)
    assert next(policy.victims()) == late
    policy.use([*keys, late], 3 * TOKENS)
    assert list(policy.victims())[-3:] == [late, keys[1], keys[0]]


COUNT = 8
KEYS = [caches.key(number) for number in range(COUNT)]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 3), min_size=COUNT, max_size=COUNT),
    st.lists(st.tuples(st.integers(0, COUNT - 1), st.integers(0, 5)), max_size=60),
)
def test_order_is_that_of_the_last_use_of_any_descendant(
    distances: list[int], steps: list[tuple[int, int]]
) -> None:
    """The parent of a key is `distances[key]` below it.

    One step in six removes, where it can, and one uses a key with its ancestors, head first.
    """
    policy = LruPolicy()
    used: dict[int, int] = {}

    def parent(number: int) -> int | None:
        return number - distances[number] if number >= distances[number] else None

    def path(number: int) -> list[int]:
        above = parent(number)
        return [number] if above is None else [*path(above), number]

    for now, (number, action) in enumerate(steps):
        if number in used and action == 0:
            policy.remove(KEYS[number])
            del used[number]
        elif action == 1:
            policy.use([KEYS[one] for one in path(number)], TOKENS)
            used.update((one, now) for one in path(number) if one in used)
        else:
            above = parent(number)
            if number in used:
                policy.use([KEYS[number]], TOKENS)
            else:
                policy.add(KEYS[number], None if above is None else KEYS[above])
            used[number] = now
            while above in used:
                used[above] = now
                above = parent(above)
        expected = sorted(used, key=lambda one: (used[one], -len(path(one))))
        assert list(policy.victims()) == [KEYS[one] for one in expected]
        position = {one: place for place, one in enumerate(expected)}
        for one in expected:
            above = parent(one)
            assert above not in position or position[one] < position[above]
    assert len(policy) == len(used)

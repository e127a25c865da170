"""By density: the order before it has learned, what it refuses, names and remembers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import places
from tests.tiers.policy.caches import Cache, chain, key, remembered, store, use
from tiers.policy.density import QUEUE_MIN, DensityPolicy
from tiers.policy.key import Left
from tiers.policy.lru import LruPolicy

if TYPE_CHECKING:
    from tiers.policy.key import CacheKey


# --- before anything is learned -------------------------------------------------------------------


def test_the_chain_that_was_used_last_goes_last_from_its_tail() -> None:
    policy = DensityPolicy()
    one, two = chain("a", length=3), chain("b", length=3)
    store(policy, one)
    store(policy, two)
    assert list(policy.victims()) == one[::-1] + two[::-1]
    use(policy, one)
    assert list(policy.victims()) == two[::-1] + one[::-1]
    use(policy, two[:2])
    assert list(policy.victims()) == [two[2], *one[::-1], two[1], two[0]]


def test_branches_of_one_prompt_go_before_it() -> None:
    policy = DensityPolicy()
    system = key("system")
    store(policy, [system])
    branches = [chain(name, length=2) for name in "abc"]
    for branch in branches:
        use(policy, [system, *branch])
        policy.add(branch[0], system)
        policy.add(branch[1], branch[0])
    a, b, c = (branch[::-1] for branch in branches)
    assert list(policy.victims()) == [*a, *b, *c, system]
    use(policy, [system, *branches[0]])
    assert list(policy.victims()) == [*b, *c, *a, system]


def test_a_parent_that_comes_after_its_child_goes_after_it() -> None:
    policy = DensityPolicy()
    grandparent, parent, child = keys = chain("a", length=3)
    use(policy, keys)
    policy.add(child, parent)
    policy.add(parent, grandparent)
    policy.add(grandparent, None)
    assert list(policy.victims()) == [child, parent, grandparent]
    policy.remove(parent)
    use(policy, [key("other")])
    assert set(policy.victims()) == {child, grandparent}
    policy.add(parent, grandparent)
    assert list(policy.victims()) == [child, parent, grandparent]


def test_what_was_added_last_goes_before_what_was_used_since() -> None:
    policy = DensityPolicy()
    one, last = key("one"), key("last")
    store(policy, [one])
    store(policy, [last])
    use(policy, [one])
    assert next(policy.victims()) == last
    assert list(policy.victims()) == [last, one]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 4)), max_size=40))
def test_before_it_has_learned_it_evicts_as_lru_does(
    requests: list[tuple[int, int, int]],
) -> None:
    """Prompts share a head of up to three chunks, and have a tail of their own."""
    density, lru = Cache(DensityPolicy(), 8), Cache(LruPolicy(), 8)
    head = chain("head", length=3)
    for shared, branch, length in requests:
        keys = head[:shared] + chain("tail", shared, branch, length=length)
        assert density.request(keys) == lru.request(keys)
        assert density.held == lru.held
    assert not density.refused
    assert list(density.policy.victims()) == list(lru.policy.victims())


# --- refused --------------------------------------------------------------------------------------


def refusing() -> tuple[DensityPolicy, list[CacheKey], CacheKey]:
    """The two first of a chain of four are cached, the third is refused; a later chunk is cached.

    The third is refused since the first victim, the second, is of the same prompt.
    """
    policy = DensityPolicy()
    keys, later = chain("a", length=4), key("later")
    use(policy, keys)
    policy.add(keys[0], None)
    policy.add(keys[1], keys[0])
    store(policy, [later])
    assert next(policy.victims()) == keys[1]
    assert not policy.admits(keys[2], keys[1])
    return policy, keys, later


def test_a_prompt_keeps_its_head_where_it_does_not_fit() -> None:
    cache = Cache(DensityPolicy(), 6)
    cache.request(chain("before", length=6))
    keys = chain("long", length=10)
    cache.request(keys)
    assert cache.held == set(keys[:6])
    assert cache.refused == keys[6:]
    assert cache.request(keys) == 6


def test_a_refused_chunk_is_the_first_victim() -> None:
    policy, keys, later = refusing()
    policy.add(keys[2], keys[1])
    policy.add(key("other"), None)
    assert next(policy.victims()) == keys[2]
    assert list(policy.victims()) == [keys[2], keys[1], keys[0], later, key("other")]


def test_a_refused_chunk_is_the_first_victim_at_once() -> None:
    policy, keys, _ = refusing()
    policy.add(keys[2], keys[1])
    assert next(policy.victims()) == keys[2]


def test_what_follows_a_refused_chunk_is_refused() -> None:
    policy, keys, _ = refusing()
    for one in list(policy.victims()):
        policy.remove(one)
    # Nothing must go for it, so that only its parent keeps it out.
    assert not policy.admits(keys[3], keys[2])
    assert policy.admits(key("other"), None)


def test_what_follows_a_chunk_that_was_admitted_and_then_refused_is_refused() -> None:
    policy, keys = DensityPolicy(), chain("a", length=4)
    use(policy, keys)
    assert policy.admits(keys[2], keys[1])
    policy.add(keys[0], None)
    policy.add(keys[1], keys[0])
    assert not policy.admits(keys[2], keys[1])
    for one in list(policy.victims()):
        policy.remove(one)
    assert not policy.admits(keys[3], keys[2])


@pytest.mark.parametrize("other", [False, True])
def test_what_follows_a_refused_chunk_that_is_cached_is_refused(other: bool) -> None:
    """It would be admitted in place of its parent, and be of no use then."""
    policy, keys, _ = refusing()
    policy.add(keys[2], keys[1])
    if other:
        policy.add(key("other"), None)
    assert not policy.admits(keys[3], keys[2])


def test_what_follows_a_refused_chunk_that_was_cached_and_went_is_refused() -> None:
    """It was written to a store meanwhile."""
    policy, keys, _ = refusing()
    policy.add(keys[2], keys[1], first=True)
    policy.remove(keys[2])
    for one in list(policy.victims()):
        policy.remove(one)
    assert not policy.admits(keys[2], None)
    assert not policy.admits(keys[3], keys[2])


def test_a_refused_chunk_is_judged_again_when_it_is_used_again() -> None:
    policy, keys, later = refusing()
    policy.add(key("other"), None)
    use(policy, keys)
    assert next(policy.victims()) == later
    assert policy.admits(keys[2], keys[1])
    policy.add(keys[2], keys[1])
    assert list(policy.victims()) == [later, key("other"), *keys[2::-1]]


def test_a_refused_chunk_stays_refused_until_it_is_used() -> None:
    policy, keys, _ = refusing()
    for one in list(policy.victims()):
        policy.remove(one)
    assert not policy.admits(keys[2], None)
    use(policy, keys)
    assert policy.admits(keys[2], None)


def test_windows_that_were_evicted_come_again() -> None:
    """No request names those in the middle of its prompt, and no use would end their refusal."""
    policy = DensityPolicy()
    prompt, windows = chain("a", length=2), chain("window", length=2)
    use(policy, [*prompt, windows[-1]])
    policy.add(windows[0], None)
    policy.add(windows[1], windows[0])
    for one in reversed(windows):
        policy.remove(one)
    policy.add(key("other"), None)
    use(policy, [key("other")])
    assert policy.admits(windows[0], None)
    use(policy, [*prompt, windows[-1]])
    assert policy.admits(windows[1], windows[0])


def test_a_refused_chunk_that_was_pinned_is_as_any_other() -> None:
    policy, keys, later = refusing()
    policy.add(keys[2], keys[1])
    policy.remove(keys[2], Left.PINNED)
    policy.add(keys[2], keys[1])
    assert list(policy.victims()) == [later, *keys[2::-1]]


def test_a_use_makes_up_for_a_refusal() -> None:
    policy, keys, later = refusing()
    policy.add(keys[2], keys[1])
    use(policy, keys)
    assert list(policy.victims()) == [later, *keys[2::-1]]


# --- naming ---------------------------------------------------------------------------------------


def test_a_parent_is_not_named_before_its_child_where_another_child_is_removed() -> None:
    policy = DensityPolicy()
    parent, one, two, late = key("parent"), key("one"), key("two"), key("late")
    store(policy, [parent])
    policy.add(one, parent)
    policy.add(two, parent)
    use(policy, [key("between")])
    policy.add(late, parent)
    named: list[CacheKey] = []
    for victim in policy.victims():
        named.append(victim)
        if victim == one:
            policy.remove(one)
    assert named == [one, two, late, parent]


# --- remembered -----------------------------------------------------------------------------------


def test_what_is_remembered_is_bounded() -> None:
    policy = DensityPolicy()
    for number in range(1000):
        use(policy, chain(number, length=40))
        assert remembered(policy) <= 8_192 + 40
    assert remembered(policy) >= 4_096


def test_what_is_remembered_grows_with_what_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    places.patch(monkeypatch, "REMEMBERED_MIN", 16)
    places.patch(monkeypatch, "REMEMBERED_MAX", 80)
    policy = DensityPolicy()
    for cached, least, most in ((2, 12, 24), (10, 28, 56), (50, 40, 80)):
        while len(policy) < cached:
            store(policy, [key("cached", len(policy))])
        for number in range(200):
            use(policy, [key(cached, number)])
        assert least <= remembered(policy) <= most + 1


def test_a_key_is_remembered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The older half has the prompt when a chunk is refused."""
    places.patch(monkeypatch, "REMEMBERED_MIN", 4)
    policy, keys, _ = refusing()
    policy.add(keys[2], keys[1])
    policy.remove(keys[2], Left.GONE)
    policy.add(keys[3], keys[2])
    assert remembered(policy) == 0


def test_places_of_earlier_uses_are_bounded() -> None:
    """A chunk that is used again and again has a place for each, until there are too many."""
    policy = DensityPolicy()
    first, often = key("first"), key("often")
    store(policy, [first])
    store(policy, [often])
    for _ in range(10_000):
        use(policy, [often])
    assert sum(map(len, vars(policy)["_queues"])) <= 3 * (QUEUE_MIN + 4)
    assert list(policy.victims()) == [first, often]

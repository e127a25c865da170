"""By density: the order after it has learned, and what LRU would have."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from tests import places
from tests.tiers.policy import caches
from tests.tiers.policy.caches import Cache, chain, documents, key, remembered, store, use
from tiers.policy import density
from tiers.policy.density import CHOSEN_FOR, REMEMBERED_MIN, TRIED_EVERY, DensityPolicy
from tiers.policy.key import Left
from tiers.policy.lru import LruPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tiers.policy import Policy
    from tiers.policy.key import CacheKey

CAPACITY = 256


def learned(made: Callable[[], Policy] = DensityPolicy) -> Cache:
    """A cache that has seen documents come again, and other prompts not."""
    cache = Cache(made(), CAPACITY)
    for keys in documents(2500, seed=1):
        cache.request(keys)
    return cache


def first_of(policy: Policy, *keys: CacheKey) -> list[CacheKey]:
    """These keys in the order of eviction."""
    return [one for one in policy.victims() if one in keys]


def test_a_chunk_of_two_requests_outlives_many_of_one() -> None:
    """As many as fit four times into the cache."""
    held: dict[str, int] = {}
    for made in (DensityPolicy, LruPolicy):
        cache = learned(made)
        keys = chain("two requests", length=4)
        cache.request(keys)
        cache.request(keys)
        for number in range(CAPACITY):
            cache.request(chain("once", number, length=4))
        held[made.__name__] = len(cache.held & set(keys))
    assert held == {"DensityPolicy": 4, "LruPolicy": 0}


def test_what_is_learned_has_more_hits() -> None:
    requests = list(documents(4000, seed=2))
    found = caches.hit_ratio(DensityPolicy(), CAPACITY, requests)
    assert found > 2 * caches.lru_hit_ratio(CAPACITY, requests)


def in_use() -> Cache:
    """Has learned, and is full of chunks of documents only."""
    cache = learned()
    cache.capacity = 160
    for number in range(40):
        cache.request(chain("document", number, length=4))
    wanted = {one for number in range(40) for one in chain("document", number, length=4)}
    for one in cache.held - wanted:
        cache.policy.remove(one)
    cache.held &= wanted
    assert len(cache.held) == cache.capacity
    return cache


def test_what_is_worth_less_than_all_is_refused_but_tried_now_and_then() -> None:
    policy = in_use().policy
    admitted: list[bool] = []
    for number in range(4 * TRIED_EVERY):
        keys = chain("once", "tried", number, length=2)
        use(policy, keys)
        first, second = policy.admits(keys[0], None), policy.admits(keys[1], keys[0])
        assert first == second
        admitted.append(first)
    assert sum(admitted) == 4
    assert len({number % TRIED_EVERY for number, one in enumerate(admitted) if one}) == 1


def test_what_is_used_again_is_admitted() -> None:
    policy = in_use().policy
    keys = chain("again", length=2)
    use(policy, [key("not tried")] if tried_next(policy) else [])
    use(policy, keys)
    assert not policy.admits(keys[0], None)
    use(policy, keys)
    assert policy.admits(keys[0], None)
    policy.add(keys[0], None)
    assert policy.admits(keys[1], keys[0])


def tried_next(policy: Policy) -> bool:
    """Whether the next request is admitted in any case."""
    requests: int = vars(policy)["_requests"]
    return requests % TRIED_EVERY == TRIED_EVERY - 1


def test_what_comes_in_large_prompts_is_told_apart() -> None:
    """Large prompts come again, small ones do not."""
    cache = Cache(DensityPolicy(), 600)
    large = [chain("large", number, length=50) for number in range(200)]
    for number in range(200):
        cache.request(large[number])
        for small in range(30):
            cache.request(chain("small", number, small, length=1))
        if number >= 20:
            cache.request(large[number - 20])
    policy = cache.policy
    one, other = chain("large", "new", length=50), key("small", "new")
    store(policy, one)
    store(policy, [other])
    assert first_of(policy, one[-1], other) == [other, one[-1]]
    # An answer is as its prompt.
    answer, small_answer = key("answer"), key("small answer")
    policy.add(answer, one[-1])
    policy.add(small_answer, other)
    assert first_of(policy, answer, small_answer) == [small_answer, answer]


def test_a_pinned_key_keeps_its_kind() -> None:
    policy = learned().policy
    twice, once = key("twice"), key("once more")
    store(policy, [twice])
    use(policy, [twice])
    store(policy, [once])
    assert first_of(policy, once, twice) == [once, twice]
    policy.remove(twice)
    assert first_of(policy, once, twice) == [once]
    policy.add(twice, None)
    policy.remove(once)
    policy.add(once, None)
    assert first_of(policy, once, twice) == [once, twice]


def test_a_key_that_is_used_while_it_is_pinned_counts_that() -> None:
    policy = learned().policy
    pinned, once = key("pinned"), key("once more")
    store(policy, [pinned])
    policy.remove(pinned)
    use(policy, [pinned])
    policy.add(pinned, None)
    store(policy, [once])
    assert first_of(policy, once, pinned) == [once, pinned]


def test_a_forgotten_key_is_as_one_that_never_came() -> None:
    policy = learned().policy
    forgotten, kept = key("forgotten"), key("kept")
    for one in (forgotten, kept):
        store(policy, [one])
        use(policy, [one])
    policy.remove(forgotten, Left.GONE)
    policy.add(forgotten, None)
    assert first_of(policy, forgotten, kept) == [forgotten, kept]
    policy.remove(forgotten, Left.GONE)
    store(policy, [forgotten])
    assert first_of(policy, forgotten, kept) == [forgotten, kept]


def test_uses_of_an_earlier_run_count() -> None:
    policy = learned().policy
    often, once, never = key("often"), key("once more"), key("never")
    policy.add(often, None, uses=2)
    policy.add(once, None, uses=1)
    policy.add(never, None)
    assert first_of(policy, often, once, never)[0] == never
    # What this run knows is newer.
    known = key("known")
    use(policy, [known])
    policy.add(known, None, uses=9)
    assert first_of(policy, often, once, known)[0] == known


def test_an_answer_counts_as_new() -> None:
    policy = learned().policy
    prompt, answer, once = key("prompt"), key("answer"), key("once more")
    store(policy, [prompt])
    use(policy, [prompt])
    policy.add(answer, prompt)
    assert first_of(policy, prompt, answer) == [answer, prompt]
    store(policy, [once])
    assert first_of(policy, prompt, answer, once)[-1] == prompt


# --- what LRU would have --------------------------------------------------------------------------


def used_twice(count: int) -> Iterator[list[CacheKey]]:
    """Each prompt comes again once, after 39 others: LRU has all of that."""
    for number in range(count):
        yield chain("twice", number, length=4)
        if number >= 20:
            yield chain("twice", number - 20, length=4)


def hits_after_a_change(made: Callable[[], Policy]) -> float:
    cache = learned(made)
    requests = list(used_twice(2000))
    return sum(cache.request(keys) for keys in requests) / sum(map(len, requests))


def test_after_a_change_it_is_not_far_behind_lru(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was learned before is wrong then."""
    guarded, lru = hits_after_a_change(DensityPolicy), hits_after_a_change(LruPolicy)
    assert lru > 0.49
    assert guarded > lru - 0.08
    places.patch(monkeypatch, "PAUSE_SPANS", 0)
    assert hits_after_a_change(DensityPolicy) < guarded - 0.03


@pytest.mark.parametrize("others", [0, 5000])
def test_pinned_chunks_do_not_count_as_lost_hits(others: int) -> None:
    """A shared head that is pinned is not the policy's, and is in each prompt; in the first not."""
    hits: dict[str, int] = {}
    for made in (DensityPolicy, LruPolicy):
        cache = Cache(made(), CAPACITY)
        head = chain("head", length=16)
        store(cache.policy, head)
        cache.held.update(head)
        for one in reversed(head):
            cache.pin(one)
        for number in range(others):
            cache.request(chain("other", number, length=8))
        requests = documents(4000, seed=2)
        hits[made.__name__] = sum(cache.request(head + keys) - len(head) for keys in requests)
    assert hits["DensityPolicy"] > 1.5 * hits["LruPolicy"]


def lengthy(count: int) -> Iterator[list[CacheKey]]:
    """Prompts of several lengths, of which some come again after a while."""
    for number in range(count):
        yield chain("prompt", number, length=1 + 7 * (number % 8))
        if number % 3 and number > 40:
            yield chain("prompt", number - 40, length=1 + 7 * ((number - 40) % 8))


def test_kinds_are_compared_again_after_a_request_and_some_victims(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other policy gets the same calls, and compares them for each victim."""
    cache, exact, differed = Cache(DensityPolicy(), 400), DensityPolicy(), 0

    def exactly() -> CacheKey:
        monkeypatch.setattr(density, "CHOSEN_FOR", 1)
        first = next(exact.victims())
        monkeypatch.setattr(density, "CHOSEN_FOR", CHOSEN_FOR)
        return first

    for keys in lengthy(600):
        use(cache.policy, keys)
        use(exact, keys)
        for number in range(len(cache.held) - cache.capacity + len(keys)):
            first = next(cache.policy.victims())
            same = first == exactly()
            assert same or number % CHOSEN_FOR
            differed += not same
            for policy in (cache.policy, exact):
                policy.remove(first)
            cache.held.remove(first)
        for number, one in enumerate(keys):
            if one not in cache.held:
                cache.add(one, keys[number - 1] if number else None)
                exact.add(one, keys[number - 1] if number else None)
    assert differed


def test_naming_victims_changes_nothing_of_what_was_learned() -> None:
    """Two caches get the same requests; the victims of one are named now and then."""
    one, other = Cache(DensityPolicy(), CAPACITY), Cache(DensityPolicy(), CAPACITY)
    for number, keys in enumerate(documents(2500, seed=1)):
        assert one.request(keys) == other.request(keys)
        if number % 10 == 0:
            for _ in range(10):
                list(itertools.islice(other.policy.victims(), 2))
    assert one.held == other.held
    assert list(one.policy.victims()) == list(other.policy.victims())


def test_what_is_refused_is_bounded_without_any_request() -> None:
    """Chunks of answers are in no prompt, and each of them may be refused."""
    policy = in_use().policy
    assert not any(policy.admits(key("answer", number), None) for number in range(50_000))
    assert remembered(policy) <= REMEMBERED_MIN + 4


def test_what_follows_a_refused_chunk_of_an_answer_is_refused() -> None:
    policy = in_use().policy
    answer = chain("answer", length=3)
    assert not policy.admits(answer[0], None)
    for one in list(policy.victims()):
        policy.remove(one)
    # Nothing must go for it, so that only its parent keeps it out.
    assert not policy.admits(answer[1], answer[0])
    use(policy, [answer[2]])
    assert policy.admits(answer[2], answer[1])

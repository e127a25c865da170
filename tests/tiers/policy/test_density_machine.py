"""By density, against a model: a set of cached chains, of which any part may be pinned or missing.

Two policies get the same calls. What they remember is small, so that it is full in a few steps.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.tiers.policy import caches
from tests.tiers.policy.caches import sampled_key
from tiers.policy import density, reuse
from tiers.policy.density import DensityPolicy
from tiers.policy.key import CacheKey, Left

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

T = TypeVar("T")
CAPACITY: Final = 10
NODES: Final = 30
LONGEST: Final = 5
REMEMBERED: Final = 64
SAMPLED: Final = 8
CONSTANTS: Final[dict[ModuleType, dict[str, object]]] = {
    density: {
        "CHOSEN_FOR": 2,
        "LEARNED_MIN": 12,
        "NEW_TOKENS": (2, 4, 8, 16),
        "QUEUE_MIN": 4,
        "REMEMBERED_MAX": REMEMBERED,
        "REMEMBERED_MIN": 24,
        "TRIED_EVERY": 4,
    },
    reuse: {"KIND_WEIGHT": 1.0, "SAMPLED_MAX": SAMPLED, "SAMPLED_MIN": 4, "USES_WEIGHT": 1.0},
}


KEYS: Final = [sampled_key(number, sampled=number % 3 > 0) for number in range(NODES)]


def parent(number: int) -> int | None:
    """Two trees, of which each node has up to two children."""
    return (number - 2) // 2 if number >= 2 else None


def path(number: int) -> list[CacheKey]:
    """The chain down to a node, head first."""
    above = parent(number)
    return [KEYS[number]] if above is None else [*path(above), KEYS[number]]


PARENTS: Final = {
    one: None if (above := parent(number)) is None else KEYS[above]
    for number, one in enumerate(KEYS)
}


class Density(RuleBasedStateMachine):
    nodes = st.integers(0, NODES - 1)

    def __init__(self) -> None:
        super().__init__()
        self.policies = (DensityPolicy(), DensityPolicy())
        self.cached: dict[CacheKey, CacheKey | None] = {}
        """Each key with its parent."""
        self.pinned: dict[CacheKey, CacheKey | None] = {}
        self.prompts = 0

    def both(self, ask: Callable[[DensityPolicy], T]) -> T:
        one, other = map(ask, self.policies)
        assert one == other
        return one

    def add(self, key: CacheKey, above: CacheKey | None, uses: int = 0) -> None:
        self.both(lambda policy: policy.add(key, above, uses))
        self.cached[key] = above

    def remove(self, key: CacheKey, why: Left = Left.EVICTED) -> CacheKey | None:
        self.both(lambda policy: policy.remove(key, why))
        return self.cached.pop(key)

    def admits(self, key: CacheKey, above: CacheKey | None) -> bool:
        return self.both(lambda policy: policy.admits(key, above))

    def evict(self) -> None:
        self.remove(self.both(lambda policy: next(policy.victims())))

    def store(self, keys: Sequence[CacheKey], tokens: int, stubborn: bool) -> None:
        """A request; what is refused is added if `stubborn`."""
        self.both(lambda policy: policy.use(keys, tokens))
        refused: CacheKey | None = None
        for above, key in itertools.pairwise([None, *keys]):
            if key is None or key in self.cached or key in self.pinned:
                continue
            if len(self.cached) >= CAPACITY:
                admitted = self.admits(key, above)
                # What follows a refused chunk is of no use without it.
                assert not admitted or above is None or above != refused
                if not admitted and not stubborn:
                    refused = key
                    continue
                self.evict()
            self.add(key, above)

    @rule(number=nodes, tokens=st.integers(0, 20), stubborn=st.booleans())
    def request(self, number: int, tokens: int, stubborn: bool) -> None:
        self.store(path(number), tokens, stubborn)

    @rule(length=st.integers(1, LONGEST), sampled=st.booleans(), stubborn=st.booleans())
    def new_prompt(self, length: int, sampled: bool, stubborn: bool) -> None:
        self.prompts += 1
        keys = [sampled_key("new", self.prompts, n, sampled=sampled) for n in range(length)]
        self.store(keys, length, stubborn)

    @rule(number=nodes)
    def use_alone(self, number: int) -> None:
        self.both(lambda policy: policy.use([KEYS[number]], 0))

    @precondition(lambda self: len(self.cached) < CAPACITY)
    @rule(number=nodes, uses=st.integers(0, 3))
    def add_alone(self, number: int, uses: int) -> None:
        """Its parent may come later, or never, as after a restart."""
        key = KEYS[number]
        if key not in self.cached and key not in self.pinned:
            self.add(key, PARENTS[key], uses)

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.cached)))
        self.pinned[key] = self.remove(key, Left.PINNED)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.pinned)))
        self.add(key, self.pinned.pop(key))

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        self.remove(data.draw(st.sampled_from(sorted(self.cached))), Left.GONE)

    @precondition(lambda self: self.cached)
    @rule(count=st.integers(1, 4))
    def evict_some(self, count: int) -> None:
        for _ in range(min(count, len(self.cached))):
            self.evict()

    @rule(count=st.integers(2, 4))
    def name_some(self, count: int) -> None:
        named = self.both(lambda policy: list(itertools.islice(policy.victims(), count)))
        assert len(set(named)) == min(count, len(self.cached))

    @rule()
    def name_all(self) -> None:
        named = self.both(lambda policy: list(policy.victims()))
        assert len(named) == len(self.cached)
        assert set(named) == self.cached.keys()
        places = {key: place for place, key in enumerate(named)}
        for key, above in self.cached.items():
            assert above is None or above not in places or places[key] < places[above]

    @rule(removed=st.lists(st.booleans(), max_size=CAPACITY), why=st.sampled_from(Left))
    def remove_what_is_named(self, removed: list[bool], why: Left) -> None:
        """Remove some of the victims, each when it is named."""
        expected, named = set(self.cached), set[CacheKey]()
        remove = itertools.chain(removed, itertools.repeat(False))
        for one, other in zip(*(policy.victims() for policy in self.policies), strict=True):
            assert one == other
            named.add(one)
            assert all(key in named for key, above in self.cached.items() if above == one)
            if next(remove):
                self.remove(one, why)
        assert named == expected

    @invariant()
    def the_first_victim_has_no_cached_child(self) -> None:
        first = self.both(lambda policy: next(policy.victims(), None))
        assert (first is None) == (not self.cached)
        assert first is None or first in self.cached
        assert first is None or first not in self.cached.values()

    @invariant()
    def what_it_remembers_is_bounded(self) -> None:
        for policy in self.policies:
            assert len(policy) == len(self.cached)
            state = vars(policy)
            assert caches.remembered(policy) <= REMEMBERED + 2 * LONGEST
            sample = state["_sample"]
            assert len(sample) <= SAMPLED + LONGEST
            assert len(vars(sample)["_lru"]) <= CAPACITY
            most = 2 * (CAPACITY + len(self.pinned) + NODES) + 4
            assert all(len(queue) <= most for queue in state["_queues"])
            assert len(state["_orphans"]) <= len(self.cached)
            assert state["_namings"] == []

    def teardown(self) -> None:
        self.name_all()
        while self.cached:
            self.the_first_victim_has_no_cached_child()
            self.evict()
        for policy in self.policies:
            assert vars(policy)["_orphans"] == {}


def test_cached_chains_are_named_from_their_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, constants in CONSTANTS.items():
        for name, value in constants.items():
            monkeypatch.setattr(module, name, value)
    run_state_machine_as_test(
        Density, settings=settings(max_examples=100, stateful_step_count=50, deadline=None)
    )

"""What every policy must do, whatever its order."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

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

from tiers import policy
from tiers.policy.key import Left

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiers.policy import Policy
    from tiers.policy.key import CacheKey

NAMES = sorted(policy.POLICIES)
TOKENS = 512


def key(number: int) -> CacheKey:
    return 1, number.to_bytes(32, "big")


KEYS = [key(number) for number in range(13)]
A = KEYS[0]


def filled(name: str, count: int) -> Policy:
    made = policy.POLICIES[name]()
    for number in range(count):
        made.add(KEYS[number], None)
    return made


@pytest.mark.parametrize("name", NAMES)
def test_what_the_caller_gets_wrong_is_an_error(name: str) -> None:
    made = policy.POLICIES[name]()
    assert list(made.victims()) == []
    with pytest.raises(KeyError):
        made.remove(A)
    made.add(A, None)
    with pytest.raises(KeyError, match="added twice"):
        made.add(A, None)
    assert list(made.victims()) == [A]
    made.remove(A)
    for why in Left:
        with pytest.raises(KeyError):
            made.remove(A, why)
    assert list(made.victims()) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_use_of_what_is_not_cached_adds_nothing(name: str) -> None:
    made = filled(name, 2)
    made.use([key(100), key(101)], 2 * TOKENS)
    made.use([], 0)
    assert list(made.victims()) == KEYS[:2]
    made.add(key(100), None)
    assert list(made.victims()) == [*KEYS[:2], key(100)]


@pytest.mark.parametrize("name", NAMES)
def test_keys_of_two_realms_differ(name: str) -> None:
    made = policy.POLICIES[name]()
    one, other = (1, bytes(32)), (2, bytes(32))
    made.add(one, None)
    made.add(other, None)
    made.remove(one)
    assert list(made.victims()) == [other]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_new_is_admitted_while_there_is_room(name: str) -> None:
    made = policy.POLICIES[name]()
    for number, one in enumerate(KEYS):
        made.use([one], TOKENS)
        assert made.admits(one, None)
        made.add(one, None)
        assert list(made.victims()) == KEYS[: number + 1]


@pytest.mark.parametrize("name", NAMES)
def test_naming_victims_changes_nothing(name: str) -> None:
    made = filled(name, 5)
    assert list(itertools.islice(made.victims(), 2)) == KEYS[:2]
    assert list(made.victims()) == list(made.victims()) == KEYS[:5]


@pytest.mark.parametrize("name", NAMES)
def test_victims_may_be_removed_while_they_are_named(name: str) -> None:
    made = filled(name, 6)
    named: list[CacheKey] = []
    for one in made.victims():
        named.append(one)
        if one == KEYS[1]:
            made.remove(KEYS[1])
            made.remove(KEYS[2])
            made.remove(KEYS[3])
            made.remove(KEYS[0])
    assert named == [KEYS[0], KEYS[1], KEYS[4], KEYS[5]]
    assert list(made.victims()) == [KEYS[4], KEYS[5]]


@pytest.mark.parametrize("name", NAMES)
def test_each_victim_may_be_removed_when_it_is_named(name: str) -> None:
    made = filled(name, 6)
    named: list[CacheKey] = []
    for one in made.victims():
        named.append(one)
        made.remove(one)
    assert named == KEYS[:6]
    assert list(made.victims()) == []


@pytest.mark.parametrize("name", ["density", "lru"])
def test_removing_each_victim_leaves_prefixes(name: str) -> None:
    """The last of a chain came after a later request."""
    made = policy.POLICIES[name]()
    head, middle, tail, other = KEYS[:4]
    made.use([head, middle], 2 * TOKENS)
    made.add(head, None)
    made.add(middle, head)
    made.use([other], TOKENS)
    made.add(other, None)
    made.use([KEYS[4]], TOKENS)
    made.add(tail, middle)
    named: list[CacheKey] = []
    for one in made.victims():
        named.append(one)
        made.remove(one)
    assert named == [other, tail, middle, head]


@pytest.mark.parametrize("name", ["density", "lru"])
def test_a_use_of_what_follows_is_one_of_what_precedes(name: str) -> None:
    made = policy.POLICIES[name]()
    head, early, late, other = KEYS[:4]
    made.use([head, early], 2 * TOKENS)
    made.add(head, None)
    made.add(early, head)
    made.use([other], TOKENS)
    made.add(other, None)
    made.use([KEYS[4]], TOKENS)
    made.add(late, head)
    made.remove(late)
    made.remove(early)
    assert list(made.victims()) == [other, head]


@pytest.mark.parametrize("name", NAMES)
def test_using_what_is_named_comes_to_an_end(name: str) -> None:
    """Only what is added before the second step may be named with what was there."""
    made = filled(name, 4)
    named: list[CacheKey] = []
    for number, one in enumerate(made.victims()):
        made.use([one], TOKENS)
        made.add(key(100 + number), None)
        named.append(one)
    assert named[:4] == KEYS[:4]
    assert named[4:] in ([], [key(100)])


@pytest.mark.parametrize("name", ["density", "lru"])
def test_what_is_used_before_it_is_named_is_left_out(name: str) -> None:
    made = filled(name, 5)
    victims = made.victims()
    assert [next(victims), next(victims)] == KEYS[:2]
    made.use([KEYS[3]], TOKENS)
    assert list(victims) == [KEYS[2], KEYS[4]]
    assert list(made.victims()) == [*KEYS[:3], KEYS[4], KEYS[3]]


@pytest.mark.parametrize("name", NAMES)
def test_two_iterations_do_not_disturb_each_other(name: str) -> None:
    made = filled(name, 4)
    one, other = made.victims(), made.victims()
    assert [next(one), next(other), next(one)] == [KEYS[0], KEYS[0], KEYS[1]]
    made.remove(KEYS[2])
    assert list(one) == [KEYS[3]]
    made.remove(KEYS[1])
    assert list(other) == [KEYS[3]]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("removed_first", [0, 1])
def test_a_key_may_be_its_own_parent(name: str, removed_first: int) -> None:
    """No chain of hashes has such a key, and a client may send one."""
    made = policy.POLICIES[name]()
    made.add(KEYS[0], KEYS[0])
    made.add(KEYS[1], KEYS[0])
    assert set(made.victims()) == set(KEYS[:2])
    made.remove(KEYS[removed_first])
    assert list(made.victims()) == [KEYS[1 - removed_first]]
    made.remove(KEYS[1 - removed_first])
    assert list(made.victims()) == []


class AnyPolicy(RuleBasedStateMachine):
    """A set is the model of what is named; parents may be anything, circles included."""

    keys = st.sampled_from(KEYS)

    name = ""

    def __init__(self) -> None:
        super().__init__()
        self.policy = policy.POLICIES[self.name]()
        self.model: set[CacheKey] = set()
        self.iteration: Iterator[CacheKey] | None = None
        self.named: set[CacheKey] = set()

    @rule(key=keys, parent=st.none() | keys, uses=st.integers(0, 3))
    def add_or_use(self, key: CacheKey, parent: CacheKey | None, uses: int) -> None:
        if key in self.model:
            self.policy.use([key], TOKENS)
        else:
            self.policy.add(key, parent, uses)
            self.model.add(key)

    @rule(keys=st.lists(keys, unique=True, max_size=6), tokens=st.sampled_from([0, 1, 50_000]))
    def use(self, keys: list[CacheKey], tokens: int) -> None:
        self.policy.use(keys, tokens)

    @rule(key=keys, parent=st.none() | keys)
    def ask(self, key: CacheKey, parent: CacheKey | None) -> None:
        if key not in self.model:
            self.policy.admits(key, parent)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), why=st.sampled_from(Left))
    def remove(self, data: st.DataObject, why: Left) -> None:
        key = data.draw(st.sampled_from(sorted(self.model)))
        self.policy.remove(key, why)
        self.model.remove(key)
        self.named.discard(key)

    @rule()
    def start_naming(self) -> None:
        self.iteration, self.named = self.policy.victims(), set()

    @precondition(lambda self: self.iteration is not None)
    @rule()
    def name_one(self) -> None:
        assert self.iteration is not None
        key = next(self.iteration, None)
        if key is None:
            self.iteration = None
            return
        assert key in self.model
        assert key not in self.named
        self.named.add(key)

    @invariant()
    def names_what_is_there(self) -> None:
        named = list(self.policy.victims())
        assert len(named) == len(self.model)
        assert set(named) == self.model


@pytest.mark.parametrize("name", NAMES)
def test_names_what_was_added_and_not_removed(name: str) -> None:
    run_state_machine_as_test(
        type(f"Any_{name}", (AnyPolicy,), {"name": name}),
        settings=settings(max_examples=60, stateful_step_count=40, deadline=None),
    )

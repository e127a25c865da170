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

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from tiers.policy import Policy

NAMES = sorted(policy.POLICIES)


def filled(name: str, count: int) -> Policy:
    made = policy.POLICIES[name]()
    for number in range(count):
        made.add(number, None)
    return made


@pytest.mark.parametrize("name", NAMES)
def test_what_the_caller_gets_wrong_is_an_error(name: str) -> None:
    made = policy.POLICIES[name]()
    assert list(made.victims()) == []
    with pytest.raises(KeyError):
        made.touch("a")
    with pytest.raises(KeyError):
        made.remove("a")
    made.add("a", None)
    with pytest.raises(KeyError, match="added twice"):
        made.add("a", None)
    made.remove("a")
    with pytest.raises(KeyError):
        made.remove("a")
    assert list(made.victims()) == []


@pytest.mark.parametrize("name", NAMES)
def test_naming_victims_changes_nothing(name: str) -> None:
    made = filled(name, 5)
    assert list(itertools.islice(made.victims(), 2)) == [0, 1]
    assert list(made.victims()) == list(made.victims()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", NAMES)
def test_victims_may_be_removed_while_they_are_named(name: str) -> None:
    made = filled(name, 6)
    named: list[Hashable] = []
    for key in made.victims():
        named.append(key)
        if key == 1:
            made.remove(1)
            made.remove(2)
            made.remove(3)
            made.remove(0)
    assert named == [0, 1, 4, 5]
    assert list(made.victims()) == [4, 5]


@pytest.mark.parametrize("name", NAMES)
def test_touching_what_is_named_comes_to_an_end(name: str) -> None:
    made = filled(name, 4)
    named: list[Hashable] = []
    for key in made.victims():
        made.touch(key)
        made.add(("new", key), None)
        named.append(key)
    assert named == [0, 1, 2, 3]


@pytest.mark.parametrize("name", NAMES)
def test_two_iterations_do_not_disturb_each_other(name: str) -> None:
    made = filled(name, 4)
    one, other = made.victims(), made.victims()
    assert [next(one), next(other), next(one)] == [0, 0, 1]
    made.remove(2)
    assert list(one) == [3]
    made.remove(1)
    assert list(other) == [3]


class AnyPolicy(RuleBasedStateMachine):
    """A set is the model of what is named; parents may be anything, circles included."""

    keys = st.integers(0, 12)

    name = ""

    def __init__(self) -> None:
        super().__init__()
        self.policy = policy.POLICIES[self.name]()
        self.model: set[int] = set()
        self.iteration: Iterator[Hashable] | None = None
        self.named: set[Hashable] = set()

    @rule(key=keys, parent=st.none() | keys)
    def add_or_touch(self, key: int, parent: int | None) -> None:
        if key in self.model:
            self.policy.touch(key)
        else:
            self.policy.add(key, parent)
            self.model.add(key)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.model)))
        self.policy.remove(key)
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

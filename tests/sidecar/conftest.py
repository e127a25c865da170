"""What several tests of the sidecar start with."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

from tests import places
from tests.sidecar.bench import Bench, new_bench
from tests.sidecar.client import RunningSidecar, config_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.sidecar.subscriber import Subscriber


@pytest.fixture(scope="module", autouse=True)
def lag_is_no_problem() -> Iterator[None]:
    """A machine that pauses makes the loop late: a problem of its own, beside what is tested."""
    with places.patched("LAG_SECONDS_MAX", math.inf):
        yield


@pytest.fixture
def sidecar(short_directory: Path) -> Iterator[RunningSidecar]:
    with RunningSidecar(config_in(short_directory)) as running:
        yield running


@pytest.fixture
def bench() -> Iterator[Bench]:
    with new_bench() as bench:
        yield bench


@pytest.fixture
def subscribe() -> Iterator[Callable[..., Subscriber]]:
    """Makes subscribers of a sidecar's KV events."""
    # Not above: most tests need no vLLM.
    from tests.sidecar.subscriber import Subscriber

    made: list[Subscriber] = []

    def make(sidecar: RunningSidecar, **options: Any) -> Subscriber:
        subscriber = Subscriber(sidecar.events, sidecar.replay, **options)
        made.append(subscriber)
        return subscriber

    yield make
    for subscriber in made:
        subscriber.close()

"""`kvlake gc` where another process compacts one of two namespaces in the middle of its round."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from sidecar.catalog.garbage_collector import plan_of
from sidecar.config.model import load
from sidecar.protocol import Outcome
from sidecar.service.store_stack import open_store
from tests import places
from tests.sidecar.client import NAMESPACE, RunningSidecar, Worker, config_in, key_of
from tests.sidecar.test_storecommands import SOON, Command, kvlake, store
from tiers.catalog.compaction import compact
from tiers.store.middleware import Verb, Wrapper

T = TypeVar("T")
__all__ = ["kvlake", "store"]
OTHER = json.dumps({**json.loads(NAMESPACE), "group": ["other"]}).encode()


@pytest.fixture
def raced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The namespace whose first manifest is another compaction's, once there is one."""
    found: list[str] = []

    class Raced(Wrapper):
        async def _around(self, verb: Verb, name: str, call: Callable[[], Awaitable[T]]) -> T:
            folder, _, rest = name.partition("/catalog/")
            if verb == "write" and rest.startswith("manifest") and not found:
                found.append(folder.rpartition("/")[2])
                plan = plan_of(load(tmp_path / "command.yaml"))
                await compact(self._inner, folder, plan, time.time())
            return await call()

    places.patch(monkeypatch, "open_store", lambda settings: open_store(settings, Raced))
    return found


@pytest.fixture
def bounded(short_directory: Path, store: dict[str, Any]) -> dict[str, Any]:
    """A store of two namespaces with three chunks each, two of which are too many."""
    with RunningSidecar(config_in(short_directory, store=store)) as sidecar:
        for namespace in (NAMESPACE, OTHER):
            with Worker(sidecar.path, namespace=namespace) as worker:
                for number in range(3):
                    assert worker.store(number, key_of(number), [number]) is Outcome.OK
        sidecar.wait_until(lambda now: now["counters"]["chunks_written"] == 6)
    return {**store, "objects_max": 1, **SOON}


def test_a_namespace_that_another_compacted_is_named(
    bounded: dict[str, Any], raced: list[str], kvlake: Command
) -> None:
    """It ended with a traceback, and its numbers were of another namespace."""
    told = kvlake.json(bounded, "gc")
    assert told["left_to_others"] == raced
    [one] = told["namespaces"]
    assert one["namespace"] not in raced
    assert one["withdrawn"] == 2


def test_a_namespace_that_another_compacted_is_named_in_words(
    bounded: dict[str, Any], raced: list[str], kvlake: Command
) -> None:
    page = kvlake(bounded, "gc")
    assert f"another process compacted {raced[0]} at the same time; run kvlake gc again" in page


@pytest.mark.slow
def test_rounds_are_joined_by_namespace(
    bounded: dict[str, Any], raced: list[str], kvlake: Command
) -> None:
    told = kvlake.json(bounded, "gc", "--wait")
    assert told["left_to_others"] == []
    withdrawn = {one["namespace"]: one["withdrawn"] for one in told["namespaces"]}
    # The other one withdrew what is deleted here.
    assert withdrawn.pop(raced[0]) == 0
    assert list(withdrawn.values()) == [2]
    assert [one["deleted"] for one in told["namespaces"]] == [2, 2]

"""KV events of an engine with vLLM's own offloading: what vLLM publishes, and what the sidecar
makes of it. vLLM's scheduler, its connector and its publisher are real, and so is the sidecar."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVEventsConfig
from vllm.v1.core.kv_cache_utils import get_block_hash, maybe_convert_block_hash

from connector.offloading.keys import ChunkKeys
from sidecar.protocol import TIERS_OWNER
from tests.connector.configurations import BLOCK_TOKENS
from tests.connector.offloading_engine import CONFIG, Engine, engine_of, prompt
from tests.harness.sidecars import SidecarProcess
from tests.sidecar.subscriber import Subscriber

pytestmark = pytest.mark.usefixtures("warm_sidecars")


def events_in(folder: Path) -> KVEventsConfig:
    return KVEventsConfig(
        enable_kv_cache_events=True,
        publisher="zmq",
        endpoint=f"ipc://{folder}/e",
        replay_endpoint=f"ipc://{folder}/r",
    )


@contextlib.contextmanager
def subscribed(endpoint: str, replay: str) -> Generator[Subscriber]:
    subscriber = Subscriber(endpoint, replay)
    try:
        yield subscriber
    finally:
        subscriber.close()


def names_of(engine: Engine) -> set[Any]:
    """The hashes in vLLM's block pool."""
    pool: Any = engine.scheduler.kv_cache_manager.block_pool
    keys = pool.cached_block_hash_to_block._cache  # noqa: SLF001 (of vLLM)
    return {maybe_convert_block_hash(get_block_hash(key)) for key in keys}


def owned(subscriber: Subscriber, medium: str, prefix: str) -> dict[Any, Any]:
    """The blocks in a medium whose owner begins so, with the event that told of each."""
    return {
        name: event
        for place, held in subscriber.blocks.items()
        if place.medium == medium and (place.owner or "").startswith(prefix)
        for name, event in held.items()
    }


@pytest.mark.promise("events-engine")
def test_the_engine_is_followed_and_its_tiers_are_distinct(model: Path, tmp_path: Path) -> None:
    """GPU and vLLM's host tier from the engine; kvlake's tiers from the sidecar."""
    config = {**CONFIG, "events": {"enabled": True}}
    events = events_in(tmp_path)
    with (
        SidecarProcess(tmp_path / "s", config) as sidecar,
        engine_of(model, sidecar, events=events, self_describing_kv_events=True) as engine,
    ):
        told = sidecar.status()["events"]
        with (
            subscribed(told["endpoint"], told["replay_endpoint"]) as joined,
            subscribed(events.endpoint, str(events.replay_endpoint)) as own,
        ):
            tokens = prompt(5 * BLOCK_TOKENS + 1)
            engine.run("a", tokens)
            blocks = names_of(engine)
            assert len(blocks) == 5
            steps = itertools.count()

            def until(subscriber: Subscriber, medium: str, owner: str) -> None:
                """Until it has these blocks there; vLLM tells with its steps."""

                def told() -> bool:
                    engine.run(f"step-{next(steps)}", tokens[: BLOCK_TOKENS // 2])
                    return owned(subscriber, medium, owner).keys() == blocks

                subscriber.until(told)

            until(joined, "GPU", "engine/")
            until(joined, "CPU", "engine/")
            joined.until(lambda: len(owned(joined, "CPU", TIERS_OWNER)) == 5)
            for event in owned(joined, "CPU", TIERS_OWNER).values():
                assert (event.token_ids, event.block_size) == ([], 0)
            # In vLLM's own stream by vLLM's names, and with the tokens that vLLM knows of them.
            until(own, "CPU", TIERS_OWNER)
            of_the_tier = owned(own, "CPU", TIERS_OWNER)
            assert sorted(tuple(event.token_ids) for event in of_the_tier.values()) == sorted(
                tuple(tokens[start : start + BLOCK_TOKENS])
                for start in range(0, 5 * BLOCK_TOKENS, BLOCK_TOKENS)
            )
            keys: ChunkKeys = engine.manager.secondary_tiers[-1].keys
            assert {event.ownership for event in of_the_tier.values()} == {keys.owner}
            # After a reset of its own cache vLLM publishes that all blocks are gone, and tells no
            # tier. Only the sidecar's stream shows that those of kvlake are still there.
            engine.forget(host_tier=False)
            engine.run("b", prompt(BLOCK_TOKENS // 2))
            own.until(lambda: not own.names("GPU"))
            joined.until(lambda: not joined.names("GPU"))
            assert not owned(own, "CPU", TIERS_OWNER)
            assert len(owned(joined, "CPU", TIERS_OWNER)) == 5

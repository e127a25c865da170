"""Which chunks of a prompt a scheduler names to the sidecar, and how often."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from connector.offloading.workarounds import guard_tiers
from sidecar.protocol import Submit, Use
from tests.connector.configurations import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    request_of,
    spec_of,
    state_of,
    write_model,
)
from tests.connector.engine import Engine
from tests.connector.offloading_node import CONFIG, Node
from tests.connector.prompts import FULL, PROMPT, TAIL_BLOCKS, chain_of, seen
from tests.connector.test_groups import window
from tests.harness.sidecars import SidecarProcess


def keys_of(engine: Engine) -> list[bytes]:
    chain = chain_of(engine, PROMPT)
    return [*chain.keys, chain.partial(FULL, TAIL_BLOCKS)]


def test_a_prompt_is_named_once_before_it_is_stored(engine: Engine) -> None:
    engine.run(request_of("a", PROMPT, max_tokens=2 * CHUNK_TOKENS))
    [use] = engine.client.sent_of(Use)
    assert use.keys == keys_of(engine)
    assert use.num_tokens == len(PROMPT) // BLOCK_TOKENS * BLOCK_TOKENS
    assert use.groups == []
    stored = [
        chunk.key
        for submit in engine.ranks[0].client.sent_of(Submit)
        for job in submit.stores
        for chunk in job.chunks
    ]
    assert set(use.keys) < set(stored), "the answer is stored, too"


def test_a_prompt_that_is_loaded_is_named_once(engine: Engine) -> None:
    seen(engine)
    before = len(engine.client.sent_of(Use))
    engine.run(request_of("b", PROMPT, max_tokens=3))
    assert [use.keys for use in engine.client.sent_of(Use)[before:]] == [keys_of(engine)]


def test_a_prompt_in_the_engines_own_cache_is_named(engine: Engine) -> None:
    engine.run(request_of("a", PROMPT, max_tokens=1))
    engine.run(request_of("b", PROMPT, max_tokens=1))
    first, second = engine.client.sent_of(Use)
    assert first.keys == second.keys


def test_a_prompt_shorter_than_a_block_is_not_named(engine: Engine) -> None:
    engine.run(request_of("a", PROMPT[: BLOCK_TOKENS - 1], max_tokens=1))
    assert engine.client.sent_of(Use) == []


def test_what_is_not_cached_is_not_named(engine: Engine) -> None:
    engine.role.retire()
    engine.run(request_of("a", PROMPT, max_tokens=1))
    assert engine.client.sent_of(Use) == []


@pytest.mark.parametrize("other", [window(40), state_of()], ids=["window", "recurrent"])
def test_each_group_names_what_a_hit_needs(tmp_path: Path, other: Any) -> None:
    engine = Engine(write_model(tmp_path), specs=[spec_of(), other], num_blocks=400)
    try:
        engine.run(request_of("a", PROMPT, max_tokens=1))
        [use] = engine.client.sent_of(Use)
        full = [key for key, group in zip(use.keys, use.groups, strict=True) if group == 0]
        rest = [key for key, group in zip(use.keys, use.groups, strict=True) if group == 1]
        assert len(full) == len(PROMPT) // CHUNK_TOKENS + (len(PROMPT) % CHUNK_TOKENS > 0)
        assert 0 < len(rest) < len(full)
    finally:
        engine.close()


@pytest.mark.promise("offloading-touch")
@pytest.mark.usefixtures("warm_sidecars")
def test_a_tier_below_vllms_names_each_chunk_once(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SidecarProcess(tmp_path_factory.mktemp("s"), CONFIG) as sidecar:
        node = Node(sidecar.socket)
        guard_tiers(node.manager, preempted_are_new=False)
        named: list[list[bytes]] = []
        send = node.tier.client.send

        def record(session: Any, message: Any) -> bool:
            if isinstance(message, Use):
                named.append(message.keys)
                assert message.num_tokens == 16 * len(message.keys)
            return send(session, message)

        monkeypatch.setattr(node.tier.client, "send", record)
        words = ["a", "b", "c"]
        node.store("first", words)
        node.settle()
        assert [len(keys) for keys in named] == [3]
        # vLLM's own host tier serves it.
        assert node.find("again", words) == 3
        assert named[1:] == named[:1]
        del named[1:]
        other = Node(sidecar.socket)
        monkeypatch.setattr(other.tier.client, "send", record)
        assert other.find("second", [*words, "d"]) == 3
        named_twice = [key for keys in named[1:] for key in keys]
        assert named_twice[:3] == named[0]
        assert len(named_twice) == 4, "the fourth is missing, and in the prompt"
        other.close()
        node.close()

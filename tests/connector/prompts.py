"""A prompt that an engine has seen before: its keys, what was sent for it, what was counted."""

from __future__ import annotations

from typing import Any

from connector.identity.namespace import digest_of
from connector.scheduler.stats import Stats
from sidecar.protocol import Limits, Submit
from tests.connector.configurations import BLOCK_TOKENS, CHUNK_TOKENS, request_of
from tests.connector.engine import Engine
from tiers.kv.keys import KeyChain, root_key

PROMPT = [number % 97 for number in range(300)]
"""Four full chunks, and a tail of two blocks and 12 tokens."""
FULL, TAIL_BLOCKS = len(PROMPT) // CHUNK_TOKENS, 2
CACHED = FULL * CHUNK_TOKENS + TAIL_BLOCKS * BLOCK_TOKENS


def chain_of(engine: Engine, tokens: list[int], salt: str = "") -> KeyChain:
    """The keys that these tokens have in this engine."""
    root = root_key(digest_of(engine.connector._engine.groups[0].namespace), salt=salt)  # noqa: SLF001 (its public names are vLLM's)
    chain = KeyChain(root, CHUNK_TOKENS, BLOCK_TOKENS)
    chain.extend(tokens)
    return chain


def seen(engine: Engine, tokens: list[int] | None = None, **fields: Any) -> None:
    """An earlier request computed these tokens; its engine then forgot them."""
    engine.run(request_of("earlier", tokens or PROMPT, max_tokens=1, **fields))
    engine.forget()


def last_load(engine: Engine) -> Any:
    (load,) = [load for submit in engine.ranks[0].client.sent_of(Submit) for load in submit.loads]
    return load


def counted(engine: Engine) -> list[dict[str, int]]:
    """Collect the counts that vLLM takes every step."""
    taken: list[dict[str, int]] = []
    take = engine.role.take_stats

    def record() -> dict[str, int]:
        taken.append(take())
        return taken[-1]

    engine.role.take_stats = record  # type: ignore[method-assign]
    return taken


def total(taken: list[dict[str, int]], name: str) -> int:
    assert hasattr(Stats(), name), name
    return sum(counts.get(name, 0) for counts in taken)


def fields_of(limits: Limits) -> dict[str, int]:
    return {name: getattr(limits, name) for name in limits.__struct_fields__}

"""The oracle of the end-to-end tests, and how to wait for an engine and a sidecar to be one.

A cold run computes a prompt in other pieces than a hit does, so in bfloat16 their logits differ.
What a hit must equal is the engine's own prefix hit with the same number of cached tokens, of KV
that came about in the same way. So every check has two arms that do the same requests in the same
order: the first keeps the engine's prefix cache, the second empties and poisons the KV memory
before the request that counts. Each arm has a cache salt of its own, so the arms share nothing.

Compared are tokens, log probabilities, and bytes: after the second arm no block may hold anything
that no block held after the first.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from sidecar.demo.engine import dtype
from sidecar.demo.model import WORDS
from tests.e2e.waiting import until
from tests.releases import has_vllm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.harness.engine import EngineProcess, Generation
    from tests.harness.sidecars import SidecarProcess

BLOCK_TOKENS: Final = 32
CHUNK_TOKENS: Final = 256
KV_BYTES_PER_TOKEN: Final = 6 * 4 * 64 * 2 * (4 if dtype() == "float32" else 2)
"""Layers × heads × head size × K and V × bytes of a number, of the fixture `model`."""
GENERATED_TOKENS: Final = 8
CLOSE: Final = 0.25
"""Log probabilities that only rounding tells apart are nearer than this on average, and none of
them is further away than twice as much. (One of LFM2's was 0.2505 away, of a prompt that was
computed beside others and loaded nothing.)"""
ALIKE: Final = 0.1
"""As `CLOSE`, of models that round nearly alike in any batch: of llama and gemma it is the same."""
POSITIONS: Final = 25
"""Log probabilities are compared in stretches of this many: one position may be further away."""
PREEMPTIONS: Final = "vllm:num_preemptions"
"""vLLM's own counter."""
SESSIONS: Final = 2
"""What an engine of one rank attaches: its scheduler and its worker."""

PATIENT: Final[dict[str, str]] = dict.fromkeys(
    ("lookup_wait", "load_deadline", "lease_ttl", "store_deadline"), "60s"
)
"""Limits under which the oracle decides what is right, not the clock: a machine may be slow."""

_serial = itertools.count(1)


def words(count: int, seed: int) -> list[int]:
    """A prompt of random tokens; another seed differs from the first token on."""
    chooser = random.Random(seed)
    return [chooser.randrange(WORDS) for _ in range(count)]


def whole_blocks(tokens: int) -> int:
    """What a hit has of a prompt: whole blocks, and never its last token."""
    return (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def chunk_tokens(engine: EngineProcess) -> int:
    """Tokens of a chunk that this engine stores."""
    return int(getattr(engine, "chunk_tokens", CHUNK_TOKENS))


def has_host_tier(engine: EngineProcess) -> bool:
    """Whether this engine has chunks of its own in host memory, before kvlake is asked."""
    return bool(getattr(engine, "has_host_tier", False))


def sessions_of(engine: EngineProcess) -> int:
    """What this engine attaches: its scheduler and its workers.

    With a host tier of its own it attaches one of either, however many ranks it has.
    """
    if has_host_tier(engine):
        return SESSIONS
    segment_sources = ("tensor_parallel_size", "pipeline_parallel_size")
    return 1 + math.prod(int(engine.spec.engine_args.get(cut, 1)) for cut in segment_sources)


def fresh_salt() -> str:
    """A cache salt under which nothing is cached yet."""
    return f"arm-{next(_serial)}"


@dataclass(frozen=True)
class Call:
    """One request of an arm."""

    prompt: list[int]
    max_tokens: int = GENERATED_TOKENS
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Further ones of `EngineProcess.begin`."""
    media_tokens: int = 0
    """What the engine puts in for an image, less the one token that stands for it."""

    @property
    def tokens(self) -> int:
        """What the engine makes of the prompt."""
        return len(self.prompt) + self.media_tokens

    def begin(self, engine: EngineProcess, salt: str) -> int:
        """Start it; `EngineProcess.finish` takes the handle."""
        return engine.begin(
            self.prompt, max_tokens=self.max_tokens, cache_salt=salt, **self.options
        )

    def generate(self, engine: EngineProcess, salt: str) -> Generation:
        """Run it."""
        return engine.finish(self.begin(engine, salt))


@dataclass(frozen=True)
class Measured:
    """What the request that counts gave, and which blocks hold what after it."""

    generation: Generation
    blocks: list[Counter[str]]
    """Per worker: how often each content is in a block that is not poison."""
    salt: str


def empty(engine: EngineProcess) -> None:
    """Forget the engine's prefix cache and overwrite its KV memory.

    Blocks are held until their store was answered, so after this the sidecar has everything. (Its
    status alone does not tell: on a busy machine a store may still be on its way to it.)
    """
    engine.reset_prefix_cache()
    engine.poison()


def blocks_of(engine: EngineProcess) -> list[Counter[str]]:
    """Contents of the blocks that are not poison, per worker."""
    return [Counter(worker.values()) for worker in engine.digests()]


def own_hit(engine: EngineProcess, call: Call, *, before: Sequence[Call] = ()) -> Measured:
    """The first arm: the engine's own prefix cache, from poison on."""
    return _arm(engine, call, before, None)


def external_hit(
    engine: EngineProcess, call: Call, *, before: Sequence[Call] = (), local: Sequence[Call] = ()
) -> Measured:
    """The second arm: `before` is forgotten by the engine; `local` fills its cache again."""
    return _arm(engine, call, before, local)


def _arm(
    engine: EngineProcess, call: Call, before: Sequence[Call], local: Sequence[Call] | None
) -> Measured:
    salt = fresh_salt()
    empty(engine)
    for one in before:
        one.generate(engine, salt)
    if local is not None:
        empty(engine)
        for one in local:
            one.generate(engine, salt)
    generation = call.generate(engine, salt)
    return Measured(generation, blocks_of(engine), salt)


def same_output(one: Generation, other: Generation) -> bool:
    """Whether tokens and log probabilities, or embeddings, are equal, bit for bit."""
    return (one.tokens, one.logprobs, one.embeddings) == (
        other.tokens,
        other.logprobs,
        other.embeddings,
    )


def close(one: Generation, other: Generation) -> bool:
    """Whether the first positions differ by rounding alone: no earlier token can differ there."""
    away = _away(one.logprobs[0], other.logprobs[0])
    if len(away) < min(len(one.logprobs[0]), len(other.logprobs[0])) // 2:
        return False
    return sum(away) < CLOSE * len(away) and max(away) < 2 * CLOSE


def apart(one: Generation, other: Generation) -> float:
    """How far the first positions are apart, on average; infinite where no token is of both."""
    away = _away(one.logprobs[0], other.logprobs[0])
    return sum(away) / len(away) if away else math.inf


def _away(given: dict[str, float], expected: dict[str, float]) -> list[float]:
    return [abs(expected[token] - given[token]) for token in expected.keys() & given.keys()]


def check_throughout(
    engine: EngineProcess, call: Call, generation: Generation, rounding: float = CLOSE
) -> None:
    """Assert that tokens came of what a cold run of all before them gives, but for rounding.

    For a request that ran beside others, from its first position to its last, which is behind
    whatever happened meanwhile: a preemption, and what was loaded again. `rounding` is how far
    apart stretches may be on average. Ask only while the engine has nothing else to do.
    """
    options = {**call.options, "prompt_logprobs": 5}
    whole = Call([*call.prompt, *generation.tokens], 1, options, call.media_tokens)
    cold = whole.generate(engine, fresh_salt())
    assert cold.cached_tokens == 0
    assert cold.prompt_logprobs is not None
    expected = [one or {} for one in cold.prompt_logprobs[-len(generation.tokens) :]]
    pairs = list(zip(generation.logprobs, expected, strict=True))
    for first in range(0, len(pairs), POSITIONS):
        away = [apart for pair in pairs[first : first + POSITIONS] for apart in _away(*pair)]
        assert away, f"from position {first} on other tokens are likely"
        apart = sum(away) / len(away)
        assert apart < rounding, f"from position {first} on log probabilities are {apart} apart"


def check_reloaded(
    engine: EngineProcess,
    calls: Sequence[Call],
    generations: Sequence[Generation],
    salts: Sequence[str],
) -> None:
    """Assert that blocks of a prompt that was preempted hold what was stored of it.

    Byte for byte: log probabilities of a small model need not say much of its cache. Ask right
    after requests of which some were preempted, and none begins as another.
    """
    held = blocks_of(engine)
    # All began at once and generate as much. So who ended last was preempted, and nobody had its
    # blocks since.
    last = max(range(len(calls)), key=lambda number: generations[number].total_ms)
    call = Call(calls[last].prompt, 1, calls[last].options, calls[last].media_tokens)
    empty(engine)
    stored = call.generate(engine, salts[last])
    assert stored.cached_tokens >= whole_blocks(call.tokens)
    for worker, expected in zip(held, blocks_of(engine), strict=True):
        assert set(expected.values()) == {1}, "several blocks of a prompt of random words are one"
        # One block of it may have been computed again: to load so little does not pay.
        assert (worker & expected).total() >= stored.cached_tokens // BLOCK_TOKENS - 1


def check_equal(measured: Measured, oracle: Measured, *, block_tokens: int = BLOCK_TOKENS) -> None:
    """Assert that a hit is what the engine's own hit of as many tokens is."""
    loaded, wanted = measured.generation.cached_tokens, oracle.generation.cached_tokens
    assert loaded == wanted, f"{loaded} tokens loaded, {wanted} by the oracle"
    assert measured.generation.tokens == oracle.generation.tokens
    assert measured.generation.logprobs == oracle.generation.logprobs
    assert measured.generation.embeddings == oracle.generation.embeddings
    assert len(measured.blocks) == len(oracle.blocks)
    for worker, expected in zip(measured.blocks, oracle.blocks, strict=True):
        assert not worker - expected, "a block holds bytes that no block of the oracle holds"
        assert worker.total() >= measured.generation.cached_tokens // block_tokens


def check_hit(
    engine: EngineProcess, call: Call, *, before: Sequence[Call] = (), local: Sequence[Call] = ()
) -> Generation:
    """Run both arms, assert that they are equal; what the second one generated."""
    before = before or [call]
    oracle = own_hit(engine, call, before=before)
    measured = external_hit(engine, call, before=before, local=local)
    check_equal(measured, oracle)
    return measured.generation


class Oracle:
    """What a prompt must give, for any number of cached tokens that a test may meet.

    For tests whose outcome depends on timing: a load may succeed, or fail and be computed. Ask
    only while the engine has nothing else to do.
    """

    def __init__(self, engine: EngineProcess, call: Call) -> None:
        self.call = call
        self._engine = engine
        self._known: dict[int, Measured] = {}

    def at(self, cached_tokens: int) -> Measured:
        """The engine's own hit of this many tokens, or the cold run for none.

        There is none of a whole prompt, which the connector may load: its last token is computed.
        """
        known = self._known.get(cached_tokens)
        if known is None:
            prompt = self.call.prompt
            other = words(len(prompt) - cached_tokens, sum(prompt))
            # As long as the prompt, so that its head is computed in the same shapes.
            head = Call([*prompt[:cached_tokens], *other], self.call.max_tokens)
            before = [head] if cached_tokens else []
            known = self._known[cached_tokens] = own_hit(self._engine, self.call, before=before)
            own_tokens = known.generation.cached_tokens
            assert own_tokens == cached_tokens, f"{own_tokens} tokens, not {cached_tokens}"
        return known

    def check(self, generation: Generation) -> None:
        """Assert that the output is right for the tokens that it had cached."""
        expected = self.at(generation.cached_tokens).generation
        assert generation.tokens == expected.tokens
        assert generation.logprobs == expected.logprobs

    def check_close(self, generation: Generation) -> None:
        """As `check`, for a request that ran beside others: batches round differently.

        It compares the first position, where no earlier token can differ. With a wrong cache the
        difference is large.
        """
        expected = self.at(0).generation
        assert close(generation, expected), (expected.logprobs[0], generation.logprobs[0])


# --- what the engine's metrics tell --------------------------------------------------------------


def told(engine: EngineProcess) -> list[float]:
    """Tokens of hits outside of the engine so far: in all, then from host memory and the store.

    As kvlake counts them and then as vLLM does, so far as this engine has such metrics.
    """
    names: list[tuple[str, dict[str, str]]] = [("external_prefix_cache_hits", {})]
    if not has_host_tier(engine):
        names += [(f"kvlake_tokens_loaded_{tier}", {}) for tier in ("host", "store")]
        if has_vllm("0.32"):
            by_source = "prompt_tokens_cached_by_source"
            names += [(by_source, {"source": source}) for source in ("host", "disk")]
    return [engine.counter(f"vllm:{name}", **labels) for name, labels in names]


def check_told(
    engine: EngineProcess, before: list[float], *, host: int = 0, store: int = 0
) -> None:
    """Assert that the metrics have these tokens more than they had."""
    more = [now - then for now, then in zip(told(engine), before, strict=True)]
    assert more == [host + store, host, store, host, store][: len(more)]


# --- the sidecar ---------------------------------------------------------------------------------


def counters(sidecar: SidecarProcess) -> dict[str, int]:
    """The engine's counters in the status."""
    counted: dict[str, int] = sidecar.status()["counters"]
    return counted


def held(status: dict[str, Any]) -> dict[str, int]:
    """What runs, waits or is pinned, and how many of it."""
    numbers = status["pending"] | {kind: status[kind] for kind in ("leases", "lookups")}
    return {kind: number for kind, number in numbers.items() if number}


def idle(status: dict[str, Any]) -> bool:
    """Whether nothing runs, waits or is pinned."""
    return not held(status)


def attach(engine: EngineProcess, sidecar: SidecarProcess, *, sessions: int = SESSIONS) -> None:
    """Wait until the engine is attached to this sidecar, as both of them see it."""
    sidecar.wait("the engine attaches", lambda status: len(status["sessions"]) == sessions)
    # The sidecar knows a session a moment before the engine does: a store proves it is there.
    before = counters(sidecar)["chunks_stored"]

    def stored() -> bool:
        engine.generate(words(2 * BLOCK_TOKENS, 1), max_tokens=1, cache_salt=fresh_salt())
        engine.reset_prefix_cache()
        return counters(sidecar)["chunks_stored"] > before

    until("an attached engine stores", stored)

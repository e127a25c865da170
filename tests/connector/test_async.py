"""Random lives on vLLM's asynchronous scheduler, a step ahead of the tokens that it knows.

What a request computed so far is then a guess of the scheduler's, with placeholders for tokens and
drafts that are not known. The worker alone knows, and here checks all KV that it reads.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from tests.connector.configurations import spec_of, state_of
from tests.connector.content import content_of, first_read, next_token, recur
from tests.connector.engine import Engine
from tests.connector.rank import Rank
from tests.connector.test_simulation import Life
from tests.connector.test_speculative import DRAFTS, NGRAM, write_drafter

pytestmark = pytest.mark.promise("async-scheduling")

BATCHES = 2
SPECS: dict[str, Sequence[KVCacheSpec]] = {
    "full": (),
    "windows": (spec_of(), spec_of(SlidingWindowSpec, sliding_window=64)),
    "windows alone": (spec_of(SlidingWindowSpec, sliding_window=100),),
    "states": (spec_of(), state_of()),
}


@dataclass
class Work:
    """What a worker computes of a request in one step, as it knows it and the scheduler does not.

    From `start` to `end` the tokens are right; from there to `rejected_end` they are drafts that
    were rejected.
    """

    request: Request
    start: int
    end: int
    rejected_end: int
    sampled: list[int]


class AsyncEngine(Engine):
    """An engine that schedules a step while the one before it runs."""

    def __init__(
        self, model: Path, seed: int, *, defer_block_free: bool = True, **options: Any
    ) -> None:
        super().__init__(model, scheduler_class=AsyncScheduler, **options)
        self.scheduler.defer_block_free = defer_block_free
        self._chooser = random.Random(seed)
        self._computed_ends: dict[str, int] = {}
        """Up to where the worker computed each request."""
        self._lengths: dict[str, int] = {}
        """Tokens of each request that the worker knows."""

    def step(self, between: Callable[[], None] = lambda: None) -> Any:
        self.steps += 1
        output = self.scheduler.schedule()
        fresh = {new.req_id for new in output.scheduled_new_reqs}
        fresh |= set(output.scheduled_cached_reqs.resumed_req_ids)
        work: list[Work] = []
        for request_id, count in output.num_scheduled_tokens.items():
            if request_id in fresh:
                request = self.scheduler.requests[request_id]
                self._computed_ends[request_id] = request.num_computed_tokens - count
                self._lengths[request_id] = request.num_tokens
            drafts = len(output.scheduled_spec_decode_tokens.get(request_id, []))
            work.append(self._work(request_id, count, drafts))
            self.computed[request_id] += count
        manager = self.scheduler.kv_cache_manager
        tables = [manager.get_block_ids(one.request.request_id) for one in work]

        def forward(rank: Rank) -> None:
            for one, table in zip(work, tables, strict=True):
                self._compute_work(rank, one, table)

        outputs: list[ModelRunnerOutput | None] = []
        for rank in self.ranks:
            runner = ModelRunnerOutput(
                req_ids=[one.request.request_id for one in work],
                req_id_to_index={one.request.request_id: i for i, one in enumerate(work)},
                sampled_token_ids=[list(one.sampled) for one in work],
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            )
            runner.kv_connector_output = rank.step(
                output.kv_connector_metadata, forward, drafts=bool(work and self.draft)
            )
            outputs.append(runner)
        between()
        self._batches.append(lambda: self._take(output, outputs, []))
        if not work:
            while self._batches:
                self._batches.popleft()()
        elif len(self._batches) >= BATCHES:
            self._batches.popleft()()
        self.sidecar.receive()
        return output

    def _work(self, request_id: str, count: int, drafts: int) -> Work:
        request = self.scheduler.requests[request_id]
        start = self._computed_ends[request_id]
        end, sampled = start + count, list[int]()
        if not request.is_prefill_chunk:
            length = self._lengths[request_id]
            assert end - drafts == length, f"{request_id} goes on elsewhere than it is"
            accepted = 0
            while accepted < drafts and self._chooser.random() < 0.6:
                accepted += 1
            end = length + accepted
            sampled = self._tokens(request, end + 1)[length:]
            self._lengths[request_id] = end + 1
        self._computed_ends[request_id] = end
        return Work(request, start, end, start + count, sampled)

    @staticmethod
    def _tokens(request: Request, count: int) -> list[int]:
        """So many tokens of a request, of which the scheduler may not know the last."""
        tokens = list(request.all_token_ids)
        while len(tokens) < count:
            tokens.append(next_token(tokens))
        return tokens[:count]

    def _compute_work(self, rank: Rank, work: Work, tables: tuple[list[int], ...]) -> None:
        request = work.request
        tokens = self._tokens(request, work.end + 1 + self.ahead_tokens)
        for group, (spec, table) in enumerate(zip(self.specs, tables, strict=True)):
            known = content_of(tokens, request.cache_salt or "", self.weights, rank.rank, group)
            if isinstance(spec, MambaSpec):
                recur(rank.memory, spec, table, work.start, work.end, known)
                continue
            expected = known[self.ahead_tokens :]
            for position in range(first_read(spec, work.start), work.rejected_end):
                block_id = table[position // spec.block_size]
                assert block_id, f"{request.request_id} reads the null block at {position}"
                block, slot = rank.memory[block_id], position % spec.block_size
                if position >= work.start:
                    block[slot] = expected[position] if position < work.end else b"rejected"
                    continue
                assert block[slot] == expected[position], (
                    f"{request.request_id} reads wrong KV at {position} (group {group})"
                )


class QuietLife(Life):
    """A life without resets, which have a test of their own."""

    def can_reset(self) -> bool:
        return False


class ResetLife(Life):
    """A life with many resets of running requests."""

    resets = 0

    def rarely(self) -> None:
        if self.random.random() < 0.05 and self.can_reset():
            assert self.engine.scheduler.reset_prefix_cache(
                reset_running_requests=True, reset_connector=True
            )
            self.engine.weights += 1
            self.resets += 1
        else:
            super().rarely()


@pytest.mark.parametrize("defer_block_free", [True, False])
@pytest.mark.parametrize("kind", list(SPECS))
@pytest.mark.parametrize("seed", range(2))
def test_a_random_life(model: Path, kind: str, seed: int, defer_block_free: bool) -> None:
    engine = AsyncEngine(
        model,
        seed,
        defer_block_free=defer_block_free,
        num_blocks=48 if kind == "full" else 64,
        batch_tokens=96,
        max_seqs=6,
        specs=SPECS[kind],
    )
    QuietLife(engine, seed).live()
    engine.close()


@pytest.mark.parametrize("method", ["ngram", "eagle"])
@pytest.mark.parametrize("kind", ["full", "windows"])
@pytest.mark.parametrize("seed", range(2))
def test_a_random_life_with_drafts(
    model: Path, tmp_path: Path, kind: str, seed: int, method: str
) -> None:
    speculative: dict[str, Any] = NGRAM
    if method == "eagle":
        drafter = write_drafter(tmp_path, "EagleLlamaForCausalLM")
        speculative = {"method": "eagle", "model": str(drafter), "num_speculative_tokens": DRAFTS}
    engine = AsyncEngine(
        model,
        seed,
        num_blocks=64,
        batch_tokens=96,
        max_seqs=6,
        specs=SPECS[kind],
        ahead_tokens=int(method == "eagle"),
        speculative=speculative,
    )
    QuietLife(engine, seed).live()
    engine.close()


@pytest.mark.parametrize("kind", list(SPECS))
def test_a_random_life_with_resets(model: Path, kind: str) -> None:
    """Tokens in flight when their request is reset are of the old weights."""
    engine = AsyncEngine(
        model,
        200,
        defer_block_free=False,
        num_blocks=90,
        batch_tokens=96,
        max_seqs=6,
        specs=SPECS[kind],
    )
    life = ResetLife(engine, 200)
    life.live()
    assert life.resets
    engine.close()

"""vLLM's own scheduler with our connector on it, and a model that checks the KV that it reads.

Everything of vLLM that runs between two forward passes is real: `Scheduler`, its block pool, its
prefix cache, `KVOutputAggregator`, the order of the worker hooks. Doubles are the forward pass,
the client and the sidecar.

The forward pass writes into the slot of every token a hash of all tokens up to it, and before
that reads the slots of all tokens before it, as attention does; of recurrent layers it takes the
state from the block where the last step left it to that of its own last token. So a wrong
destination, a block that was reused under a copy, a chunk under another's key, or a load that did
not come is an assertion here and not a slightly different token.

What vLLM is told is in `configurations.py`, what KV holds in `content.py`, a worker in `rank.py`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from math import lcm
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from connector.scheduler.outcomes import PREFIX
from connector.scheduler.role import SchedulerRole
from tests import places
from tests.connector.configurations import BLOCK_TOKENS, kv_cache_config, spec_of, vllm_config
from tests.connector.content import content_of, first_read, next_token, recur
from tests.connector.double import Clock, DoubleClient
from tests.connector.doublesidecar import DoubleSidecar
from tests.connector.rank import Rank, ours_of


class Engine:
    """vLLM's scheduler, its ranks, and what it believes about every request's KV.

    `draft` guesses what follows a request's tokens; `ahead_tokens` says on how many tokens behind
    it the KV of a token depends.
    """

    def __init__(
        self,
        model: Path,
        *,
        num_blocks: int = 256,
        ranks: int = 1,
        stages: int = 1,
        specs: Sequence[KVCacheSpec] = (),
        draft: Callable[[Request], list[int]] | None = None,
        ahead_tokens: int = 0,
        retention: int | None = None,
        scheduler_class: type[Scheduler] = Scheduler,
        **options: Any,
    ) -> None:
        self.draft = draft
        self.ahead_tokens = ahead_tokens
        self.specs = specs or [spec_of()]
        self.clock = Clock()
        self.client = DoubleClient()
        config = vllm_config(model, num_blocks=num_blocks, ranks=ranks, stages=stages, **options)
        if any(isinstance(spec, MambaSpec) for spec in self.specs):
            # What vLLM sets of a model with recurrent layers; ours has none.
            config.cache_config.mamba_cache_mode = "align"
        with places.patched("Client", lambda *_, **_options: self.client):
            self.scheduler = scheduler_class(
                config,
                kv_cache_config(num_blocks, ranks, specs, stages, retention=retention),
                StructuredOutputManager(config),
                block_size=lcm(*(spec.block_size for spec in self.specs)),
                hash_block_size=BLOCK_TOKENS,
                log_stats=True,
            )
        self.connector = ours_of(self.scheduler.connector)
        assert isinstance(self.connector._scheduler, SchedulerRole), self.connector._engine.refusal  # noqa: SLF001 (its public names are vLLM's)
        self.role = self.connector._scheduler  # noqa: SLF001 (its public names are vLLM's)
        self.role.clock = self.role.stores.clock = self.role.pending.clock = self.clock
        world = range(ranks * stages)
        self.ranks = [Rank(config, num_blocks, rank, self.clock, specs, stages) for rank in world]
        loaded: Any = self.scheduler.connector
        self.aggregator = KVOutputAggregator.from_connector(loaded, len(world))
        self._batches_max = stages
        self._batches: deque[Callable[[], None]] = deque()
        self.sidecar = DoubleSidecar(self)
        self.weights = 0
        self.loras_max = 2
        """How many LoRA adapters vLLM keeps in memory."""
        self.garbled = False
        """Some connector may fail while a step computes: what is computed from nothing is garbage,
        and it is for vLLM to throw it away."""
        self.sidecar.attach()
        self.computed: Counter[str] = Counter()
        """Tokens that the model computed, by request."""
        self.steps = 0
        self.prompt_tokens = 0
        """As vLLM counts them in `vllm:prompt_tokens_total`."""
        self.outcomes: Counter[str] = Counter()
        """The same, as the connector sorts them."""

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    def add(self, request: Request) -> Request:
        self.scheduler.add_request(request)
        return request

    def abort(self, request: Request) -> None:
        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    def step(self, between: Callable[[], None] = lambda: None) -> Any:
        """One step of the engine. `between` happens while the model computes.

        With several stages vLLM schedules ahead: a batch's output is taken once as many batches
        are on their way, or there is nothing to schedule.
        """
        self.steps += 1
        output = self.scheduler.schedule()
        work = [
            (self.scheduler.requests[request_id], count)
            for request_id, count in output.num_scheduled_tokens.items()
        ]
        tables = {
            request.request_id: self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
            for request, _ in work
        }

        drafts = output.scheduled_spec_decode_tokens
        sampled = [self._sample(request, drafts.get(request.request_id, [])) for request, _ in work]

        loras = {lora.lora_int_id: lora for request, _ in work if (lora := request.lora_request)}

        def forward(rank: Rank) -> None:
            rank.load_adapters(loras.values(), max(self.loras_max, len(loras)))
            for (request, count), follow in zip(work, sampled, strict=True):
                self._compute(rank, request, count, tables[request.request_id], follow)

        outputs: list[ModelRunnerOutput | None] = []
        for rank in self.ranks:
            runner = ModelRunnerOutput(
                req_ids=[request.request_id for request, _ in work],
                req_id_to_index={request.request_id: i for i, (request, _) in enumerate(work)},
                sampled_token_ids=sampled,
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            )
            runner.kv_connector_output = rank.step(
                output.kv_connector_metadata, forward, drafts=bool(work and self.draft)
            )
            outputs.append(runner)
        for request, count in work:
            self.computed[request.request_id] += count
        between()
        self._batches.append(lambda: self._take(output, outputs, [one for one, _ in work]))
        if len(self._batches) >= self._batches_max or not work:
            self._batches.popleft()()
        self.sidecar.receive()
        return output

    def _take(
        self, output: Any, outputs: list[ModelRunnerOutput | None], requests: list[Request]
    ) -> None:
        """Take a batch's output from all ranks."""
        final = self.aggregator.aggregate(outputs)
        assert final is not None
        for told in self.scheduler.update_from_output(output, final).values():
            stats = [one.prefill_stats for one in told.outputs if one.prefill_stats is not None]
            self.prompt_tokens += sum(one.num_prompt_tokens for one in stats)
            if told.scheduler_stats is not None:
                self._sort(told.scheduler_stats.kv_connector_stats or {})
        if self.draft is not None:
            ready = [request for request in requests if not request.is_finished()]
            self.scheduler.update_draft_token_ids(
                DraftTokenIds(
                    [request.request_id for request in ready],
                    [self.draft(request) for request in ready],
                )
            )

    def _sort(self, stats: Any) -> None:
        for name, count in stats.items():
            if isinstance(count, dict):
                # Several connectors have one each.
                self._sort(count)
            elif name.startswith(PREFIX):
                self.outcomes[name.removeprefix(PREFIX)] += count

    def _compute(
        self,
        rank: Rank,
        request: Request,
        count: int,
        tables: tuple[list[int], ...],
        follow: list[int],
    ) -> None:
        """KV of a request's next tokens, of which `follow` became known in this very step.

        Behind those are drafts that were rejected: what is there is nobody's.
        """
        end = request.num_computed_tokens
        start = end - count
        tokens = [*request.all_token_ids, *follow]
        for group, (spec, table) in enumerate(zip(self.specs, tables, strict=True)):
            known = content_of(tokens, request.cache_salt or "", self.weights, rank.rank, group)
            if isinstance(spec, MambaSpec):
                recur(rank.memory, spec, table, start, end, known)
                continue
            expected = [*known[self.ahead_tokens :], *[b"rejected"] * count]
            garbage = False
            for position in range(first_read(spec, start), end):
                block_id = table[position // spec.block_size]
                assert block_id, f"{request.request_id} reads the null block at {position}"
                block, slot = rank.memory[block_id], position % spec.block_size
                if position >= start:
                    block[slot] = b"garbage" if garbage else expected[position]
                    continue
                if self.garbled and block[slot] != expected[position]:
                    garbage = True
                    continue
                assert block[slot] == expected[position], (
                    f"{request.request_id} reads wrong KV at {position} of {end} "
                    f"(rank {rank.rank}, group {group})"
                )

    @staticmethod
    def _sample(request: Request, drafts: Sequence[int] = ()) -> list[int]:
        """The next token, and behind each draft that is it the one after that."""
        if request.num_computed_tokens < request.num_tokens:
            return []
        sampled = [next_token(request.all_token_ids)]
        for draft in drafts:
            if draft != sampled[-1]:
                break
            sampled.append(next_token([*request.all_token_ids, *sampled]))
        return sampled

    def add_lora(self, lora: Any) -> None:
        """Load an adapter before any request comes with it."""
        for rank in self.ranks:
            rank.load_adapters([lora], self.loras_max)

    def finish(self, *requests: Request, steps_max: int = 400) -> None:
        """Step, with a sidecar that does everything at once, until these are finished."""
        for _ in range(steps_max):
            if all(request.is_finished() for request in requests):
                return
            self.sidecar.run_all()
            for lookup in list(self.sidecar.lookups):
                self.sidecar.answer(lookup)
            self.step()
        raise AssertionError(f"not finished after {steps_max} steps")

    def settle(self, steps_max: int = 400) -> None:
        """Step until nothing is left to do."""
        for _ in range(steps_max):
            self.sidecar.run_all()
            for lookup in list(self.sidecar.lookups):
                self.sidecar.answer(lookup)
            if not self.scheduler.has_requests():
                return
            self.step()
        raise AssertionError(f"not settled after {steps_max} steps")

    def run(self, request: Request) -> Request:
        """Add a request, finish it, and let its stores end."""
        self.add(request)
        self.finish(request)
        self.settle()
        return request

    def forget(self) -> None:
        """Empty the engine's own prefix cache and poison its memory."""
        assert self.scheduler.reset_prefix_cache()
        for rank in self.ranks:
            for block in rank.memory:
                block[:] = [b"poison"] * len(block)

    def check_idle(self) -> None:
        """No reference, request, lookup or job of ours is left."""
        assert self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1
        assert all(block.ref_cnt == 0 for block in self.pool.blocks if not block.is_null)
        role = self.role
        assert len(role.stores.jobs) == 0
        assert not role.stores.keys
        assert not role.requests
        assert not role.pending.pending
        assert not self.sidecar.lookups_pinning()
        assert not role.loading
        assert self.outcomes.total() == self.prompt_tokens
        assert not self.scheduler.requests

    def close(self) -> None:
        self.scheduler.shutdown()
        for rank in self.ranks:
            rank.connector.shutdown()
        self.sidecar.close()

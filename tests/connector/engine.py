"""vLLM's own scheduler with our connector on it, and a model that checks the KV that it reads.

Everything of vLLM that runs between two forward passes is real: `Scheduler`, its block pool, its
prefix cache, `KVOutputAggregator`, the order of the worker hooks. Doubles are the forward pass,
the client and the sidecar.

The forward pass writes into the slot of every token a hash of all tokens up to it, and before
that reads the slots of all tokens before it, as attention does. So a wrong destination, a block
that was reused under a copy, a chunk under another's key, or a load that did not come is an
assertion here and not a slightly different token.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import lcm
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

import connector.vllm
from connector.client import Attempt, Client
from connector.export import ExportedMemory
from connector.scheduler import SchedulerRole
from connector.vllm import KVLakeConnector
from connector.worker import WorkerRole
from sidecar.protocol import (
    Attach,
    Done,
    JobOutcome,
    Lookup,
    LookupDone,
    Memory,
    Outcome,
    Role,
    Submit,
    decode_client,
    encode,
)
from tests.connector.double import SALT, Clock, DoubleClient, session_of
from tiers.fence import SidecarFence, WorkerFence
from tiers.index import FLAG_HOST, FLAG_STORE, IndexWriter, tag_of
from tiers.layout import KVLayout, Segment

BLOCK_TOKENS = 16
CHUNK_TOKENS = 64
PER_CHUNK = CHUNK_TOKENS // BLOCK_TOKENS

init_none_hash(sha256)
_hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)

Slot = bytes
Block = list[Slot]


def write_model(folder: Path) -> Path:
    """A model folder whose weights nobody loads: enough for a configuration."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
        "rms_norm_eps": 1e-5,
    }
    (folder / "config.json").write_text(json.dumps(config))
    # Nothing loads them here; they are what the model is known by.
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def vllm_config(
    model: Path,
    *,
    num_blocks: int = 256,
    ranks: int = 1,
    stages: int = 1,
    batch_tokens: int = 512,
    max_seqs: int = 16,
    kv_role: str = "kv_both",
    prefix_caching: bool = True,
    policy: str = "fcfs",
    others: Sequence[str] = (),
    speculative: dict[str, Any] | None = None,
    **extra: Any,
) -> VllmConfig:
    """A real configuration of a CPU engine with our connector.

    With `others`, classes of `tests.connector.others`, ours is the first in a `MultiConnector`.
    `speculative` is what a user gives as `--speculative-config`.
    """
    transfer: dict[str, Any] = {
        "kv_connector": "KVLakeConnector",
        "kv_connector_module_path": "connector.vllm",
        "kv_role": kv_role,
        "kv_connector_extra_config": {
            "socket": "/nonexistent",
            "attach_seconds": 0,
            "chunk_tokens": CHUNK_TOKENS,
            "load_tokens_min": BLOCK_TOKENS,
            **extra,
        },
    }
    if others:
        place = {"kv_connector_module_path": "tests.connector.others", "kv_role": kv_role}
        children = [transfer, *({"kv_connector": name, **place} for name in others)]
        transfer = {
            "kv_connector": "MultiConnector",
            "kv_role": kv_role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": children},
        }
    model_config = ModelConfig(
        model=str(model), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=2048
    )
    parallel_config = ParallelConfig(
        tensor_parallel_size=ranks,
        pipeline_parallel_size=stages,
        distributed_executor_backend="mp" if ranks * stages > 1 else None,
    )
    config = VllmConfig(
        model_config=model_config,
        cache_config=CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=prefix_caching),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=batch_tokens,
            max_num_seqs=max_seqs,
            max_model_len=2048,
            is_encoder_decoder=False,
            async_scheduling=False,
            policy=cast("Any", policy),
        ),
        parallel_config=parallel_config,
        speculative_config=SpeculativeConfig(
            target_model_config=model_config,
            target_parallel_config=parallel_config,
            **speculative,
        )
        if speculative
        else None,
        kv_transfer_config=KVTransferConfig(**transfer),
        device_config=DeviceConfig("cpu"),
    )
    config.cache_config.num_gpu_blocks = num_blocks
    return config


def ours_of(loaded: Any) -> KVLakeConnector:
    """Our connector, also where it is one of several."""
    found = loaded.sub_connectors[0] if isinstance(loaded, MultiConnector) else loaded
    assert isinstance(found, KVLakeConnector)
    return found


def spec_of(
    kind: type[AttentionSpec] = FullAttentionSpec, block_tokens: int = BLOCK_TOKENS, **own: Any
) -> AttentionSpec:
    """A group's spec of a rank that has one KV head."""
    return kind(block_size=block_tokens, num_kv_heads=1, head_size=32, dtype=torch.bfloat16, **own)


def kv_cache_config(
    num_blocks: int = 256, ranks: int = 1, specs: Sequence[AttentionSpec] = (), stages: int = 1
) -> KVCacheConfig:
    """One group of full attention, or one of each spec; of blocks with different tokens too.

    Of several stages, what the first is shown.
    """
    groups = [
        KVCacheGroupSpec([f"layer.{number}.0", f"layer.{number}.1"], spec)
        for number, spec in enumerate(specs)
    ]
    spec = replace(spec_of(), num_kv_heads=2 // ranks)
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=groups or [KVCacheGroupSpec(["layer.0", "layer.1"][: 2 // stages], spec)],
    )


def request_of(
    request_id: str,
    tokens: list[int],
    *,
    max_tokens: int = 4,
    salt: str | None = None,
    **fields: Any,
) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(
        request_id, tokens, params, None, cache_salt=salt, block_hasher=_hasher, **fields
    )


def next_token(tokens: Sequence[int]) -> int:
    """What the model says next."""
    return (sum(tokens) + len(tokens)) % 50


def content_of(
    tokens: Iterable[int], salt: str, weights: int, rank: int, group: int = 0
) -> list[Slot]:
    """What KV of each token is: a function of all tokens up to it, who asks, and the layers."""
    hasher = hashlib.blake2b(f"{salt}/{weights}/{rank}/{group}".encode(), digest_size=8)
    slots: list[Slot] = []
    for token in tokens:
        hasher.update(token.to_bytes(4, "little"))
        slots.append(hasher.digest())
    return slots


def first_read(spec: Any, position: int) -> int:
    """The first token that the query at `position` reads."""
    if isinstance(spec, SlidingWindowSpec):
        return max(0, position - int(spec.sliding_window) + 1)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        chunk = int(spec.attention_chunk_size)
        return position // chunk * chunk
    return 0


class Rank:
    """One worker: its KV memory, its role, and the hooks in the order in which vLLM calls them."""

    def __init__(
        self,
        config: VllmConfig,
        num_blocks: int,
        rank: int,
        clock: Clock,
        specs: Sequence[AttentionSpec] = (),
        stages: int = 1,
    ) -> None:
        self.rank = rank
        # One memory for all groups, whose pages lie over each other: a block is of one at a time.
        tokens = max([BLOCK_TOKENS, *(spec.block_size for spec in specs)])
        self.memory: list[Block] = [[b""] * tokens for _ in range(num_blocks)]
        self.client = DoubleClient()
        assert config.kv_transfer_config is not None
        kind = KVConnectorFactory.get_connector_class(config.kv_transfer_config)
        self.loaded: Any = kind(
            config, KVConnectorRole.WORKER, kv_cache_config(num_blocks, specs=specs, stages=stages)
        )
        self.connector = ours_of(self.loaded)
        self._attempt: Callable[[], Attempt] | None = None
        segment = Segment(first_layer=0, num_layers=1, first_head=0, num_heads=1)
        layout = KVLayout.from_views(
            segment,
            [(0, (num_blocks, 1, BLOCK_TOKENS, 8), (256, 256, 16, 2))],
            itemsize=2,
            dtype="bfloat16",
            encoding="test",
            size_bytes=num_blocks * 256,
        )
        others = [layout] * (len(specs) - 1)
        exported = ExportedMemory(os.memfd_create("kv"), layout.size_bytes, layout, others)
        self.role = WorkerRole(exported, self._make_client, self._describe, clock=clock)
        self.connector._worker = self.role

    def _make_client(self, make_attempt: Callable[[], Attempt]) -> Client:
        self._attempt = make_attempt
        return self.client.as_client()

    def _describe(self, memory: ExportedMemory, shared: Memory) -> Attach:
        return self.connector._engine.attach(Role.WORKER, 0, memory, memory=shared)

    def attach(self) -> SidecarFence:
        """A new session; returns the sidecar's end of its fence page."""
        assert self._attempt is not None
        attempt = self._attempt()
        assert isinstance(attempt.context, WorkerFence)
        self.client.attach(session_of(context=attempt.context))
        return SidecarFence(os.dup(attempt.fds[1]))

    def step(self, metadata: Any, forward: Callable[[Rank], None]) -> KVConnectorOutput:
        """One step, as `KVConnectorModelRunnerMixin` does it."""
        connector = self.loaded
        connector.handle_preemptions(metadata)
        connector.bind_connector_metadata(metadata)
        forward(self)
        connector.start_load_kv(cast("Any", None))
        connector.wait_for_save()
        results = connector.get_transfer_results(set())
        output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_stats=connector.get_kv_connector_stats(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        connector.clear_connector_metadata()
        return output


@dataclass
class Copy:
    """A job that the sidecar was given by one rank and has not ended."""

    rank: int
    job_id: int
    fence: SidecarFence
    epoch: int
    load: list[tuple[bytes, int, list[int]]] = field(default_factory=list)
    store: list[tuple[bytes, list[int]]] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    """Of each chunk."""


class DoubleSidecar:
    """Host memory, a store, and copies that run when the test says so.

    A chunk is loadable when all ranks have stored it; `store` holds what was taken out of host
    memory by `demote` and is brought back when a lookup is answered.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.index = IndexWriter(4096)
        self.parts: dict[bytes, dict[int, list[Block]]] = {}
        self.store: dict[bytes, dict[int, list[Block]]] = {}
        self.copies: list[Copy] = []
        self.lookups: list[Lookup] = []
        self.fences: list[SidecarFence] = []
        self.group_of: dict[bytes, int] = {}
        """Of each key that was ever stored."""
        self._read: Counter[int] = Counter()
        self._lookups_read = 0

    def attach(self) -> None:
        """Every role of the engine attaches (again); what was submitted before is forgotten."""
        self.copies.clear()
        self.lookups.clear()
        self.fences = [rank.attach() for rank in self.engine.ranks]
        self.engine.client.attach(session_of(self.index))

    def detach(self) -> None:
        """The sidecar dies: nothing of what it was given will run."""
        self.copies.clear()
        self.lookups.clear()
        for client in (self.engine.client, *(rank.client for rank in self.engine.ranks)):
            client.attach(None)

    def _flags(self, key: bytes) -> None:
        host = FLAG_HOST if len(self.parts.get(key, {})) == len(self.engine.ranks) else 0
        self.index.set(tag_of(key, SALT), host | (FLAG_STORE if key in self.store else 0))

    def evict(self, key: bytes) -> None:
        """Out of host memory; the store keeps what it has."""
        self.parts.pop(key, None)
        self._flags(key)

    def demote(self, key: bytes) -> None:
        """Only the store has it from now on."""
        if key in self.parts and len(self.parts[key]) == len(self.engine.ranks):
            self.store[key] = self.parts[key]
            self.evict(key)

    def hold(self, key: bytes) -> bool:
        return len(self.parts.get(key, {})) == len(self.engine.ranks)

    def receive(self) -> None:
        """Take what the engine's roles sent since the last call."""
        for rank in self.engine.ranks:
            for message in rank.client.sent[self._read[rank.rank] :]:
                assert decode_client(encode(message)) == message
                if isinstance(message, Submit) and rank.client.live is not None:
                    self._submitted(rank, message)
            self._read[rank.rank] = len(rank.client.sent)
        lookups = self.engine.client.sent_of(Lookup)
        for lookup in lookups[self._lookups_read :]:
            assert decode_client(encode(lookup)) == lookup
            live = self.engine.client.live
            if live is not None and live.epoch == lookup.epoch:
                self.lookups.append(lookup)
        self._lookups_read = len(lookups)

    def _submitted(self, rank: Rank, message: Submit) -> None:
        assert rank.client.live is not None
        if message.epoch != rank.client.live.epoch:
            return
        fence = self.fences[rank.rank]
        assert fence.reached(message.fence)
        for load in message.loads:
            pieces = [(chunk.key, chunk.first_block, chunk.block_ids) for chunk in load.chunks]
            groups = [chunk.group for chunk in load.chunks]
            self.copies.append(
                Copy(rank.rank, load.job_id, fence, message.epoch, load=pieces, groups=groups)
            )
        for store in message.stores:
            chunks = [(chunk.key, chunk.block_ids) for chunk in store.chunks]
            groups = [chunk.group for chunk in store.chunks]
            self.copies.append(
                Copy(rank.rank, store.job_id, fence, message.epoch, store=chunks, groups=groups)
            )

    def run(self, copy: Copy, outcome: Outcome = Outcome.OK) -> None:
        """Carry out one job, or fail it, and answer."""
        self.copies.remove(copy)
        with copy.fence.copying(copy.job_id) as allowed:
            if not allowed:
                outcome = Outcome.REVOKED
            if outcome is Outcome.OK:
                outcome = self._load(copy) if copy.load else self._store(copy)
        client = self.engine.ranks[copy.rank].client
        if client.live is not None and client.live.epoch == copy.epoch:
            client.inbox.append(Done(copy.epoch, [JobOutcome(copy.job_id, outcome)]))

    def run_all(self) -> None:
        self.receive()
        for copy in list(self.copies):
            self.run(copy)

    def _load(self, copy: Copy) -> Outcome:
        memory = self.engine.ranks[copy.rank].memory
        for (key, _, _), group in zip(copy.load, copy.groups, strict=True):
            if not self.hold(key):
                return Outcome.MISSING
            assert self.group_of[key] == group, "a key is of one group"
        for key, first, block_ids in copy.load:
            blocks = self.parts[key][copy.rank]
            for index, block_id in enumerate(block_ids, first):
                memory[block_id] = list(blocks[index])
        return Outcome.OK

    def _store(self, copy: Copy) -> Outcome:
        memory = self.engine.ranks[copy.rank].memory
        for (key, block_ids), group in zip(copy.store, copy.groups, strict=True):
            assert self.group_of.setdefault(key, group) == group, "a key is of one group"
            blocks = [list(memory[block_id]) for block_id in block_ids]
            held = self.parts.setdefault(key, {}).setdefault(copy.rank, blocks)
            # The KV under a key is decided by the key.
            assert held == blocks, "two different contents were stored under one key"
            self._flags(key)
        return Outcome.OK

    def answer(self, lookup: Lookup, ready: int | None = None) -> None:
        """Bring the first `ready` keys (all) of a lookup to host memory."""
        self.lookups.remove(lookup)
        ready = len(lookup.keys) if ready is None else ready
        for key in lookup.keys[:ready]:
            if key in self.store:
                self.parts[key] = self.store[key]
                self._flags(key)
        outcome = Outcome.OK if ready == len(lookup.keys) else Outcome.MISSING
        self.engine.client.inbox.append(LookupDone(lookup.epoch, lookup.lookup_id, ready, outcome))

    def close(self) -> None:
        self.index.close()


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
        specs: Sequence[AttentionSpec] = (),
        draft: Callable[[Request], list[int]] | None = None,
        ahead_tokens: int = 0,
        **options: Any,
    ) -> None:
        self.draft = draft
        self.ahead_tokens = ahead_tokens
        self.specs = specs or [spec_of()]
        self.clock = Clock()
        self.client = DoubleClient()
        config = vllm_config(model, num_blocks=num_blocks, ranks=ranks, stages=stages, **options)
        with patch.object(connector.vllm, "Client", lambda *_: self.client):
            self.scheduler = Scheduler(
                config,
                kv_cache_config(num_blocks, ranks, specs, stages),
                StructuredOutputManager(config),
                block_size=lcm(*(spec.block_size for spec in self.specs)),
                hash_block_size=BLOCK_TOKENS,
                log_stats=True,
            )
        self.connector = ours_of(self.scheduler.connector)
        assert isinstance(self.connector._scheduler, SchedulerRole), self.connector._engine.refusal
        self.role = self.connector._scheduler
        self.role._clock = self.role._stores._clock = self.clock
        world = range(ranks * stages)
        self.ranks = [Rank(config, num_blocks, rank, self.clock, specs, stages) for rank in world]
        loaded: Any = self.scheduler.connector
        self.aggregator = KVOutputAggregator.from_connector(loaded, len(world))
        self._batches_max = stages
        self._batches: deque[Callable[[], None]] = deque()
        self.sidecar = DoubleSidecar(self)
        self.weights = 0
        self.sidecar.attach()
        self.computed: Counter[str] = Counter()
        """Tokens that the model computed, by request."""
        self.steps = 0

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

        def forward(rank: Rank) -> None:
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
            runner.kv_connector_output = rank.step(output.kv_connector_metadata, forward)
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
        self.scheduler.update_from_output(output, final)
        if self.draft is not None:
            ready = [request for request in requests if not request.is_finished()]
            self.scheduler.update_draft_token_ids(
                DraftTokenIds(
                    [request.request_id for request in ready],
                    [self.draft(request) for request in ready],
                )
            )

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
            expected = [*known[self.ahead_tokens :], *[b"rejected"] * count]
            for position in range(first_read(spec, start), end):
                block_id = table[position // spec.block_size]
                assert block_id, f"{request.request_id} reads the null block at {position}"
                block, slot = rank.memory[block_id], position % spec.block_size
                if position >= start:
                    block[slot] = expected[position]
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
        assert role.stores_outstanding == 0
        assert not role._stores._keys
        assert not role._requests
        assert not role._lookups
        assert not role._loading
        assert not self.scheduler.requests

    def close(self) -> None:
        self.scheduler.shutdown()
        for rank in self.ranks:
            rank.connector.shutdown()
        self.sidecar.close()

"""vLLM's own `OffloadingConnector` and scheduler with `KVLakeOffloadingSpec`, on a real sidecar.

Everything of vLLM between two forward passes is real, and so is the KV memory; the forward pass
writes into the slot of each token a number that says what all tokens up to it were, and reads those
before it. So a block that is reused too early, or a load that does not arrive, fails an assertion.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import time
import warnings
from collections.abc import Generator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from vllm.config import (
    KVEventsConfig,
    KVTransferConfig,
    LoRAConfig,
    ModelConfig,
    set_current_vllm_config,
)
from vllm.config.mamba import MambaBackendEnum
from vllm.config.pooler import PoolerConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.prefill_prefix_lm_attention import (
    PrefillPrefixLMAttention,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.v1.engine.core import EngineCore

from connector.identity.eligibility import host_tier_rows_unsupported_reason
from connector.offloading.spec import (
    KVLakeOffloadingSpec,
    NoCopies,
    identity_note,
    leave_note,
    no_tier_reason,
    note_path,
    take_note,
)
from connector.offloading.workarounds import region_path
from tests import places
from tests.connector.configurations import (
    BLOCK_TOKENS,
    kv_cache_config,
    request_of,
    spec_of,
    state_of,
    vllm_config,
    write_model,
)
from tests.connector.content import content_of
from tests.e2e.settling import empty_host_tier
from tests.harness.sidecars import SidecarProcess
from tests.releases import has_vllm

pytestmark = pytest.mark.usefixtures("warm_sidecars")

SETTLE_SECONDS_MAX = 60.0
LAYERS = ("layer.0", "layer.1")
CONFIG: dict[str, Any] = {
    "host": {"size": "64MiB"},
    "limits": {"load_deadline": "60s", "store_deadline": "60s", "lease_ttl": "60s"},
}


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    with SidecarProcess(tmp_path_factory.mktemp("s"), CONFIG) as sidecar:
        yield sidecar


class Engine:
    """vLLM's scheduler and one rank."""

    def __init__(
        self,
        model: Path,
        socket: str,
        *,
        num_blocks: int = 128,
        configured: dict[str, Any] | None = None,
        pooling: Any = None,
        events: KVEventsConfig | None = None,
        **extra: Any,
    ) -> None:
        config = vllm_config(model, num_blocks=num_blocks, **(configured or {}))
        config.kv_events_config = events
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            engine_id=f"offloading-{secrets.token_hex(8)}",
            kv_connector_extra_config={
                "spec_name": "KVLakeOffloadingSpec",
                "spec_module_path": "connector.offloading",
                "cpu_bytes_to_use": 1 << 20,
                "socket": socket,
                "attach_seconds": 30,
                **extra,
            },
        )
        if pooling is not None:
            config.model_config.pooler_config = PoolerConfig(pooling_type=pooling)
        self.config = config
        self.engine_id = str(config.kv_transfer_config.engine_id)
        groups = kv_cache_config(num_blocks)
        spec: Any = groups.kv_cache_groups[0].kv_cache_spec
        shape = (num_blocks, spec.num_kv_heads, BLOCK_TOKENS, 2 * spec.head_size)
        self.layers = {name: torch.zeros(shape, dtype=torch.bfloat16) for name in LAYERS}
        kind = KVConnectorFactory.get_connector_class(config.kv_transfer_config)
        # As in vLLM: the worker first, and only it sees the configuration.
        with set_current_vllm_config(config):
            self.worker: Any = kind(config, KVConnectorRole.WORKER, groups)
            self.worker.register_kv_caches(self.layers)
        self.scheduler = Scheduler(
            config,
            groups,
            StructuredOutputManager(config),
            block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
            log_stats=True,
        )
        loaded: Any = self.scheduler.connector
        self.manager: Any = loaded.connector_scheduler.manager
        self.aggregator = KVOutputAggregator.from_connector(loaded, 1)
        self.computed: dict[str, int] = {}
        self.weights = 0

    def step(self) -> None:
        output = self.scheduler.schedule()
        work = [
            (self.scheduler.requests[request_id], count)
            for request_id, count in output.num_scheduled_tokens.items()
        ]
        metadata: Any = output.kv_connector_metadata
        worker = self.worker
        worker.handle_preemptions(metadata)
        worker.bind_connector_metadata(metadata)
        worker.start_load_kv(cast("Any", None))
        for request, count in work:
            self._compute(request, count)
            self.computed[request.request_id] = self.computed.get(request.request_id, 0) + count
        worker.wait_for_save()
        results = worker.get_transfer_results(set())
        connector_output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        runner = ModelRunnerOutput(
            req_ids=[request.request_id for request, _ in work],
            req_id_to_index={request.request_id: i for i, (request, _) in enumerate(work)},
            sampled_token_ids=[
                [] if request.num_computed_tokens < request.num_tokens else [7]
                for request, _ in work
            ],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        runner.kv_connector_output = connector_output
        final = self.aggregator.aggregate([runner])
        assert final is not None
        self.scheduler.update_from_output(output, final)

    def _compute(self, request: Request, count: int) -> None:
        (table,) = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        end = request.num_computed_tokens
        tokens = list(request.all_token_ids[:end])
        for layer, tensor in enumerate(self.layers.values()):
            words = tensor.view(torch.int16)
            expected = content_of(tokens, request.cache_salt or "", self.weights, layer)
            for position in range(end):
                block, slot = divmod(position, BLOCK_TOKENS)
                value = int.from_bytes(expected[position][:2], "little", signed=True)
                place = words[table[block], :, slot]
                if position >= end - count:
                    place.fill_(value)
                else:
                    assert (place == value).all(), f"wrong KV at {position} of {end}"

    def add(self, request: Request) -> Request:
        self.scheduler.add_request(request)
        return request

    def settle(self) -> None:
        deadline = time.monotonic() + SETTLE_SECONDS_MAX
        while self.scheduler.has_requests():
            assert time.monotonic() < deadline, f"not settled after {SETTLE_SECONDS_MAX} s"
            self.step()
            time.sleep(0.0005)

    def run(self, name: str, tokens: list[int], **fields: Any) -> int:
        """Run a request to its end; tokens that it did not compute."""
        request = self.add(request_of(name, tokens, **fields))
        self.settle()
        assert request.is_finished()
        return int(request.num_tokens - 1 - self.computed[name])

    def forget(self, *, host_tier: bool = True) -> None:
        """Empty the engine's prefix cache, poison its memory, and empty vLLM's host tier."""
        assert self.scheduler.reset_prefix_cache()
        for tensor in self.layers.values():
            tensor.fill_(-1.0)
        if host_tier:
            empty_host_tier(self.manager.primary_tier)

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()


@contextlib.contextmanager
def engine_of(model: Path, sidecar: SidecarProcess, **options: Any) -> Generator[Engine]:
    engine = Engine(model, sidecar.socket, **options)
    try:
        yield engine
    finally:
        engine.close()


def prompt(count: int) -> list[int]:
    chooser = random.Random(secrets.token_bytes(8))
    return [chooser.randrange(500) for _ in range(count)]


def test_hits_from_both_tiers_and_in_another_engine(model: Path, sidecar: SidecarProcess) -> None:
    tokens = prompt(200)
    with engine_of(model, sidecar) as first, engine_of(model, sidecar) as second:
        assert first.run("a", tokens) == 0
        first.forget(host_tier=False)
        assert first.run("b", tokens) == 192
        first.forget()
        assert first.run("c", tokens) == 192
        assert second.run("d", tokens) == 192
        assert second.run("e", tokens, salt="tenant") == 0
        # What was generated is found by the next turn.
        longer = [*tokens, *[7] * 40]
        assert first.run("f", tokens, max_tokens=41) == 192
        second.forget()
        assert second.run("g", [*longer, 1, 2, 3]) == 240


def test_chunks_of_several_blocks(model: Path, sidecar: SidecarProcess) -> None:
    tokens = prompt(210)
    with engine_of(model, sidecar, block_size=64) as engine:
        assert engine.run("a", tokens) == 0
        engine.forget()
        # A load that begins in the middle of a chunk.
        assert engine.run("b", tokens[:100]) == 64
        assert engine.run("c", tokens) == 192


@pytest.mark.promise("streaming-input")
def test_streaming_input_is_stored_until_it_continues(model: Path, sidecar: SidecarProcess) -> None:
    """From then on vLLM mixes up its blocks (0.33 does not)."""
    tokens = prompt(300)
    with engine_of(model, sidecar) as engine:
        for host_tier in (False, True):
            salt = f"stream-{secrets.token_hex(4)}"
            stream = engine.add(request_of("s", tokens[:100], salt=salt, resumable=True))
            for start in (100, 200):
                while stream.status != RequestStatus.WAITING_FOR_STREAMING_REQ:
                    engine.step()
                inputs = tokens[start : start + 100]
                engine.scheduler.add_request(request_of("s", inputs, salt=salt, resumable=True))
            engine.scheduler.add_request(request_of("s", [], salt=salt))
            engine.settle()
            said = list(stream.all_token_ids)
            # vLLM 0.33 says what it has scheduled once its host tier has it.
            stored = 192 if has_vllm("0.33") and not host_tier else 96
            for held in (stored, 304):
                # In vLLM's host tier, or in kvlake's.
                engine.forget(host_tier=host_tier)
                engine.computed.clear()
                assert engine.run("a", said, salt=salt) == held


@pytest.mark.promise("streaming-input")
def test_streaming_input_that_was_preempted_before_it_continues(
    model: Path, sidecar: SidecarProcess
) -> None:
    tokens, salt = prompt(300), f"stream-{secrets.token_hex(4)}"
    with engine_of(model, sidecar) as engine:
        stream = engine.add(request_of("s", tokens[:100], salt=salt, max_tokens=9, resumable=True))
        for _ in range(4):
            engine.step()
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        while stream.status != RequestStatus.WAITING_FOR_STREAMING_REQ:
            engine.step()
        engine.scheduler.add_request(request_of("s", tokens[100:], salt=salt, resumable=True))
        engine.scheduler.add_request(request_of("s", [], salt=salt))
        engine.settle()
        said = list(stream.all_token_ids)
        engine.forget()
        engine.computed.clear()
        assert engine.run("a", said, salt=salt) < 112


@pytest.mark.promise("offloading-reset")
def test_requests_that_run_during_a_reset_store_no_more(
    model: Path, sidecar: SidecarProcess
) -> None:
    """They continue with KV from before, perhaps of other weights."""
    tokens = prompt(100)
    with engine_of(model, sidecar) as engine:
        request = engine.add(request_of("a", tokens, max_tokens=60))
        while request.num_computed_tokens < 110:
            engine.step()
        # The engine's own cache cannot be reset while it is in use; what is offloaded can.
        assert not engine.scheduler.reset_prefix_cache(reset_connector=True)
        engine.settle()
        for host_tier in (False, True):
            engine.forget(host_tier=host_tier)
            assert engine.run("b", tokens) == 0
            engine.computed.clear()
            assert engine.scheduler.reset_prefix_cache(reset_connector=True)


@pytest.mark.promise("offloading-reset")
def test_requests_that_a_reset_preempted_are_loaded(model: Path, sidecar: SidecarProcess) -> None:
    """vLLM would load them in the same step, which ends the engine."""
    tokens = prompt(100)
    with engine_of(model, sidecar) as engine:
        request = engine.add(request_of("a", tokens, max_tokens=60))
        connector: Any = engine.scheduler.connector
        # The second one before another chunk was stored, of which alone is told that it runs again.
        for generated in (10, 12):
            while request.num_output_tokens < generated or connector.connector_scheduler._jobs:  # noqa: SLF001 (of vLLM)
                engine.step()
            assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        engine.settle()
        assert request.num_output_tokens == 60
        assert engine.computed["a"] < 100 + 60 + 2 * 32


def test_requests_that_a_reset_preempted_before_their_first_chunk_are_loaded(
    model: Path, sidecar: SidecarProcess
) -> None:
    """After the first preemption it continues without a lookup, which is not reported."""
    with engine_of(model, sidecar, block_size=64) as engine:
        request = engine.add(request_of("a", prompt(20), max_tokens=100))
        connector: Any = engine.scheduler.connector
        for generated in (3, 60):
            while request.num_output_tokens < generated or connector.connector_scheduler._jobs:  # noqa: SLF001 (of vLLM)
                engine.step()
            assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        engine.settle()
        assert request.num_output_tokens == 100


def test_preempted_requests_that_are_scheduled_as_new_are_stored(
    model: Path, sidecar: SidecarProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with vLLM's second model runner, which needs Triton: the note says so."""

    def leave(engine_id: str, note: dict[str, Any]) -> None:
        assert note["preempted_are_new"] is False
        leave_note(engine_id, note | {"preempted_are_new": True})

    places.patch(monkeypatch, "leave_note", leave)
    tokens = prompt(100)
    with engine_of(model, sidecar) as engine:
        engine.scheduler.use_v2_model_runner = True
        request = engine.add(request_of("a", tokens, max_tokens=60))
        while request.num_output_tokens < 5:
            engine.step()
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        engine.settle()
        engine.forget()
        assert engine.run("b", list(request.all_token_ids)) == 144


@pytest.mark.promise("offloading-spec")
def test_random_lives_in_a_small_cache(model: Path, sidecar: SidecarProcess) -> None:
    """Preemptions, aborts and reused blocks, with stores and loads in flight."""
    chooser = random.Random(5)
    stems = [[chooser.randrange(3) for _ in range(length)] for length in (48, 100, 130)]
    with engine_of(model, sidecar, num_blocks=24) as engine:
        requests: list[Request] = []
        for step in range(90):
            if chooser.random() < 0.2:
                stem = chooser.choice(stems)
                tail = [chooser.randrange(5) for _ in range(chooser.randrange(60))]
                tokens = [*stem[: chooser.randrange(1, len(stem) + 1)], *tail]
                length = chooser.choice((1, 20, 70))
                salt = f"life-{engine.engine_id}"
                requests.append(
                    engine.add(request_of(f"r{step}", tokens, max_tokens=length, salt=salt))
                )
            if chooser.random() < 0.03 and requests:
                victim = chooser.choice(requests)
                if not victim.is_finished():
                    status = RequestStatus.FINISHED_ABORTED
                    engine.scheduler.finish_requests(victim.request_id, status)
            if chooser.random() < 0.05:
                empty_host_tier(engine.manager.primary_tier)
            engine.step()
        engine.settle()
        assert all(request.is_finished() for request in requests)
        pool: Any = engine.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def test_no_file_outlives_the_start(model: Path, sidecar: SidecarProcess) -> None:
    with engine_of(model, sidecar) as engine:
        assert not region_path(engine.engine_id).exists()
        assert not note_path(engine.engine_id).exists()
        assert isinstance(engine.manager.secondary_tiers[-1].tier_type, str)


def test_an_engine_without_an_identity(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM's own tier works, and one log line says why there is no other."""
    folder = write_model(tmp_path)
    (folder / "model.safetensors").unlink()
    engine = Engine(folder, "/nowhere/attach.sock", attach_seconds=0)
    try:
        assert not engine.manager.secondary_tiers
        tokens = prompt(100)
        assert engine.run("a", tokens) == 0
        engine.forget(host_tier=False)
        assert engine.run("b", tokens) == 96
    finally:
        engine.close()


@pytest.mark.promise("media-not-hashed")
def test_images_that_vllm_does_not_hash(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A tier cannot tell which blocks hold an image, so none leaves vLLM's own tier."""

    unhashed = {"media_cache_gb": 0, "prefix_caching": False}
    engine = Engine(model, "/nowhere/attach.sock", configured=unhashed, attach_seconds=0)
    engine.close()
    assert not engine.manager.secondary_tiers
    assert "--mm-processor-cache-gb 0" in caplog.text


@pytest.mark.promise("offloading-prefixless")
def test_an_engine_that_cannot_continue_from_a_prefix(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM's host tier would load it too, which ends a pooling engine."""
    engine = Engine(model, "/nowhere/attach.sock", attach_seconds=0, pooling="MEAN")
    try:
        assert "MEAN" in caplog.text
        assert isinstance(engine.worker.connector_worker.worker, NoCopies)
        tokens = prompt(100)
        for name in ("a", "b"):
            assert engine.run(name, tokens) == 0
            engine.forget(host_tier=False)
        assert not region_path(engine.engine_id).exists()
    finally:
        engine.close()


@pytest.mark.promise("unknown-options")
def test_unknown_settings(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM's own settings are known."""
    known: dict[str, Any] = {
        "blocks_per_chunk": 2,
        "eviction_policy": "arc",
        "offload_prompt_only": True,
    }
    engine = Engine(model, "/nowhere/attach.sock", attach_seconds=0, block_sizes=64, **known)
    engine.close()
    (line,) = [one.getMessage() for one in caplog.records if "has no effect" in one.message]
    assert line == (
        "kvlake: kv_connector_extra_config['block_sizes']=64 is unknown and has no effect; "
        "did you mean 'block_size'?"
    )


@pytest.mark.promise("offloading-stages")
def test_stages_of_different_numbers_of_layers(
    model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's host tier takes the parts of all workers to be alike, so it is not made."""
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "2,0")
    engine = Engine(model, "/nowhere/attach.sock", attach_seconds=0, configured={"stages": 2})
    try:
        assert "by no tier, because its pipeline stages hold different numbers" in caplog.text
        assert isinstance(engine.worker.connector_worker.worker, NoCopies)
        tokens = prompt(100)
        for name in ("a", "b"):
            assert engine.run(name, tokens) == 0
            engine.forget(host_tier=False)
        assert not region_path(engine.engine_id).exists()
    finally:
        engine.close()


@pytest.mark.promise("offloading-stages")
def test_stages_of_equal_numbers_of_layers(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(num_groups: int = 1, **configured: Any) -> str:
        return host_tier_rows_unsupported_reason(vllm_config(model, **configured), num_groups)

    assert refusal() == refusal(3) == refusal(stages=2) == ""
    assert "2 groups" in refusal(2, stages=2)
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,1")
    assert refusal(stages=2) == ""
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "0,2")
    assert "different numbers of layers" in refusal(stages=2)
    assert refusal(ranks=2) == ""


@pytest.mark.promise("offloading-prefix-match")
def test_hits_within_a_block_are_left_to_vllms_host_tier(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = vllm_config(model)
    note: dict[str, Any] = {}
    for state, unit in ((True, None), (True, BLOCK_TOKENS), (False, 8), (True, 8)):
        specs = [spec_of(), state_of()] if state else [spec_of()]
        places.patch(monkeypatch, "layer_specs_of", lambda _, specs=specs: specs)
        config.cache_config.prefix_match_unit = unit
        note = identity_note(config, BLOCK_TOKENS)
        assert ("identity" in note) == (not state or unit != 8)
    assert "leave out --prefix-match-unit" in note["refusal"]


@pytest.mark.promise("offloading-prefixless")
def test_layers_that_attend_to_a_prompt_as_a_whole(model: Path) -> None:
    """Only a worker knows the layers."""
    config = vllm_config(model)
    with set_current_vllm_config(config):
        for kind in (Attention, PrefillPrefixLMAttention):
            options: dict[str, Any] = {
                "cache_config": config.cache_config,
                "prefix": f"layers.{kind.__name__}",
            }
            kind(2, 32, 1.0, num_kv_heads=2, **options)
            reason = no_tier_reason(config, 1, 1)
            assert ("Prefix-LM" in reason) == (kind is not Attention)


@pytest.mark.promise("offloading-recurrent")
def test_states_of_other_dtypes_and_kernels_are_not_shared(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float16 and bfloat16 have the same size, which is all that vLLM tells a tier."""

    def of(layout: str = "", drafts: int = 0, **changes: Any) -> str:
        ngrams = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 3}
        config = vllm_config(model, speculative=ngrams if drafts else None)
        monkeypatch.delenv("VLLM_SSM_CONV_STATE_LAYOUT", raising=False)
        if layout:
            monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", layout)
        for name, value in changes.items():
            owner = config.cache_config if hasattr(config.cache_config, name) else None
            setattr(owner or config.mamba_config, name, value)
        return json.dumps(identity_note(config, BLOCK_TOKENS)["identity"], sort_keys=True)

    changes: list[dict[str, Any]] = [
        {"mamba_ssm_cache_dtype": "float16"},
        {"mamba_ssm_cache_dtype": "bfloat16"},
        {"mamba_cache_dtype": "float16"},
        {"enable_stochastic_rounding": True},
        {"backend": MambaBackendEnum.FLASHINFER},
        {"layout": "DS"},
        # Drafters without layers of their own, which nothing else tells.
        {"drafts": 1},
        {"drafts": 2},
    ]
    assert len({of(), *(of(**one) for one in changes)}) == 1, "of a model without states"
    monkeypatch.setattr(ModelConfig, "has_inner_state", True)
    assert len({of(), *(of(**one) for one in changes)}) == len(changes) + 1
    assert of(layout="SD") == of(), "vLLM's own choice"


@pytest.mark.promise("offloading-weights")
def test_weights_that_are_replaced(model: Path, sidecar: SidecarProcess) -> None:
    """KV of the old ones is not loaded, and KV of the new ones not shared."""
    tokens, other = prompt(200), prompt(200)
    with engine_of(model, sidecar) as first:
        assert first.run("a", tokens) == 0
        core: Any = object.__new__(EngineCore)
        core.model_executor = SimpleNamespace(collective_rpc=lambda *_: None)
        core.collective_rpc("reload_weights")
        first.weights = 1
        for host_tier in (False, True):
            first.forget(host_tier=host_tier)
            assert first.run("b", tokens) == 0
            first.computed.clear()
        assert first.scheduler.reset_prefix_cache(reset_connector=True)
        for own in (tokens, other):
            assert first.run("c", own) == 0
            first.forget()
            first.computed.clear()
            assert first.run("c", own) == 192
            first.computed.clear()
        with engine_of(model, sidecar) as second:
            assert second.run("d", tokens) == 192, "of the old ones, which it has"
            assert second.run("e", other) == 0


@pytest.mark.promise("offloading-adapters")
@pytest.mark.parametrize("allowed", [False, True])
def test_adapters_that_vllm_knows_by_their_path(model: Path, allowed: bool) -> None:
    """vLLM's block hash does not change if an adapter is trained further in its folder."""
    config = vllm_config(model, adapters_by_path=allowed)
    config.lora_config = LoRAConfig(lora_dtype="bfloat16")
    note = identity_note(config, BLOCK_TOKENS)
    assert ("identity" in note) == allowed
    assert ("adapters_by_path" in note.get("refusal", "")) != allowed
    if allowed:
        config.lora_config.target_modules = ["q_proj"]
        assert identity_note(config, BLOCK_TOKENS) != note


class TestNotes:
    def test_a_note_is_taken_once(self) -> None:
        name = secrets.token_hex(8)
        leave_note(name, {"identity": {"a": 1}})
        leave_note(name, {"identity": {"b": 2}})
        assert take_note(name) == {"identity": {"b": 2}}
        assert "first worker" in take_note(name)["refusal"]

    def test_a_pipe_is_not_waited_for(self) -> None:
        name = secrets.token_hex(8)
        os.mkfifo(note_path(name))
        try:
            assert "is no file; remove it" in take_note(name)["refusal"]
        finally:
            note_path(name).unlink()

    def test_a_link_is_not_followed(self, tmp_path: Path) -> None:
        name = secrets.token_hex(8)
        target = tmp_path / "elsewhere"
        target.write_text("{}")
        place = note_path(name)
        place.symlink_to(target)
        assert "refusal" in take_note(name)
        leave_note(name, {"identity": {}})
        assert target.read_text() == "{}"
        assert not place.is_symlink()
        assert os.stat(place).st_mode & 0o777 == 0o600
        take_note(name)


def test_vllm_asks_the_spec_for_its_metrics() -> None:
    """vLLM's front end asks without an engine."""
    names = KVLakeOffloadingSpec.build_metric_definitions({"cpu_bytes_to_use": 1})
    assert any("tiering" in name for name in names)

"""vLLM's own `OffloadingConnector` and scheduler with `KVLakeOffloadingSpec`, and a real sidecar.

Everything of vLLM between two forward passes is real, and so is the KV memory; the forward pass
writes into the slot of each token a number that says what all tokens up to it were, and reads those
before it. So a block that is reused too early, or a load that does not arrive, fails an assertion.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from vllm.config import KVEventsConfig, KVTransferConfig, set_current_vllm_config
from vllm.config.pooler import PoolerConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from tests.connector.configurations import BLOCK_TOKENS, kv_cache_config, request_of, vllm_config
from tests.connector.content import content_of
from tests.e2e.settling import empty_host_tier
from tests.harness.sidecars import SidecarProcess

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

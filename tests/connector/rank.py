"""One worker of an engine: real hooks in vLLM's order, over memory that is a list of slots."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.outputs import KVConnectorOutput

from connector.client import Attempt, Client
from connector.export import ExportedMemory
from connector.vllm import KVLakeConnector
from connector.worker import WorkerRole
from sidecar.protocol import KIND_MEMFD, Attach, Memory, Role
from tests.connector.configurations import BLOCK_TOKENS, kv_cache_config
from tests.connector.content import Block
from tests.connector.double import Clock, DoubleClient, session_of
from tiers.kv.fence import SidecarFence, WorkerFence
from tiers.kv.layout import KVLayout, Segment


def ours_of(loaded: Any) -> KVLakeConnector:
    """Our connector, also where it is one of several."""
    found = loaded.sub_connectors[0] if isinstance(loaded, MultiConnector) else loaded
    assert isinstance(found, KVLakeConnector)
    return found


class Rank:
    """One worker: its KV memory, its role, and the hooks in the order in which vLLM calls them."""

    def __init__(
        self,
        config: VllmConfig,
        num_blocks: int,
        rank: int,
        clock: Clock,
        specs: Sequence[KVCacheSpec] = (),
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
        exported = ExportedMemory(
            os.memfd_create("kv"), Memory(KIND_MEMFD, layout.size_bytes), [layout, *others]
        )
        self.role = WorkerRole(lambda: exported, self._make_client, self._describe, clock=clock)
        self.adapters: dict[int, Any] = {}
        """What vLLM has in memory of LoRA adapters, the least recently used first."""
        self.connector._worker = self.role  # noqa: SLF001 (its public names are vLLM's)

    def _make_client(self, make_attempt: Callable[[], Attempt]) -> Client:
        self._attempt = make_attempt
        return self.client.as_client()

    def _describe(self, memory: ExportedMemory) -> Attach:
        return self.connector._engine.attach(Role.WORKER, 0, memory, memory=memory.shared)  # noqa: SLF001 (its public names are vLLM's)

    def attach(self, epoch: int | None = None) -> SidecarFence:
        """A new session; returns the sidecar's end of its fence page."""
        assert self._attempt is not None
        attempt = self._attempt()
        assert isinstance(attempt.context, WorkerFence)
        self.client.attach(session_of(context=attempt.context, epoch=epoch))
        fence = SidecarFence(os.dup(attempt.fds[1]))
        weakref.finalize(self, fence.close)
        return fence

    def load_adapters(self, loras: Iterable[Any], loras_max: int) -> None:
        """Load those that are not in memory, or are to be replaced, as vLLM's manager does it."""
        for lora in loras:
            if lora.lora_int_id not in self.adapters or lora.load_inplace:
                self.load_adapter(lora)
            self.adapters.pop(lora.lora_int_id, None)
            self.adapters[lora.lora_int_id] = lora
            while len(self.adapters) > loras_max:
                del self.adapters[next(iter(self.adapters))]

    def load_adapter(self, lora: Any) -> None:
        """Read an adapter's files, as vLLM's worker does it."""
        loaded = self.connector._adapters  # noqa: SLF001 (its public names are vLLM's)
        loaded.note(lora, loaded.begin(lora))

    def step(
        self, metadata: Any, forward: Callable[[Rank], None], *, drafts: bool = False
    ) -> KVConnectorOutput:
        """One step, as `KVConnectorModelRunnerMixin` does it.

        If it `drafts`, it saves last: a drafter writes KV after the step's output is made.
        """
        connector = self.loaded
        connector.handle_preemptions(metadata)
        connector.bind_connector_metadata(metadata)
        forward(self)
        connector.start_load_kv(cast("Any", None))
        if not drafts:
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
        if drafts:
            connector.wait_for_save()
        connector.clear_connector_metadata()
        return output

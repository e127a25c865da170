"""Connectors that count scheduler steps, for comparisons.

`NothingConnector` does nothing at all: what any connector costs in vLLM, and so the baseline.
`CountingKVLakeConnector` is kvlake's own. Both add one to a counter in a file for every step that
the scheduler makes, so that a driver in another process can read it.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

from connector.vllm import KVLakeConnector


class StepCounter:
    """An integer in a file that two processes share."""

    def __init__(self, path: str) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(fd, mmap.PAGESIZE)
        self._words = np.frombuffer(mmap.mmap(fd, mmap.PAGESIZE), dtype=np.uint64)
        os.close(fd)

    def add(self) -> None:
        """One more step."""
        self._words[0] += np.uint64(1)

    @property
    def steps(self) -> int:
        """Steps so far."""
        return int(self._words[0])


def _counter(vllm_config: Any) -> StepCounter:
    return StepCounter(vllm_config.kv_transfer_config.kv_connector_extra_config["steps"])


class _NoMetadata(KVConnectorMetadata):
    pass


class NothingConnector(KVConnectorBase_V1, SupportsHMA):
    """Finds nothing, loads nothing, stores nothing."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._counter = _counter(vllm_config)

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        return

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        return

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        return

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        self._counter.add()
        return _NoMetadata()

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None


class CountingKVLakeConnector(KVLakeConnector):
    """kvlake, and a count of its scheduler's steps."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._counter = _counter(vllm_config)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        self._counter.add()
        return super().build_connector_meta(scheduler_output)

"""vLLM's manager of tiers with `KVLakeTier` below its host tier, and a real sidecar.

`Node` moves chunks as vLLM's connector does. Two of them are two engines.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from connector.offloading.tier import KVLakeTier
from tests.harness.sidecars import SidecarProcess
from tests.releases import has_vllm

ROW_BYTES = 16 * 1024
CHUNKS = 24
WAIT_SECONDS_MAX = 60.0
CONFIG: dict[str, Any] = {
    "host": {"size": "32MiB"},
    "limits": {
        "lookup_wait": "60s",
        "load_deadline": "60s",
        "store_deadline": "60s",
        "lease_ttl": "60s",
    },
}


def config_of(socket: str, **given: Any) -> OffloadingConfig:
    tier = {
        "type": "KVLakeTier",
        "module_path": "connector.secondary",
        "socket": socket,
        "namespace": "tests",
        "attach_seconds": 30.0,
        **given.pop("tier", {}),
    }
    extra = {"cpu_bytes_to_use": CHUNKS * ROW_BYTES, "secondary_tiers": [tier]}
    parallel = {
        "rank": 0,
        "world_size": 1,
        "tp_size": 1,
        "pp_size": 1,
        "pcp_size": 1,
        "dcp_size": 1,
        "data_parallel_index": 0,
        "data_parallel_size": 1,
        "data_parallel_rank_local": None,
        "is_parallelism_agnostic": True,
    }
    values: dict[str, Any] = {
        "groups": (OffloadingGroupConfig(16, ("layer.0", "layer.1"), 0),),
        "worker_kv_bytes_per_block": ROW_BYTES,
        "enable_kv_cache_events": True,
        "extra_config": extra,
        "engine_id": f"test-{secrets.token_hex(8)}",
        "model": OffloadingModelConfig("model", "bfloat16"),
        "cache": OffloadingCacheConfig(16, 1),
        "parallel": OffloadingParallelConfig(**parallel | given.pop("parallel", {})),
        "kv_cache_layout": "LBHNC",
    }
    return OffloadingConfig(**values | given)


class Node:
    """One engine's manager of tiers, as vLLM's connector uses it."""

    def __init__(self, socket: str, **given: Any) -> None:
        self.spec = TieringOffloadingSpec(config_of(socket, **given))
        self.manager: Any = self.spec.get_manager()
        self.rows = np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)
        (tier,) = self.manager.secondary_tiers
        assert isinstance(tier, KVLakeTier)
        self.tier = tier

    def request(self, name: str, prompt: list[str], **given: Any) -> tuple[ReqContext, Any]:
        """A request of which each word is a chunk; its context and keys."""
        context = ReqContext(name, **given)
        self.manager.on_new_request(context)
        keys: list[OffloadKey] = []
        digest = b""
        for number, word in enumerate(prompt, 1):
            digest = hashlib.sha256(digest + word.encode()).digest()
            keys.append(make_offload_key(digest, 0))
            context.set_offload_key_position(keys[-1], 16 * number)
        return context, keys

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def settle(self) -> None:
        self.until(lambda: not self.manager.has_pending_work())

    def until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while True:
            self.step()
            if done():
                return
            assert time.monotonic() < deadline, "not in time"
            time.sleep(0.001)

    def store(self, name: str, prompt: list[str], **given: Any) -> ReqContext:
        """Compute a prompt: its chunks hold bytes that say which they are."""
        context, keys = self.request(name, prompt, **given)
        prepared = self.manager.prepare_store(keys, context)
        assert prepared is not None
        for key, row in zip(prepared.keys_to_store, prepared.store_spec.block_ids, strict=True):
            self.rows[row] = content(key)
        self.manager.complete_store(set(prepared.keys_to_store), context)
        self.manager.on_request_finished(context)
        return context

    def find(self, name: str, prompt: list[str], **given: Any) -> int:
        """How many chunks of a prompt can be loaded, as vLLM's scheduler asks; checks them."""
        context, keys = self.request(name, prompt, **given)
        found = 0

        def ask() -> bool:
            nonlocal found
            found, waits = 0, False
            for key in keys:
                match self.manager.lookup(key, context):
                    case LookupResult.HIT:
                        found += 1
                    case LookupResult.MISS:
                        break
                    case _:
                        waits = True
            return not waits

        self.until(ask)
        loaded = self.manager.prepare_load(keys[:found], context)
        for key, row in zip(keys[:found], loaded.block_ids, strict=True):
            assert (self.rows[row] == content(key)).all()
        self.manager.complete_load(keys[:found], context)
        self.manager.on_request_finished(context)
        return found

    def reset(self) -> None:
        """As vLLM's scheduler does; since 0.33 it says when its workers' copies are over, too."""
        self.manager.reset_cache()
        if has_vllm("0.33"):
            self.manager.on_reset_flushed()

    def close(self) -> None:
        self.manager.shutdown()


def content(key: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    seed = np.frombuffer(hashlib.sha256(key).digest(), dtype=np.uint8)
    return np.tile(seed, ROW_BYTES // len(seed))


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    with SidecarProcess(tmp_path_factory.mktemp("s"), CONFIG) as sidecar:
        yield sidecar


@contextlib.contextmanager
def node(sidecar: SidecarProcess, **given: Any) -> Iterator[Node]:
    made = Node(sidecar.socket, **given)
    try:
        yield made
    finally:
        made.close()


def words(count: int) -> list[str]:
    """A prompt that nobody had before."""
    start = secrets.token_hex(8)
    return [f"{start}-{number}" for number in range(count)]

"""vLLM's own offloading in the end-to-end tests: an engine with `KVLakeOffloadingSpec`.

`NativeEngine` stands in for `EngineProcess` in tests that were written for the connector. Two
things are different, and are made alike in the engine's process (`settling.py`):

* vLLM's host tier would serve what the engine itself stored. It is emptied before a request that
  comes alone, so that what is loaded comes from kvlake.
* vLLM frees a request's blocks while they are still being stored (it waits before it reuses them),
  so the end of a request says nothing. A file says whether everything has ended.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Final

from tests.harness.engine import EngineFailed, EngineProcess, EngineSpec

HOST_TIER_BYTES: Final = 128 * 1024 * 1024
BLOCKS_PER_CHUNK: Final = 1
CHUNK_TOKENS: Final = 32
SETTLE_SECONDS_MAX: Final = 90.0


def settled_path(settled: str, rank: int) -> Path:
    """The file that is there while nothing of a data-parallel rank runs or is stored."""
    return Path(f"{settled}-{rank}")


class NativeEngine(EngineProcess):
    """An engine with vLLM's `OffloadingConnector` on the tiers of a sidecar."""

    chunk_tokens = CHUNK_TOKENS
    blocks_per_chunk = BLOCKS_PER_CHUNK
    has_host_tier = True
    spec_name = "SettlingSpec"
    spec_module = "tests.e2e.settling"

    def __init__(self, spec: EngineSpec, log: Path) -> None:
        settled = str(log.with_suffix(".settled"))
        ranks = int(spec.engine_args.get("data_parallel_size", 1))
        self._settled = [settled_path(settled, rank) for rank in range(ranks)]
        extra = {
            "spec_name": self.spec_name,
            "spec_module_path": self.spec_module,
            "socket": spec.socket,
            "cpu_bytes_to_use": HOST_TIER_BYTES,
            "blocks_per_chunk": self.blocks_per_chunk,
            # Its adapters stay what they are for as long as a sidecar lives.
            "adapters_by_path": True,
            "settled": settled,
            **spec.connector_extra,
        }
        connector = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
        super().__init__(replace(spec, connector=connector), log)

    def reset_prefix_cache(self, *, connector: bool = False) -> None:
        """As the base class, once everything is stored."""
        deadline = time.monotonic() + SETTLE_SECONDS_MAX
        while not all(settled.is_file() for settled in self._settled):
            if time.monotonic() > deadline:
                raise EngineFailed(f"stores did not end in {SETTLE_SECONDS_MAX:.0f} s")
            time.sleep(0.005)
        super().reset_prefix_cache(connector=connector)

"""A hit of half a gigabyte: one prompt of a model with 32 KiB of KV per token, in one engine.

The prompt is computed once, and then comes from host memory and from the engine's own prefix cache
in turn. What a load may take more than the engine's own hit is its bytes over 0.85 of the rate of
`np.copyto`, which is measured between the rounds. Prints one JSON object; times are milliseconds.

    python -m benchmarks.compare.large_bench [--tokens 16000] [--rounds 7]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.compare.engine_bench import attached
from benchmarks.compare.turns import hit_places
from sidecar.demo.model import WORDS, write_model
from tests.harness.engine import EngineProcess, EngineSpec
from tests.harness.sidecars import SidecarProcess

MODEL: Final = {"layers": 16, "hidden": 512, "heads": 8, "kv_heads": 8}
TOKEN_BYTES: Final = 2 * 16 * 512 * 2
"""Keys and values of each layer, 512 numbers of 2 bytes."""
COPY_SHARE: Final = 0.85
COPY_BYTES: Final = 256 << 20


class Copied:
    """Two buffers larger than the caches, and how fast one is copied to the other."""

    def __init__(self) -> None:
        self._source = np.ones(COPY_BYTES, np.uint8)
        self._target = np.zeros(COPY_BYTES, np.uint8)
        self.rates: list[float] = []

    def measure(self) -> None:
        """Note the rate of one copy, in bytes per second."""
        started = time.perf_counter()
        np.copyto(self._target, self._source)
        self.rates.append(COPY_BYTES / (time.perf_counter() - started))


def measure(folder: Path, tokens: int, rounds: int) -> dict[str, Any]:
    """Times to the first token from each place, and the bound."""
    model = str(write_model(folder / "model", **MODEL))
    prompt = random.Random(7).choices(range(WORDS), k=tokens)
    timed: dict[str, list[float]] = {"own": [], "host": []}
    copied = Copied()
    config = {"host": {"size": "2GiB"}}
    with SidecarProcess(folder / "side", config) as sidecar:
        args = {"max_model_len": tokens + 64, "max_num_batched_tokens": 4096}
        spec = EngineSpec(model, sidecar.socket, engine_args=args, kv_cache_gib=2)
        with EngineProcess(spec, folder / "engine.log") as engine:
            engine.wait_ready()
            sidecar.wait("the engine attaches", attached)
            cold_ms = engine.generate(prompt, max_tokens=1).ttft_ms
            loaded = 0
            for number in range(rounds):
                for place in hit_places(engine, sidecar, number):
                    generation = engine.generate(prompt, max_tokens=1)
                    timed[place].append(generation.ttft_ms)
                    if place == "host":
                        loaded = generation.cached_tokens
                copied.measure()
    median = {name: round(statistics.median(values), 1) for name, values in timed.items()}
    rate = statistics.median(copied.rates)
    limit_ms = median["own"] + 1000 * loaded * TOKEN_BYTES / (COPY_SHARE * rate)
    return {
        "prompt_tokens": tokens,
        "tokens_loaded": loaded,
        "bytes_loaded": loaded * TOKEN_BYTES,
        "cold_ms": round(cold_ms, 1),
        "ttft_ms": median,
        "copy_gb_per_second": round(rate / 1e9, 2),
        "limit_ms": round(limit_ms, 1),
        "holds": {f"host <= own + bytes / ({COPY_SHARE} * copy)": median["host"] <= limit_ms},
    }


def main() -> None:
    """Parse the options, measure, print."""
    parser = argparse.ArgumentParser(description="a hit of half a gigabyte")
    parser.add_argument("--tokens", type=int, default=16_000)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    folder = Path(tempfile.mkdtemp(prefix="kvlake-large-", dir="/dev/shm"))
    try:
        report = measure(folder, options.tokens, options.rounds)
        print(json.dumps({"load_before": load, **report}))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()

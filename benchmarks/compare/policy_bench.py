"""What a policy of eviction brings to real engines that serve a slice of a recorded trace.

Two engines, one behind a sidecar with `host.policy: lru` and one behind a sidecar with `density`,
are alive at once and answer each request in turn, so that noise hits both; the one that does not is
stopped (SIGSTOP), because idle workers of vLLM spin. The trace names blocks
of 512 tokens, as Mooncake published them; each becomes a block of 32 tokens here, so that prompts
fit a small model. Host memory holds a tenth of the blocks of the slice, and the engines' own caches
are emptied before each request: what is not computed comes from kvlake. Each seed is another slice.
`lag_ms_p99` is how late the sidecar's event loop ran a task that wants to run every millisecond,
while the engine answered; `computing_ms_p99` what the loop's own thread computed between two turns.
Prints a JSON object for each seed, and one that sums up.

    python -m benchmarks.compare.policy_bench TRACE [--requests 1500] [--seeds 1 2 3]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from benchmarks.compare.engine_bench import attached
from benchmarks.compare.turns import awake, quiet, resume, stop
from benchmarks.replay.traces import TraceError, read_trace
from sidecar.demo.model import WORDS, write_model
from tests.harness.engine import EngineProcess, EngineSpec
from tests.harness.sidecars import SidecarProcess

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiers.policy.key import CacheKey

POLICIES: Final = ("lru", "density")
BLOCK_TOKENS: Final = 32
PROMPT_TOKENS_MAX: Final = 1280
SHARE: Final = 10
"""Host memory holds one block of this many of the slice."""
SIZE_STEP: Final = 1 << 20
MODEL: Final = {"layers": 2, "hidden": 256, "heads": 4, "kv_heads": 2}
"""Small: of a larger one, a core computes too few prompts in an hour."""
LOOP_MS_MAX: Final = 0.2
"""That the 99th percentile of the loop's computing may be above that of LRU."""


@dataclass
class PolicyArm:
    """One engine and its sidecar."""

    engine: EngineProcess
    sidecar: SidecarProcess
    watched: Path
    """What the sidecar notes of its event loop; complete when it has ended."""
    tokens_loaded: int = 0
    ttft_ms: list[float] = field(default_factory=list[float])
    bounds: list[float] = field(default_factory=list[float])
    """When each request began and ended, on the monotonic clock."""

    def loop(self) -> dict[str, float]:
        """99th percentiles of the event loop in milliseconds, of the time of the requests."""
        moments, late, computing, _ = np.fromfile(self.watched).reshape(-1, 4).T
        # An odd number of bounds lies before what happened in a request.
        during = np.searchsorted(self.bounds, moments) % 2 == 1
        names = {"lag_ms_p99": late, "computing_ms_p99": computing}
        return {
            name: round(1000 * float(np.percentile(values[during], 99)), 3)
            for name, values in names.items()
        }


def tokens_of(blocks: Sequence[CacheKey]) -> list[int]:
    """A prompt of these blocks, and one token that is computed in any case."""
    tokens: list[int] = []
    for _, key in blocks:
        chooser = random.Random(key)
        tokens += [chooser.randrange(WORDS) for _ in range(BLOCK_TOKENS)]
    return [*tokens, 1]


def start(stack: ExitStack, folder: Path, model: str, policy: str, size: int) -> PolicyArm:
    """An engine behind a sidecar with this policy, which has `size` bytes of host memory."""
    config = {
        "chunk": {"tokens": BLOCK_TOKENS},
        "host": {"size": size, "policy": policy},
        "limits": {"storing_max": size},
    }
    (folder / policy).mkdir()
    watched = folder / policy / "loop"
    program = ("-m", "benchmarks.store.watched_sidecar", str(watched))
    sidecar = stack.enter_context(SidecarProcess(folder / policy / policy, config, program=program))
    spec = EngineSpec(
        model,
        sidecar.socket,
        engine_args={"block_size": BLOCK_TOKENS},
        connector_extra={"chunk_tokens": BLOCK_TOKENS, "load_tokens_min": BLOCK_TOKENS},
    )
    engine = stack.enter_context(EngineProcess(spec, folder / policy / "engine.log"))
    # It ends only if it runs.
    stack.callback(resume, engine)
    engine.wait_ready()
    sidecar.wait("the engine attaches", attached)
    return PolicyArm(engine, sidecar, watched)


def serve(arm: PolicyArm, prompt: list[int]) -> None:
    """Answer one request, from kvlake's cache and by computing."""
    arm.engine.reset_prefix_cache()
    arm.bounds.append(time.monotonic())
    one = arm.engine.generate(prompt, max_tokens=1)
    quiet(arm.sidecar)
    arm.bounds.append(time.monotonic())
    arm.ttft_ms.append(one.ttft_ms)
    arm.tokens_loaded += one.cached_tokens


def chunk_bytes(folder: Path, model: str) -> int:
    """Bytes of a slot that holds one block, as an engine and its sidecar find."""
    folder.mkdir()
    with ExitStack() as stack:
        arm = start(stack, folder, model, POLICIES[0], 64 * SIZE_STEP)
        arm.engine.generate(tokens_of([(0, b"first")]), max_tokens=1)
        quiet(arm.sidecar)
        (one,) = arm.sidecar.status()["tiers"]["host"]["classes"]
        return int(one["slot_bytes"])


def measure(
    folder: Path, prompts: Sequence[Sequence[CacheKey]], model: str, slot_bytes: int
) -> dict[str, Any]:
    """Both policies on one slice."""
    blocks = {block for prompt in prompts for block in prompt}
    size = -(-len(blocks) // SHARE * slot_bytes // SIZE_STEP) * SIZE_STEP
    folder.mkdir()
    with ExitStack() as stack:
        arms = {name: start(stack, folder, model, name, size) for name in POLICIES}
        for arm in arms.values():
            stop(arm.engine)
        for number, prompt in enumerate(prompts):
            tokens = tokens_of(prompt)
            for name in POLICIES if number % 2 else reversed(POLICIES):
                with awake(arms[name].engine):
                    serve(arms[name], tokens)
        result: dict[str, Any] = {
            "prompt_tokens": sum(len(prompt) * BLOCK_TOKENS + 1 for prompt in prompts),
            "blocks": len(blocks),
            "host_bytes": size,
        }
        for name, arm in arms.items():
            counters = arm.sidecar.status()["counters"]
            result[name] = {
                "tokens_loaded": arm.tokens_loaded,
                "ttft_ms_mean": round(statistics.fmean(arm.ttft_ms), 2),
                "chunks_evicted": counters["chunks_evicted"],
                "stores_refused": counters["stores_refused"],
            }
    for name, arm in arms.items():
        result[name] |= arm.loop()
    lru, density = result["lru"], result["density"]
    result["tokens_ratio"] = round(density["tokens_loaded"] / max(1, lru["tokens_loaded"]), 3)
    result["ttft_ratio"] = round(density["ttft_ms_mean"] / lru["ttft_ms_mean"], 3)
    result["loop_ms_more"] = round(density["computing_ms_p99"] - lru["computing_ms_p99"], 3)
    return result


def main() -> None:
    """Parse the options, measure, print."""
    parser = argparse.ArgumentParser(description="lru and density with real engines")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options = parser.parse_args()
    try:
        whole = read_trace(options.trace)
    except OSError as error:
        parser.error(f"TRACE {options.trace}: {error.strerror}; name a file of JSON lines")
    except TraceError as error:
        parser.error(str(error))
    trace = [one.keys[: PROMPT_TOKENS_MAX // BLOCK_TOKENS] for one in whole.requests]
    if not 0 < options.requests <= len(trace):
        parser.error(f"--requests {options.requests}: give 1 to {len(trace)}, as the trace has")
    # SIGTERM is like Ctrl-C: what was begun is taken away.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    load = os.getloadavg()[0]
    folder = Path(tempfile.mkdtemp(prefix="kvl-policy-", dir="/dev/shm"))
    try:
        model = str(write_model(folder / "model", **MODEL))
        slot_bytes = chunk_bytes(folder / "first", model)
        found: list[dict[str, Any]] = []
        for seed in options.seeds:
            first = random.Random(seed).randrange(len(trace) - options.requests + 1)
            prompts = trace[first : first + options.requests]
            found.append(measure(folder / str(seed), prompts, model, slot_bytes))
            print(json.dumps({"seed": seed, "first": first, **found[-1]}), flush=True)
        ratios = ("tokens_ratio", "ttft_ratio", "loop_ms_more")
        means = {name: round(statistics.fmean(one[name] for one in found), 3) for name in ratios}
        holds = {
            "tokens_ratio > 1": means["tokens_ratio"] > 1,
            "ttft_ratio < 1": means["ttft_ratio"] < 1,
            f"loop_ms_more <= {LOOP_MS_MAX}": means["loop_ms_more"] <= LOOP_MS_MAX,
        }
        about = {"trace": options.trace.name, "requests": options.requests, "load_before": load}
        print(json.dumps(about | means | {"holds": holds}))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()

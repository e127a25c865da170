"""What a policy of eviction brings to real engines that serve a slice of a recorded trace.

Two engines, one behind a sidecar with `host.policy: lru` and one behind a sidecar with `density`,
are alive at once and answer each request in turn, so that noise hits both. The trace names blocks
of 512 tokens by number (`hash_ids`, as Mooncake published them); each becomes a block of 32 tokens
here, so that prompts fit a small model. Host memory holds a tenth of the blocks of the slice, and
the engines' own caches are emptied before each request: what is not computed comes from kvlake.
Each seed is another slice. Prints one JSON object.

    python -m benchmarks.compare.policy_bench TRACE [--requests 1500] [--seeds 1 2 3]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.compare.engine_bench import attached, quiet
from sidecar.demo.model import WORDS, write_model
from tests.harness.engine import EngineProcess, EngineSpec
from tests.harness.sidecars import SidecarProcess

POLICIES: Final = ("lru", "density")
BLOCK_TOKENS: Final = 32
PROMPT_TOKENS_MAX: Final = 4000
SHARE: Final = 10
"""Host memory holds one block of this many of the slice."""
SIZE_STEP: Final = 1 << 20


@dataclass
class PolicyArm:
    """One engine and its sidecar."""

    engine: EngineProcess
    sidecar: SidecarProcess
    tokens_loaded: int = 0
    ttft_ms: list[float] = field(default_factory=list[float])


def read_trace(path: Path) -> list[list[int]]:
    """The blocks of each prompt. Raises `ValueError` for a line that names none."""
    prompts: list[list[int]] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        blocks = json.loads(line).get("hash_ids")
        if not isinstance(blocks, list):
            raise ValueError(  # noqa: TRY004 (of the file, not of a caller)
                f"{path}:{number}: hash_ids={blocks!r}: must be a list of numbers"
            )
        prompts.append([int(block) for block in blocks[: PROMPT_TOKENS_MAX // BLOCK_TOKENS]])
    return prompts


def tokens_of(blocks: list[int]) -> list[int]:
    """A prompt of these blocks, and one token that is computed in any case."""
    tokens: list[int] = []
    for block in blocks:
        chooser = random.Random(block)
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
    sidecar = stack.enter_context(SidecarProcess(folder / policy / policy, config))
    spec = EngineSpec(
        model,
        sidecar.socket,
        engine_args={"block_size": BLOCK_TOKENS},
        connector_extra={"chunk_tokens": BLOCK_TOKENS, "load_tokens_min": BLOCK_TOKENS},
    )
    engine = stack.enter_context(EngineProcess(spec, folder / policy / "engine.log"))
    engine.wait_ready()
    sidecar.wait("the engine attaches", attached)
    return PolicyArm(engine, sidecar)


def serve(arm: PolicyArm, prompt: list[int]) -> None:
    """Answer one request, from kvlake's cache and by computing."""
    quiet(arm.sidecar)
    arm.engine.reset_prefix_cache()
    one = arm.engine.generate(prompt, max_tokens=1)
    arm.ttft_ms.append(one.ttft_ms)
    arm.tokens_loaded += one.cached_tokens


def chunk_bytes(folder: Path, model: str) -> int:
    """Bytes of a slot that holds one block, as an engine and its sidecar find."""
    folder.mkdir()
    with ExitStack() as stack:
        arm = start(stack, folder, model, POLICIES[0], 64 * SIZE_STEP)
        arm.engine.generate(tokens_of([0]), max_tokens=1)
        quiet(arm.sidecar)
        (one,) = arm.sidecar.status()["tiers"]["host"]["classes"]
        return int(one["slot_bytes"])


def measure(folder: Path, prompts: list[list[int]], model: str, slot_bytes: int) -> dict[str, Any]:
    """Both policies on one slice."""
    blocks = {block for prompt in prompts for block in prompt}
    size = -(-len(blocks) // SHARE * slot_bytes // SIZE_STEP) * SIZE_STEP
    folder.mkdir()
    with ExitStack() as stack:
        arms = {name: start(stack, folder, model, name, size) for name in POLICIES}
        for number, prompt in enumerate(prompts):
            tokens = tokens_of(prompt)
            for name in POLICIES if number % 2 else reversed(POLICIES):
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
    lru, density = result["lru"], result["density"]
    result["tokens_ratio"] = round(density["tokens_loaded"] / max(1, lru["tokens_loaded"]), 3)
    result["ttft_ratio"] = round(density["ttft_ms_mean"] / lru["ttft_ms_mean"], 3)
    return result


def main() -> None:
    """Parse the options, measure, print."""
    parser = argparse.ArgumentParser(description="lru and density with real engines")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options = parser.parse_args()
    trace = read_trace(options.trace)
    if not 0 < options.requests <= len(trace):
        parser.error(f"--requests {options.requests}: the trace has {len(trace)}")
    folder = Path(tempfile.mkdtemp(prefix="kvl-policy-", dir="/dev/shm"))
    try:
        model = str(write_model(folder / "model"))
        slot_bytes = chunk_bytes(folder / "first", model)
        report: dict[str, Any] = {"requests": options.requests, "load_before": os.getloadavg()[0]}
        for seed in options.seeds:
            first = random.Random(seed).randrange(len(trace) - options.requests + 1)
            prompts = trace[first : first + options.requests]
            report[f"seed_{seed}"] = measure(folder / str(seed), prompts, model, slot_bytes)
        print(json.dumps(report))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()

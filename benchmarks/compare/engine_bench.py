"""What kvlake brings and costs real engines, side by side with a connector that does nothing.

Three engines live side by side, pinned to the same core: one behind a sidecar with a folder as its
store, one behind a sidecar without a store, and one with a connector that does nothing. They take
turns, so that a machine whose speed drifts drifts for all, and those whose turn it is not are
stopped (`turns.py`). Prints one JSON object; times are milliseconds unless their name says more;
`holds` says which targets were met.

    python -m benchmarks.compare.engine_bench [--rounds 7]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.compare.counting import StepCounter
from benchmarks.compare.turns import awake, hit_places, quiet, resume, stop
from sidecar.demo.model import WORDS, write_model
from tests.harness.engine import EngineProcess, EngineSpec
from tests.harness.sidecars import SidecarProcess

DECODES: Final = 4
DECODE_REPEATS: Final = 15
"""Requests of each kind in a round: each waits for a part of the step that runs."""
CLIENTS: Final = 8
CLIENT_TOKENS: Final = 2048
THROUGHPUT_MIN: Final = 0.97


@dataclass
class Arm:
    """One engine and the count of its scheduler's steps."""

    engine: EngineProcess
    counter: StepCounter
    sidecar: SidecarProcess | None = None


class Bench:
    """Holds the arms and runs the measurements."""

    def __init__(self, folder: Path, rounds: int) -> None:
        self._folder = folder
        self._rounds = rounds
        self._chooser = random.Random(7)
        self.model = str(write_model(folder / "model"))
        self.results: dict[str, Any] = {"load_before": os.getloadavg()[0]}
        self._arms: dict[str, Arm] = {}

    def prompt(self, tokens: int) -> list[int]:
        """A prompt that nobody has seen."""
        return [self._chooser.randrange(WORDS) for _ in range(tokens)]

    def sidecar(self, name: str, *, with_store: bool) -> SidecarProcess:
        """A sidecar, with a folder as its store or without."""
        config: dict[str, Any] = {"host": {"size": "2GiB"}, "limits": {"lookup_wait": "5s"}}
        if with_store:
            (self._folder / "store").mkdir()
            url = f"file://{self._folder / 'store'}"
            config["store"] = {"url": url, "refresh_seconds": "200ms"}
        # The folder's name is part of the sidecar's, and each needs its own.
        return SidecarProcess(self._folder / name, config)

    def arm(self, stack: ExitStack, name: str, sidecar: SidecarProcess | None) -> Arm:
        """Start one engine, warm it up and stop it until its turn."""
        steps = str(self._folder / f"{name}.steps")
        socket = "" if sidecar is None else sidecar.socket
        connector = {
            "kv_connector": "NothingConnector" if sidecar is None else "CountingKVLakeConnector",
            "kv_connector_module_path": "benchmarks.compare.counting",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"socket": socket, "steps": steps},
        }
        spec = EngineSpec(self.model, socket, connector=connector)
        engine = stack.enter_context(EngineProcess(spec, self._folder / f"{name}.log"))
        # It ends only if it runs.
        stack.callback(resume, engine)
        engine.wait_ready()
        for tokens in (4000, 2048, 512):
            engine.generate(self.prompt(tokens), max_tokens=4)
        stop(engine)
        arm = self._arms[name] = Arm(engine, StepCounter(steps), sidecar)
        return arm

    def run(self) -> dict[str, Any]:
        """Everything, in order."""
        with ExitStack() as stack:
            with_folder = stack.enter_context(self.sidecar("folder-side", with_store=True))
            host_only = stack.enter_context(self.sidecar("host-side", with_store=False))
            folder = self.arm(stack, "folder", with_folder)
            self.arm(stack, "host", host_only)
            nothing = self.arm(stack, "nothing", None)
            for tokens in (2048, 4000):
                self._hits(folder.engine, with_folder, tokens)
            self._clients(folder.engine, with_folder)
            self._beside_writes(folder.engine, with_folder)
            self._beside_decodes(folder, nothing)
            self._throughput()
        return self.results

    def _hits(self, engine: EngineProcess, sidecar: SidecarProcess, tokens: int) -> None:
        prompt = self.prompt(tokens)
        timed: dict[str, list[float]] = {"own": [], "host": [], "cold": []}
        loaded: dict[str, int] = {}
        with awake(engine):
            engine.generate(prompt, max_tokens=1)
            for number in range(self._rounds):
                for name in itertools.chain(hit_places(engine, sidecar, number), ["cold"]):
                    asked = self.prompt(tokens) if name == "cold" else prompt
                    generation = engine.generate(asked, max_tokens=1)
                    timed[name].append(generation.ttft_ms)
                    loaded[name] = generation.cached_tokens
            prompts = [self.prompt(tokens) for _ in range(self._rounds + 1)]
            for prompt in prompts:
                engine.generate(prompt, max_tokens=1)
            restarted(sidecar)
            engine.reset_prefix_cache()
            # As for the other hits, nothing runs for the first time: the first hit is another row.
            names = ["folder_after_restart", *["folder"] * self._rounds]
            for name, prompt in zip(names, prompts, strict=True):
                generation = engine.generate(prompt, max_tokens=1)
                timed.setdefault(name, []).append(generation.ttft_ms)
                loaded[name] = generation.cached_tokens
        median = {name: round(statistics.median(values), 2) for name, values in timed.items()}
        self.results[f"ttft_ms_{tokens}"] = median | {"tokens_loaded": loaded}
        self._holds(f"host_hit_{tokens}", median["host"] <= median["own"] + 10)
        self._holds(f"folder_hit_{tokens}", median["folder"] <= median["own"] + 60)

    def _clients(self, engine: EngineProcess, sidecar: SidecarProcess) -> None:
        """Hits of many clients at once, from host memory and from the engine's own cache."""
        prompts = [self.prompt(CLIENT_TOKENS) for _ in range(CLIENTS)]
        timed: dict[str, list[float]] = {"own": [], "host": []}
        with awake(engine):
            for prompt in prompts:
                engine.generate(prompt, max_tokens=1)
            for number in range(self._rounds):
                for name in hit_places(engine, sidecar, number):
                    handles = [engine.begin(prompt, max_tokens=1) for prompt in prompts]
                    timed[name] += [engine.finish(handle).ttft_ms for handle in handles]
        self.results[f"ttft_ms_{CLIENTS}_clients"] = {
            name: percentiles(values) for name, values in timed.items()
        }

    def _beside_writes(self, engine: EngineProcess, sidecar: SidecarProcess) -> None:
        """Hits from host memory while the sidecar writes other prompts to the folder."""
        prompt = self.prompt(CLIENT_TOKENS)
        timed: dict[str, list[float]] = {"quiet": [], "writing": []}
        writing = 0
        with awake(engine):
            engine.generate(prompt, max_tokens=1)
            for _ in range(2 * self._rounds):
                quiet(sidecar)
                engine.reset_prefix_cache()
                timed["quiet"].append(engine.generate(prompt, max_tokens=1).ttft_ms)
                engine.reset_prefix_cache()
                engine.generate(self.prompt(4000), max_tokens=1)
                pending = sidecar.status()["pending"]
                writing += pending["writes_running"] + pending["writes_pending"] > 0
                timed["writing"].append(engine.generate(prompt, max_tokens=1).ttft_ms)
        found = {name: percentiles(values) for name, values in timed.items()}
        self.results["ttft_ms_beside_writes"] = found | {"rounds_that_wrote": writing}

    def _beside_decodes(self, folder: Arm, nothing: Arm) -> None:
        """A held prompt and a miss while four requests decode."""
        held = self.prompt(2000)
        timed: dict[str, list[float]] = {}
        steps: dict[str, list[int]] = {}
        arms = [("kvlake", folder), ("nothing", nothing)]
        for number in range(self._rounds):
            for arm_name, arm in reversed(arms) if number % 2 else arms:
                with awake(arm.engine):
                    arm.engine.generate(held, max_tokens=1)
                    decodes = [
                        arm.engine.begin(self.prompt(64), max_tokens=4000) for _ in range(DECODES)
                    ]
                    time.sleep(0.5)
                    cases = [("held", held), ("miss", None)] * DECODE_REPEATS
                    for case, known in cases:
                        prompt = known or self.prompt(512)
                        before = arm.counter.steps
                        generation = arm.engine.generate(prompt, max_tokens=1)
                        took = arm.counter.steps - before
                        steps.setdefault(f"{case}_{arm_name}", []).append(took)
                        timed.setdefault(f"{case}_{arm_name}", []).append(generation.ttft_ms)
                    for decode in decodes:
                        arm.engine.abort(decode)
                    for decode in decodes:
                        arm.engine.finish(decode)
        ttft = {name: round(statistics.median(values), 2) for name, values in timed.items()}
        counts = {name: statistics.median(values) for name, values in steps.items()}
        self.results["beside_decodes"] = {"ttft_ms": ttft, "steps": counts}
        for case in ("held", "miss"):
            self._holds(f"{case}_ttft", ttft[f"{case}_kvlake"] <= ttft[f"{case}_nothing"] + 1)
            self._holds(f"{case}_steps", counts[f"{case}_kvlake"] <= counts[f"{case}_nothing"])

    def _throughput(self) -> None:
        """Prompts without hits, stored with and without a folder behind host memory."""
        timed: dict[str, list[float]] = {name: [] for name in self._arms}
        for number in range(self._rounds):
            order = list(self._arms.items())
            for name, arm in order if number % 2 else reversed(order):
                prompts = [self.prompt(512) for _ in range(64)]
                with awake(arm.engine):
                    started = time.perf_counter()
                    handles = [arm.engine.begin(prompt, max_tokens=16) for prompt in prompts]
                    for handle in handles:
                        arm.engine.finish(handle)
                    timed[name].append(time.perf_counter() - started)
                if arm.sidecar is not None:
                    # What it still writes must not slow the next arm.
                    quiet(arm.sidecar)
        median = {name: statistics.median(values) for name, values in timed.items()}
        ratios = {
            "host_to_nothing": round(median["nothing"] / median["host"], 3),
            "folder_to_nothing": round(median["nothing"] / median["folder"], 3),
            "folder_to_host": round(median["host"] / median["folder"], 3),
        }
        seconds = {name: round(value, 3) for name, value in median.items()}
        self.results["throughput"] = {"seconds": seconds, "ratio": ratios}
        for name in ("host_to_nothing", "folder_to_host"):
            self._holds(f"throughput_{name}", ratios[name] >= THROUGHPUT_MIN)

    def _holds(self, target: str, met: bool) -> None:
        self.results.setdefault("holds", {})[target] = met


def percentiles(values: list[float]) -> dict[str, float]:
    """Median and 99th percentile; of fewer than a hundred values, the largest."""
    ordered = sorted(values)
    return {
        "p50": round(statistics.median(ordered), 2),
        "p99": round(ordered[len(ordered) * 99 // 100], 2),
    }


def attached(status: dict[str, Any]) -> bool:
    """Whether an engine of one worker is attached: that, and its scheduler."""
    return len(status["sessions"]) == 2


def restarted(sidecar: SidecarProcess) -> None:
    """Start a sidecar again, with empty host memory and its store listed."""
    quiet(sidecar)
    chunks = sidecar.status()["tiers"]["store"]["chunks"]
    sidecar.drain()
    sidecar.start()
    sidecar.wait("the engine attaches", attached)
    sidecar.wait("the store is listed", lambda now: now["tiers"]["store"]["chunks"] >= chunks)


def main() -> None:
    """Parse the options, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kvlake-bench-"))
    try:
        print(json.dumps(Bench(folder, options.rounds).run()))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()

"""What kvlake costs and saves in a real vLLM engine, against a connector that does nothing.

Both engines live side by side, pinned to the same core, and take turns, so that a machine whose
speed drifts drifts for both. Prints one JSON object; `holds` says which targets were met.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.compare.counting import StepCounter
from sidecar.demo.model import WORDS, write_model
from tests.harness.engine import EngineProcess, EngineSpec
from tests.harness.sidecars import SidecarProcess

DECODES = 4


@dataclass
class Arm:
    """One engine and the count of its scheduler's steps."""

    engine: EngineProcess
    counter: StepCounter


class Bench:
    """Holds the two arms and runs the measurements."""

    def __init__(self, folder: Path, rounds: int) -> None:
        self._folder = folder
        self._rounds = rounds
        self._chooser = random.Random(7)
        self.model = str(write_model(folder / "model"))
        self.results: dict[str, Any] = {}

    def prompt(self, tokens: int) -> list[int]:
        """A prompt that nobody has seen."""
        return [self._chooser.randrange(WORDS) for _ in range(tokens)]

    def sidecar(self, *, with_store: bool = True) -> SidecarProcess:
        """A sidecar, with a folder as its store or without, on the sockets of the one before."""
        (self._folder / "store").mkdir(exist_ok=True)
        config: dict[str, Any] = {"host": {"size": "2GiB"}, "limits": {"lookup_wait": "5s"}}
        if with_store:
            url = f"file://{self._folder / 'store'}"
            config["store"] = {"url": url, "refresh_seconds": "200ms"}
        return SidecarProcess(self._folder / "side", config)

    def arm(self, name: str, socket: str) -> Arm:
        """Start one engine with the connector `name`."""
        steps = str(self._folder / f"{name}.steps")
        connector = {
            "kv_connector": name,
            "kv_connector_module_path": "benchmarks.compare.counting",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"socket": socket, "steps": steps},
        }
        spec = EngineSpec(self.model, socket, connector=connector)
        engine = EngineProcess(spec, self._folder / f"{name}.log")
        return Arm(engine, StepCounter(steps))

    def run(self) -> dict[str, Any]:
        """Everything, in order."""
        with ExitStack() as stack:
            sidecar = stack.enter_context(self.sidecar())
            kvlake = self.arm("CountingKVLakeConnector", sidecar.socket)
            stack.enter_context(kvlake.engine)
            kvlake.engine.wait_ready()
            nothing = self.arm("NothingConnector", sidecar.socket)
            stack.enter_context(nothing.engine)
            nothing.engine.wait_ready()
            for arm in (kvlake, nothing):
                for tokens in (4000, 2048, 512):
                    arm.engine.generate(self.prompt(tokens), max_tokens=4)
            for tokens in (2048, 4000):
                self._hits(kvlake.engine, sidecar, tokens)
            self._beside_decodes(kvlake, nothing)
            self._throughput("throughput_with_folder", kvlake.engine, nothing.engine)
            sidecar.drain()
            with self.sidecar(with_store=False) as host_only:
                host_only.wait("the engine attaches", attached)
                self._throughput("throughput", kvlake.engine, nothing.engine)
        return self.results

    def _hits(self, engine: EngineProcess, sidecar: SidecarProcess, tokens: int) -> None:
        prompt = self.prompt(tokens)
        engine.generate(prompt, max_tokens=1)
        timed: dict[str, list[float]] = {"own": [], "host": [], "folder": [], "cold": []}
        loaded: dict[str, int] = {}
        for _ in range(self._rounds):
            quiet(sidecar)
            engine.reset_prefix_cache()
            host = engine.generate(prompt, max_tokens=1)
            own = engine.generate(prompt, max_tokens=1)
            cold = engine.generate(self.prompt(tokens), max_tokens=1)
            for name, generation in (("host", host), ("own", own), ("cold", cold)):
                timed[name].append(generation.ttft_ms)
                loaded[name] = generation.cached_tokens
        for _ in range(self._rounds):
            sidecar.drain()
            sidecar.start()
            sidecar.wait("the engine attaches", attached)
            sidecar.wait("the store is listed", lambda s: s["tiers"]["store"]["chunks"] > 0)
            engine.reset_prefix_cache()
            folder = engine.generate(prompt, max_tokens=1)
            timed["folder"].append(folder.ttft_ms)
            loaded["folder"] = folder.cached_tokens
        median = {name: round(statistics.median(values), 2) for name, values in timed.items()}
        self.results[f"ttft_ms_{tokens}"] = median | {"tokens_loaded": loaded}
        self._holds(f"host_hit_{tokens}", median["host"] <= median["own"] + 10)
        self._holds(f"folder_hit_{tokens}", median["folder"] <= median["own"] + 60)

    def _beside_decodes(self, kvlake: Arm, nothing: Arm) -> None:
        """A held prompt and a miss while four requests decode."""
        held = self.prompt(2000)
        timed: dict[str, list[float]] = {}
        steps: dict[str, list[int]] = {}
        for _ in range(self._rounds):
            for arm_name, arm in (("kvlake", kvlake), ("nothing", nothing)):
                arm.engine.generate(held, max_tokens=1)
                decodes = [
                    arm.engine.begin(self.prompt(64), max_tokens=4000) for _ in range(DECODES)
                ]
                time.sleep(0.5)
                for case, prompt in (("held", held), ("miss", self.prompt(512))):
                    before = arm.counter.steps
                    generation = arm.engine.generate(prompt, max_tokens=1)
                    steps.setdefault(f"{case}_{arm_name}", []).append(arm.counter.steps - before)
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

    def _throughput(self, what: str, kvlake: EngineProcess, nothing: EngineProcess) -> None:
        timed: dict[str, list[float]] = {"kvlake": [], "nothing": []}
        for _ in range(max(3, self._rounds // 2)):
            for name, engine in (("kvlake", kvlake), ("nothing", nothing)):
                prompts = [self.prompt(512) for _ in range(64)]
                started = time.perf_counter()
                handles = [engine.begin(prompt, max_tokens=16) for prompt in prompts]
                for handle in handles:
                    engine.finish(handle)
                timed[name].append(time.perf_counter() - started)
        median = {name: statistics.median(values) for name, values in timed.items()}
        ratio = round(median["nothing"] / median["kvlake"], 3)
        self.results[what] = {"seconds": median, "ratio": ratio}
        self._holds(what, ratio >= 0.97)

    def _holds(self, target: str, met: bool) -> None:
        self.results.setdefault("holds", {})[target] = met


def attached(status: dict[str, Any]) -> bool:
    return len(status["sessions"]) == 2


def quiet(sidecar: SidecarProcess) -> None:
    """Wait until what earlier prompts left to do is done: a hit is measured, not a backlog."""
    sidecar.wait("no work is pending", lambda status: not any(status["pending"].values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kvlake-bench-"))
    try:
        print(json.dumps(Bench(folder, options.rounds).run()))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()

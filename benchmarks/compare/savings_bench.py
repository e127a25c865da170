"""How well the seconds that kvlake says it saved match a stopwatch.

One real engine. Each prompt is asked for twice, in turn: once with the cache, once with a request
that does not read it. The measured difference is that of the times to the first token; the claimed
one is `kvlake_gpu_seconds_saved_total` less `kvlake_gpu_seconds_spent_total`. Prints one JSON
object; `ratio` is claimed to measured.

    python -m benchmarks.compare.savings_bench [--rounds 6]
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

from benchmarks.compare.engine_bench import Bench, attached
from benchmarks.compare.turns import quiet
from tests.harness.engine import EngineProcess, EngineSpec
from tests.harness.sidecars import SidecarProcess

PROMPTS_TOKENS: Final = (512, 1024, 2048, 4000)
UNREAD: Final = {"kvlake": {"read": False}}


def saved(sidecar: SidecarProcess) -> float:
    """Seconds that the sidecar says were saved since its start, less those spent."""
    figures = sidecar.status()["prompts"]["saved"]
    return float(figures["seconds"]) - float(figures["seconds_spent"])


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """Both differences, in seconds, for each length and over all."""
    bench = Bench(folder, rounds)
    result: dict[str, Any] = {"rounds": rounds}
    with bench.sidecar("host", with_store=False) as sidecar:
        spec = EngineSpec(bench.model, sidecar.socket)
        with EngineProcess(spec, folder / "engine.log") as engine:
            engine.wait_ready()
            sidecar.wait("the engine attaches", attached)
            # The first steps of an engine are slow, and it has to know how fast it is.
            for tokens in PROMPTS_TOKENS * 3:
                engine.generate(bench.prompt(tokens), max_tokens=1)
            measured_all = claimed_all = 0.0
            for tokens in PROMPTS_TOKENS:
                prompt = bench.prompt(tokens)
                engine.generate(prompt, max_tokens=1)
                before, measured = saved(sidecar), 0.0
                for _ in range(rounds):
                    for params, sign in ((None, -1), (UNREAD, 1)):
                        quiet(sidecar)
                        engine.reset_prefix_cache()
                        one = engine.generate(prompt, max_tokens=1, kv_transfer_params=params)
                        measured += sign * one.ttft_ms / 1000
                # What is reported comes with the step after.
                engine.generate(bench.prompt(64), max_tokens=4)
                quiet(sidecar)
                claimed = saved(sidecar) - before
                result[str(tokens)] = {
                    "measured_seconds": round(measured, 4),
                    "claimed_seconds": round(claimed, 4),
                    "ratio": round(claimed / measured, 3),
                }
                measured_all += measured
                claimed_all += claimed
    result["ratio"] = round(claimed_all / measured_all, 3)
    return result


def main() -> None:
    """Parse the options, measure, print."""
    parser = argparse.ArgumentParser(description="claimed savings against measured ones")
    parser.add_argument("--rounds", type=int, default=6)
    folder = Path(tempfile.mkdtemp(prefix="kvl-savings-", dir="/dev/shm"))
    try:
        print(json.dumps(measure(folder, parser.parse_args().rounds)))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()

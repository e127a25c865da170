"""Time to first token against the bandwidth of the store, beside an engine without a cache.

A real engine with kvlake and one without any connector live side by side, pinned to one core, and
take turns. The store is SeaweedFS behind a proxy that is only so fast. The prompts are in the store
and nowhere else: the engine's own cache is emptied before each request, and host memory holds fewer
prompts than there are. What a bandwidth is called and what the link reached are both told: a proxy
on a busy machine is no faster than its core.

A change of bandwidth is news to the sidecar: the first requests after one are told apart
(`first_ratio`) and not in the median. Asked: with no bandwidth is the median of the ratios of a
request and its neighbour without a cache above 1.05. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import anyio
import numpy as np

from benchmarks.store.throttle import Throttle
from sidecar.demo.model import WORDS, write_model
from tests.harness.engine import EngineProcess, EngineSpec
from tests.harness.servers import S3Server, s3_server
from tests.harness.sidecars import SidecarProcess
from tiers.store.object_tier import UrlObjects

MEGABYTES_PER_SECOND: Final = (10, 25, 50, 100, 200, 500, 1000, 2000)
UNLIMITED: Final = 1e12
PROMPT_TOKENS: Final = 4000
PROMPTS: Final = 6
HOST_SIZE: Final = "96MiB"
"""Two prompts of 32 MB and the slots of the next."""
FIRST_REQUESTS: Final = 2
REACHED_TRIES: Final = 3
RATIO_MAX: Final = 1.05


class Bench:
    """Both engines, the sidecar, the store and the link before it."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._chooser = random.Random(11)
        self._server: S3Server = stack.enter_context(s3_server(folder))
        port = urlsplit(self._server.endpoint).port
        assert port is not None
        self._link = stack.enter_context(Throttle(port))
        self._sidecar = stack.enter_context(
            SidecarProcess(
                folder / "side",
                {
                    "host": {"size": HOST_SIZE},
                    "limits": {"lookup_wait": "5s"},
                    "store": {
                        "url": self._server.url,
                        "refresh_seconds": "200ms",
                        **self._server.settings_at(self._link.endpoint),
                    },
                },
            )
        )
        model = str(write_model(folder / "model"))
        self._kvlake = EngineProcess(EngineSpec(model, self._sidecar.socket), folder / "kvlake.log")
        stack.enter_context(self._kvlake)
        self._nothing = EngineProcess(EngineSpec(model, None), folder / "nothing.log")
        stack.enter_context(self._nothing)
        for engine in (self._kvlake, self._nothing):
            engine.wait_ready()
        self._prompts = [self._prompt() for _ in range(PROMPTS)]
        self._turn = 0

    def _prompt(self) -> list[int]:
        return [self._chooser.randrange(WORDS) for _ in range(PROMPT_TOKENS)]

    def run(self, bandwidths: list[int], rounds: int) -> dict[str, Any]:
        """Fill the store, then every bandwidth in turn, the slowest last: nothing is behind it."""
        for engine in (self._kvlake, self._nothing):
            engine.generate(self._prompt(), max_tokens=1)
        for prompt in self._prompts:
            self._kvlake.generate(prompt, max_tokens=1)
            self._rest()
        points: list[dict[str, Any]] = []
        for megabytes in sorted(bandwidths, reverse=True):
            points.append(self._point(megabytes, rounds))
            print(json.dumps(points[-1]), file=sys.stderr, flush=True)
        points.reverse()
        name = f"ratio <= {RATIO_MAX} at every bandwidth"
        return {
            "prompt_tokens": PROMPT_TOKENS,
            "points": points,
            "holds": {name: all(point["ratio"] <= RATIO_MAX for point in points)},
        }

    def _point(self, megabytes: int, rounds: int) -> dict[str, Any]:
        self._rest()
        self._link.set(megabytes * 1e6)
        reached = max(anyio.run(self._reached) for _ in range(REACHED_TRIES))
        pairs: list[tuple[float, float]] = []
        cached: list[int] = []
        for number in range(FIRST_REQUESTS + rounds):
            # Who begins changes: what the one leaves running falls on the other.
            engines = (self._nothing, self._kvlake)
            told = {engine: self._request(engine) for engine in engines[:: -1 if number % 2 else 1]}
            nothing, (kvlake, tokens) = told[self._nothing][0], told[self._kvlake]
            pairs.append((kvlake, nothing))
            cached.append(tokens)
            self._turn += 1
        first, counted = pairs[:FIRST_REQUESTS], pairs[FIRST_REQUESTS:]
        return {
            "megabytes_per_second": megabytes,
            "reached_megabytes_per_second": round(reached / 1e6, 1),
            "kvlake_ttft_ms": round(statistics.median(one[0] for one in counted), 1),
            "no_cache_ttft_ms": round(statistics.median(one[1] for one in counted), 1),
            "ratio": round(statistics.median(one[0] / one[1] for one in counted), 3),
            "first_ratio": round(sum(one[0] for one in first) / sum(one[1] for one in first), 3),
            "cached_tokens": statistics.median(cached[FIRST_REQUESTS:]),
        }

    def _request(self, engine: EngineProcess) -> tuple[float, int]:
        engine.reset_prefix_cache()
        prompt = self._prompts[self._turn % PROMPTS]
        generation = engine.generate(prompt, max_tokens=1)
        return generation.ttft_ms, generation.cached_tokens

    def _rest(self) -> None:
        """Until what earlier requests left to do is done."""
        self._sidecar.wait(
            "no work is pending", lambda status: not any(status["pending"].values()), seconds=60
        )

    async def _reached(self) -> float:
        """Bytes per second of reading some chunks through the link, as many at once as it likes."""
        tier = UrlObjects(self._server.url, self._server.access_at(self._link.endpoint))
        try:
            listed = [one for one in await tier.list("") if one.size_bytes > 1 << 20]
            chosen = sorted(listed)[:8]
            start = time.perf_counter()
            async with anyio.create_task_group() as tasks:
                for one in chosen:
                    into = np.empty(one.size_bytes, dtype=np.uint8)
                    tasks.start_soon(tier.read, one.name, into)
            return sum(one.size_bytes for one in chosen) / (time.perf_counter() - start)
        finally:
            await tier.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--megabytes", type=int, nargs="*", default=list(MEGABYTES_PER_SECOND), help="per second"
    )
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kvlake-bench-"))
    try:
        with ExitStack() as stack:
            print(json.dumps(Bench(folder, stack).run(options.megabytes, options.rounds)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()

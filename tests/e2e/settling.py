"""`SettlingSpec`: the offloading spec as `native.py` needs it; loaded in an engine's process.

vLLM's host tier is emptied before a request that comes alone, and a file is there while nothing
runs, stores or is carried; each data-parallel rank has its own of either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from connector.offloading.spec import KVLakeOffloadingSpec, NoTiers
from tests.e2e.native import settled_path

if TYPE_CHECKING:
    from pathlib import Path

    from vllm.v1.kv_offload.base import ReqContext, ScheduleEndContext


class SettlingSpec(KVLakeOffloadingSpec):
    """Runs in the engine's process; else the spec as it is."""

    def get_manager(self) -> Any:
        manager: Any = super().get_manager()
        rank = self.config.parallel.data_parallel_index
        settled = settled_path(self.extra_config["settled"], rank)
        if isinstance(manager, NoTiers):
            settled.touch()
            return manager
        return _settling(manager, settled)


def _settling(manager: Any, settled: Path) -> Any:
    running: set[str] = set()
    storing = 0
    began, ended = manager.on_new_request, manager.on_request_finished
    prepare, complete = manager.prepare_store, manager.complete_store
    scheduled, reset = manager.on_schedule_end, manager.reset_cache

    def on_new_request(context: ReqContext, **options: Any) -> Any:
        if not running:
            empty_host_tier(manager.primary_tier)
        running.add(context.req_id)
        settled.unlink(missing_ok=True)
        return began(context, **options)

    def settle() -> None:
        if not running and not storing and not manager.has_pending_work():
            settled.touch()

    def on_request_finished(context: ReqContext, **options: Any) -> None:
        # Told at the end of a step, after what it stores at its end; there may be no other step.
        running.discard(context.req_id)
        ended(context, **options)
        settle()

    def prepare_store(keys: Any, context: ReqContext) -> Any:
        nonlocal storing
        prepared = prepare(keys, context)
        storing += bool(prepared is not None and prepared.keys_to_store)
        return prepared

    def complete_store(keys: Any, context: ReqContext, success: bool = True) -> None:
        nonlocal storing
        storing -= 1
        complete(keys, context, success)

    def on_schedule_end(context: ScheduleEndContext) -> None:
        scheduled(context)
        settle()

    def reset_cache() -> None:
        nonlocal storing
        storing = 0
        reset()

    for hook in (
        on_new_request,
        on_request_finished,
        prepare_store,
        complete_store,
        on_schedule_end,
        reset_cache,
    ):
        setattr(manager, hook.__name__, hook)
    settled.touch()
    return manager


def empty_host_tier(primary: Any) -> None:
    """Drop every chunk of vLLM's host tier that nothing reads or writes."""
    evicted = primary._policy.evict(primary._num_evictable_cache_chunks, set()) or []  # noqa: SLF001 (of vLLM)
    primary._num_evictable_cache_chunks -= len(evicted)  # noqa: SLF001 (of vLLM)
    for _, chunk in evicted:
        primary._free_chunk(chunk)  # noqa: SLF001 (of vLLM)

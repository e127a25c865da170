"""Code for the defects of vLLM's own offloading; `vllm_workarounds.py` lists them.

Owns what a manager of tiers learns of requests, and the name of the host tier's file. Does not own
tiers.
"""

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    PrepareStoreOutput,
    get_offload_group_idx,
)

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadKey, ReqContext, ScheduleEndContext

logger = logging.getLogger("vllm.kvlake")


@dataclass(slots=True)
class _OffloadedRequest:
    scheduled: bool = False
    loading: bool = False
    preempted: bool = False
    running: bool = False
    """It was scheduled, and no preemption was reported since."""
    looked_up: bool = False
    """In the step that is not over yet."""
    put_off: bool = False
    """And that lookup was put off."""
    excluded: bool = False
    hits: "set[OffloadKey]" = field(default_factory=set)
    """In vLLM's host tier, since it was last preempted."""
    pending: dict[int, int] = field(default_factory=dict[int, int])
    """By KV cache group, the last token of the last chunk that was found on its way to vLLM's host
    tier in this step."""


class OffloadedRequests:
    """Requests of vLLM's offloading, as a manager of tiers learns of them.

    A manager is shown no requests, but vLLM reports which are scheduled as new, as one that
    continues is too, and which are preempted. All methods ignore requests that were not added.

    vLLM 0.31 and 0.32 report that before they store anything of the step. vLLM 0.33 reports it
    after all stores of the step, so there an exclusion takes effect one step later. That does no
    harm: vLLM 0.33 replaces the list of blocks of a request that continues, so what is stored of it
    in that step is right.

    If `preempted_are_new`, a preempted request is scheduled as new again, as vLLM's second model
    runner does. Otherwise it looks like one that continues, and is excluded too.
    """

    def __init__(self, *, preempted_are_new: bool = False) -> None:
        self._preempted_are_new = preempted_are_new
        self._requests: dict[str, _OffloadedRequest] = {}
        self._weights_changed = self._warned = False
        """Weights were replaced, and nothing was reset since."""

    def added(self, req_context: "ReqContext", **_: Any) -> None:
        """Take a request in."""
        self._requests[req_context.req_id] = _OffloadedRequest()

    def finished(self, req_context: "ReqContext", **_: Any) -> None:
        """Forget a request."""
        self._requests.pop(req_context.req_id, None)

    def _known(self, request_id: str) -> _OffloadedRequest:
        """The record of a request; a throwaway one if it was not added."""
        return self._requests.get(request_id) or _OffloadedRequest()

    def excluded(self, request_id: str) -> bool:
        """Whether none of its chunks may be stored or found any more."""
        return self._weights_changed or self._known(request_id).excluded

    def step(self, context: "ScheduleEndContext") -> None:
        """Take in what vLLM scheduled and preempted."""
        for known in self._requests.values():
            # A preempted request may have been scheduled again in this step without a word, whether
            # it was looked up or there was nothing to look up. If not, it waits for one step.
            again = known.preempted and (known.looked_up or not self._preempted_are_new)
            known.running = not known.put_off and (known.running or again)
            known.looked_up = known.put_off = False
            known.pending.clear()
        for request_id in context.preempted_req_ids:
            request = self._known(request_id)
            request.running = request.loading = False
            request.preempted = True
            request.hits.clear()
            request.scheduled = request.scheduled and not self._preempted_are_new
        for request_id in context.new_req_ids:
            request = self._known(request_id)
            request.excluded = request.excluded or request.scheduled
            request.scheduled = request.running = True

    def must_wait(self, request_id: str) -> bool:
        """Whether a request is looked up before its preemption is reported."""
        request = self._known(request_id)
        request.looked_up = True
        request.put_off = request.running
        return request.running

    def found_pending(self, key: "OffloadKey", req_context: "ReqContext") -> None:
        """A chunk is on its way to vLLM's host tier, which may evict another for it."""
        end = req_context.get_offload_key_position(key)
        if end is not None:
            self._known(req_context.req_id).pending[get_offload_group_idx(key)] = end

    def is_before_pending(self, key: "OffloadKey", req_context: "ReqContext") -> bool:
        """Whether a later chunk of the same group was found pending in this step.

        A window is looked up from its end, and a prefix from its start.
        """
        end = req_context.get_offload_key_position(key)
        pending = self._known(req_context.req_id).pending.get(get_offload_group_idx(key))
        return end is not None and pending is not None and end < pending

    def is_first_hit(self, request_id: str, key: "OffloadKey") -> bool:
        """Whether this chunk was not found for it before."""
        request = self._requests.get(request_id)
        if request is None or key in request.hits:
            return False
        request.hits.add(key)
        return True

    def loading(self, _keys: "Collection[OffloadKey]", req_context: "ReqContext") -> None:
        """What was found for it is being loaded."""
        self._known(req_context.req_id).loading = True

    def has_kv(self, request_id: str) -> bool:
        """Whether it may have KV by now: it was scheduled, or is being loaded."""
        request = self._known(request_id)
        return request.scheduled or request.loading

    def reset(self) -> None:
        """Exclude requests with KV from before the reset. Those that wait have none."""
        for request_id, request in self._requests.items():
            request.excluded = request.excluded or self.has_kv(request_id)
        self._weights_changed = False

    def weights_changed(self) -> None:
        """Exclude everything until the next reset: vLLM's own cache may have KV of old weights."""
        if not self._warned:
            self._warned = True
            logger.warning(
                "kvlake: the weights of this engine are replaced while it runs: after each change "
                "vLLM's offloading loads and stores nothing until vLLM's prefix cache is reset "
                "with reset_connector"
            )
        self._weights_changed = True


def guard_tiers(manager: Any, *, preempted_are_new: bool) -> OffloadedRequests:
    """Put `OffloadedRequests` in front of a manager of vLLM's tiers."""
    requests = OffloadedRequests(preempted_are_new=preempted_are_new)
    find, store = manager.lookup, manager.prepare_store

    def lookup(key: "OffloadKey", req_context: "ReqContext", **options: Any) -> LookupResult:
        if requests.excluded(req_context.req_id):
            return LookupResult.MISS
        if requests.must_wait(req_context.req_id):
            return LookupResult.RETRY
        found: LookupResult = find(key, req_context, **options)
        if found is LookupResult.HIT and requests.is_first_hit(req_context.req_id, key):
            # The host tier evicts what is older. Once is enough; each step would be too often.
            manager.touch((key,), req_context)
        elif found is LookupResult.HIT_PENDING:
            requests.found_pending(key, req_context)
        elif found is LookupResult.MISS and requests.is_before_pending(key, req_context):
            # vLLM would return a hit of an earlier window now, and not see that the host tier has
            # evicted a chunk of it for the one that is pending. In the next step it looks again.
            return LookupResult.RETRY
        return found

    def prepare_store(keys: "Collection[OffloadKey]", req_context: "ReqContext") -> Any:
        if requests.excluded(req_context.req_id):
            return PrepareStoreOutput([], LoadStoreSpec(), [])
        return store(keys, req_context)

    manager.lookup, manager.prepare_store = lookup, prepare_store
    call_before(manager, "on_new_request", requests.added)
    call_before(manager, "prepare_load", requests.loading)
    call_before(manager, "on_schedule_end", requests.step)
    call_before(manager, "on_request_finished", requests.finished)
    call_before(manager, "reset_cache", requests.reset)
    return requests


def call_before(of: Any, name: str, note: Callable[..., None]) -> None:
    """Have a method of one of vLLM's objects call `note` with its arguments first."""
    method = getattr(of, name)

    def noted(*args: Any, **options: Any) -> Any:
        note(*args, **options)
        return method(*args, **options)

    setattr(of, name, noted)


def region_path(engine_id: str) -> Path:
    """Where vLLM makes the memory of its host tier."""
    return Path(f"/dev/shm/vllm_offload_{engine_id}.mmap")  # noqa: S108 (vLLM's own choice)


def disown_region(region: Any) -> None:
    """Leave it to `unlink_region` to remove the region's name."""
    if region is not None:
        region._creator = False  # noqa: SLF001 (vLLM has no other word for it)


def unlink_region(engine_id: str) -> None:
    """Remove the name once all workers have mapped it: the memory then ends with them."""
    region_path(engine_id).unlink(missing_ok=True)

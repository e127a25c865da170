"""Requests whose input streams in, behind vLLM's own offloading: told apart, and left out.

Up to vLLM 0.32, vLLM's offloading notes the blocks of a request that goes on with its next input
once more, behind those that it had. So from then on what it stores of one place is the KV of
another, and whoever found that by its key would compute on the wrong cache. Nor does it forget the
name of a block of which vLLM drops the last token then. A manager of tiers is shown no requests,
but it hears which are scheduled as new, as one that goes on is.

Owns which requests went on. Does not own what is done about them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import LoadStoreSpec, LookupResult, PrepareStoreOutput

if TYPE_CHECKING:
    from collections.abc import Collection

    from vllm.v1.kv_offload.base import OffloadKey, ReqContext, ScheduleEndContext


class Streams:
    """The requests of an engine that went on with further input, until they end."""

    def __init__(self) -> None:
        self._scheduled: set[str] = set()
        self._streams: set[str] = set()

    def __contains__(self, request_id: str) -> bool:
        """Whether it went on."""
        return request_id in self._streams

    def step(self, context: ScheduleEndContext) -> None:
        """Take in what vLLM scheduled, before it stores anything of that step."""
        # What was preempted may be scheduled as new, too, and vLLM notes its blocks anew then.
        self._scheduled.difference_update(context.preempted_req_ids)
        self._streams |= self._scheduled.intersection(context.new_req_ids)
        self._scheduled.update(context.new_req_ids)

    def ended(self, request_id: str) -> None:
        """Forget a request."""
        self._scheduled.discard(request_id)
        self._streams.discard(request_id)


def leave_out_streams(manager: Any) -> None:
    """Have a manager of vLLM's tiers take and find nothing of a request from when it went on."""
    streams = Streams()
    find, prepare = manager.lookup, manager.prepare_store
    step, ended = manager.on_schedule_end, manager.on_request_finished

    def lookup(key: OffloadKey, req_context: ReqContext, **options: Any) -> LookupResult:
        if req_context.req_id in streams:
            return LookupResult.MISS
        found: LookupResult = find(key, req_context, **options)
        return found

    def prepare_store(keys: Collection[OffloadKey], req_context: ReqContext) -> Any:
        if req_context.req_id in streams:
            return PrepareStoreOutput([], LoadStoreSpec(), [])
        return prepare(keys, req_context)

    def on_schedule_end(context: ScheduleEndContext) -> None:
        streams.step(context)
        step(context)

    def on_request_finished(req_context: ReqContext, **options: Any) -> None:
        streams.ended(req_context.req_id)
        ended(req_context, **options)

    for hook in (lookup, prepare_store, on_schedule_end, on_request_finished):
        setattr(manager, hook.__name__, hook)

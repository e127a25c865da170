"""What vLLM's offloading is kept from, so that nobody is served the KV of others by it.

Up to vLLM 0.32, its scheduler's half

* notes the blocks of a request whose input streams in, when it goes on with the next input, once
  more behind those that it had: from then on what it stores of one place is the KV of another. Nor
  does it forget the name of a block of which vLLM drops the last token then;
* ends the engine where a request that a reset of vLLM's cache preempted is loaded within the same
  step.

In any release, once it was reset itself it stores what is still running anew: what was computed
with what it had to forget, and blocks of a sliding window that are somebody else's by then.

A manager of tiers is shown no requests. But it hears which are scheduled as new, as one that goes
on is, and which are preempted: before anything of that step is stored, and with vLLM 0.33, which
notes each block once, after it.

Owns what is known of requests from what a manager is told. Does not own tiers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import LoadStoreSpec, LookupResult, PrepareStoreOutput

if TYPE_CHECKING:
    from collections.abc import Collection

    from vllm.v1.kv_offload.base import OffloadKey, ReqContext, ScheduleEndContext


@dataclass(slots=True)
class _Request:
    """What a manager was told of a request."""

    scheduled: bool = False
    runs: bool = False
    """It was scheduled, and no preemption was told since."""
    asked: bool = False
    """It was looked up all the same, in the step that is not over yet."""
    left_out: bool = False


class Requests:
    """The requests of an engine that vLLM's offloading has.

    Args:
        preempted_are_new: what was preempted is scheduled as new again, as vLLM's second model
            runner has it. Where that is not known, such a request is left out like one that goes
            on: the two look alike.
    """

    def __init__(self, *, preempted_are_new: bool = False) -> None:
        self._preempted_are_new = preempted_are_new
        self._requests: dict[str, _Request] = {}

    def began(self, request_id: str) -> None:
        """Take a request in."""
        self._requests[request_id] = _Request()

    def ended(self, request_id: str) -> None:
        """Forget a request."""
        self._requests.pop(request_id, None)

    def left_out(self, request_id: str) -> bool:
        """Whether nothing of it may be stored or found any more."""
        request = self._requests.get(request_id)
        return request is not None and request.left_out

    def step(self, context: ScheduleEndContext) -> None:
        """Take in what vLLM scheduled and preempted."""
        for known in self._requests.values():
            if known.asked:
                # Told of or not, it does not run: it is not held up for longer than a step.
                known.runs = known.asked = False
        for request_id in context.preempted_req_ids:
            if (request := self._requests.get(request_id)) is not None:
                request.runs = False
                request.scheduled = request.scheduled and not self._preempted_are_new
        for request_id in context.new_req_ids:
            if (request := self._requests.get(request_id)) is not None:
                request.left_out = request.left_out or request.scheduled
                request.scheduled = request.runs = True

    def stores(self, request_id: str) -> None:
        """It has something to store, and so it runs."""
        if (request := self._requests.get(request_id)) is not None:
            request.runs = True

    def too_early(self, request_id: str) -> bool:
        """Whether it is looked up before its preemption was told of."""
        request = self._requests.get(request_id)
        if request is None or not request.runs:
            return False
        request.asked = True
        return True

    def reset(self) -> None:
        """Leave out all that there are: they go on with what they had."""
        for request in self._requests.values():
            request.left_out = True


def guard(manager: Any, *, preempted_are_new: bool) -> None:
    """Stand before a manager of vLLM's tiers."""
    requests = Requests(preempted_are_new=preempted_are_new)
    began, ended = manager.on_new_request, manager.on_request_finished
    find, prepare = manager.lookup, manager.prepare_store
    step, reset = manager.on_schedule_end, manager.reset_cache

    def on_new_request(req_context: ReqContext, **options: Any) -> Any:
        requests.began(req_context.req_id)
        return began(req_context, **options)

    def lookup(key: OffloadKey, req_context: ReqContext, **options: Any) -> LookupResult:
        if requests.left_out(req_context.req_id):
            return LookupResult.MISS
        if requests.too_early(req_context.req_id):
            return LookupResult.RETRY
        found: LookupResult = find(key, req_context, **options)
        return found

    def prepare_store(keys: Collection[OffloadKey], req_context: ReqContext) -> Any:
        requests.stores(req_context.req_id)
        if requests.left_out(req_context.req_id):
            return PrepareStoreOutput([], LoadStoreSpec(), [])
        return prepare(keys, req_context)

    def on_schedule_end(context: ScheduleEndContext) -> None:
        requests.step(context)
        step(context)

    def on_request_finished(req_context: ReqContext, **options: Any) -> None:
        requests.ended(req_context.req_id)
        ended(req_context, **options)

    def reset_cache() -> None:
        reset()
        requests.reset()

    for hook in (
        on_new_request,
        lookup,
        prepare_store,
        on_schedule_end,
        on_request_finished,
        reset_cache,
    ):
        setattr(manager, hook.__name__, hook)

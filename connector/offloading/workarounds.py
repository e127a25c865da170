"""What vLLM's offloading is kept from, so that nobody is served the KV of others by it.

Up to vLLM 0.32, its scheduler's half

* notes the blocks of a request whose input streams in, when it goes on with the next input, once
  more behind those that it had: from then on what it stores of one place is the KV of another. Nor
  does it forget the name of a block of which vLLM drops the last token then;
* ends the engine where a request that a reset of vLLM's cache preempted is loaded within the same
  step.

In any release

* once it was reset itself it stores what is still running anew: what was computed with what it had
  to forget, and blocks of a sliding window that are somebody else's by then;
* it makes room for what comes from another tier while it looks on, and may take what it has just
  found for the same request: that is then missing in turn, and so on, a step for each, or ends the
  engine where it is loaded all the same;
* it goes on with what it has of the old weights where an engine's weights are replaced.

A manager of tiers is shown no requests. But it hears which are scheduled as new, as one that goes
on is, and which are preempted: before anything of that step is stored, and with vLLM 0.33, which
notes each block once, after it.

Owns what is known of requests from what a manager is told. Does not own tiers.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import LoadStoreSpec, LookupResult, PrepareStoreOutput

if TYPE_CHECKING:
    from collections.abc import Collection

    from vllm.v1.kv_offload.base import OffloadKey, ReqContext, ScheduleEndContext

logger = logging.getLogger("vllm.kvlake")


@dataclass(slots=True)
class _Request:
    """What a manager was told of a request."""

    scheduled: bool = False
    loads: bool = False
    preempted: bool = False
    runs: bool = False
    """It was scheduled, and no preemption was told since."""
    found: bool = False
    """It was looked up in the step that is not over yet."""
    too_early: bool = False
    """And that was put off."""
    left_out: bool = False
    found_keys: set[OffloadKey] = field(default_factory=set)
    """In vLLM's host tier, since it was last preempted."""


class GuardedRequests:
    """The requests of an engine that vLLM's offloading has.

    Args:
        preempted_are_new: what was preempted is scheduled as new again, as vLLM's second model
            runner has it. Where that is not known, such a request is left out like one that goes
            on: the two look alike.
    """

    def __init__(self, *, preempted_are_new: bool = False) -> None:
        self._preempted_are_new = preempted_are_new
        self._requests: dict[str, _Request] = {}
        self._weights_changed = self._change_told = False
        """Weights were replaced, and since then nothing was reset."""

    def began(self, request_id: str) -> None:
        """Take a request in."""
        self._requests[request_id] = _Request()

    def ended(self, request_id: str) -> None:
        """Forget a request."""
        self._requests.pop(request_id, None)

    def left_out(self, request_id: str) -> bool:
        """Whether nothing of it may be stored or found any more."""
        request = self._requests.get(request_id)
        return self._weights_changed or (request is not None and request.left_out)

    def step(self, context: ScheduleEndContext) -> None:
        """Take in what vLLM scheduled and preempted."""
        for known in self._requests.values():
            # Of one that was preempted nothing may be told when it is scheduled again: it may have
            # been, in this step, whether it was looked up or there was nothing to look up. If not,
            # it is held up for one step.
            again = known.preempted and (known.found or not self._preempted_are_new)
            known.runs = not known.too_early and (known.runs or again)
            known.found = known.too_early = False
        for request_id in context.preempted_req_ids:
            if (request := self._requests.get(request_id)) is not None:
                request.runs = request.loads = False
                request.preempted = True
                request.found_keys.clear()
                request.scheduled = request.scheduled and not self._preempted_are_new
        for request_id in context.new_req_ids:
            if (request := self._requests.get(request_id)) is not None:
                request.left_out = request.left_out or request.scheduled
                request.scheduled = request.runs = True

    def too_early(self, request_id: str) -> bool:
        """Whether it is looked up before its preemption was told of."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        request.found = True
        request.too_early = request.runs
        return request.runs

    def first_found(self, request_id: str, key: OffloadKey) -> bool:
        """Whether this was not found for it before. In each step would be too often."""
        request = self._requests.get(request_id)
        if request is None or key in request.found_keys:
            return False
        request.found_keys.add(key)
        return True

    def loads(self, request_id: str) -> None:
        """What was found for it is being loaded."""
        if (request := self._requests.get(request_id)) is not None:
            request.loads = True

    def has_kv(self, request_id: str) -> bool:
        """Whether it may have KV by now: it was scheduled, or is being loaded."""
        request = self._requests.get(request_id)
        return request is not None and (request.scheduled or request.loads)

    def reset(self) -> None:
        """Leave out what goes on with KV from before. What only waits has none."""
        for request_id, request in self._requests.items():
            request.left_out = request.left_out or self.has_kv(request_id)
        self._weights_changed = False

    def weights_changed(self) -> None:
        """Weights are about to be replaced, or were. Leave out everything until the next reset.

        What a request begins with is not known here: vLLM's own cache may have it of before.
        """
        if not self._change_told:
            self._change_told = True
            logger.warning(
                "kvlake: the weights of this engine are replaced while it runs: vLLM's offloading "
                "loads and stores nothing from each change on, until vLLM's prefix cache is reset "
                "with reset_connector"
            )
        self._weights_changed = True


def guard(manager: Any, *, preempted_are_new: bool) -> GuardedRequests:
    """Stand before a manager of vLLM's tiers; what is known of its requests."""
    requests = GuardedRequests(preempted_are_new=preempted_are_new)
    began, ended = manager.on_new_request, manager.on_request_finished
    find, load, store = manager.lookup, manager.prepare_load, manager.prepare_store
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
        if found is LookupResult.HIT and requests.first_found(req_context.req_id, key):
            # Now others are older, which is what room is made of.
            manager.touch((key,), req_context)
        return found

    def prepare_load(keys: Collection[OffloadKey], req_context: ReqContext) -> Any:
        requests.loads(req_context.req_id)
        return load(keys, req_context)

    def prepare_store(keys: Collection[OffloadKey], req_context: ReqContext) -> Any:
        if requests.left_out(req_context.req_id):
            return PrepareStoreOutput([], LoadStoreSpec(), [])
        return store(keys, req_context)

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
        prepare_load,
        prepare_store,
        on_schedule_end,
        on_request_finished,
        reset_cache,
    ):
        setattr(manager, hook.__name__, hook)
    return requests

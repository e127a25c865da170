"""Defects of vLLM that kvlake works around, and the code for most of them.

An entry says what vLLM does, what is done about it here, which of the supported releases (0.31 to
0.33) have the defect, and which promise or test shows that the workaround holds. Engines that are
declined for a defect are listed in `identity/eligibility.py` instead.

Frames of callers are searched, and blocks lose their hashes, only where otherwise an ordinary
engine would serve wrong KV, fail requests or not start. Knows vLLM and nothing of the cache.

* A request that is preempted in the step that scheduled it leaves hashes of blocks that it never
  computed in the prefix cache. With priority scheduling, other requests hit them. Here:
  `UncomputedBlocks` evicts them at the end of that step. In: 0.31 to 0.33. Shown by:
  withdrawn-blocks.
* `MultiConnector` does not show its children its `kv_load_failure_policy`. With "fail", a chunk
  that is evicted between lookup and load fails the request. Here: `multi_connector_transfer` reads
  it from the frame of the constructor that makes the child, and `recomputes_failed_loads` turns
  loads off. In: 0.31 to 0.33. Shown by: test_nothing_is_loaded_where_that_would_fail_requests.
* `MultiConnector` refuses to start if its children require different KV cache layouts, and a child
  cannot tell that it is one. Here: `called_by_multi_connector` searches the callers. If it finds
  one, no layout is required. In: 0.31 to 0.33. Shown by:
  test_beside_other_connectors_no_layout_is_required.
* A worker reads the files of a LoRA adapter whenever the adapter is needed and not in memory, and
  reports it to nobody. Here: `watch_adapter_loads` wraps the one method that all loads pass. In:
  0.31 to 0.33. Shown by: adapters.
* Weights are replaced by calls through the engine core, or of a worker extension, which no
  connector is notified of. The prefix cache is not reset. Here: `watch_engine_weights` and
  `WeightChanges` wrap these calls. The model is taken from the frame of the runner that registers
  its KV caches. Writes to parameters without a call go unnoticed. In: 0.31 to 0.33. Shown by:
  weights-replaced, offloading-weights.
* With `kv_cache_report_mode: full`, a hit is published with the hashes of all blocks of its prefix,
  also of those that a group of a sliding window no longer has. Their removal is never published.
  Here: nothing, because the event does not say which these are; the reference of the events says
  so. In: 0.32; others were not examined. Shown by: test_hits_of_a_window_name_blocks_that_are_gone.

The others are of vLLM's own offloading. Their code is in `offloading/workarounds.py`, which needs
interfaces of vLLM that engines with `KVLakeConnector` do not import:

* When a request with streaming input continues, its blocks are listed a second time behind the
  first ones. What is stored from then on is KV of other tokens. Here: `OffloadedRequests.excluded`:
  of a request that is scheduled as new twice, nothing is stored. In: 0.31, 0.32. Shown by:
  streaming-input.
* The engine ends if a request that a reset preempted is loaded in the same step. Here:
  `OffloadedRequests.must_wait` postpones the lookup by a step. In: 0.31, 0.32. Shown by:
  offloading-reset.
* After a reset, KV that running requests computed from what was reset is stored. Here:
  `OffloadedRequests.reset` excludes the requests that may have KV. In: 0.31 to 0.33. Shown by:
  offloading-reset.
* To make room for a chunk from a lower tier, the host tier evicts a chunk that it has just found
  for the same request. It is then carried again and again, or its load ends the engine. Here:
  `guard_tiers` touches each chunk at its first hit, and has a window looked up again in the next
  step if a chunk behind a gap is pending. In: 0.31 to 0.33. Shown by: offloading-long-prompt.
* The file of the host tier in /dev/shm outlives an engine that is killed. Here: `disown_region` and
  `unlink_region` remove its name once all workers have mapped it. In: 0.31 to 0.33. Shown by:
  test_no_file_outlives_the_start.
"""

import logging
import sys
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from inspect import currentframe
from typing import Any, Final

from connector.identity.adapters import LoadedAdapters

logger = logging.getLogger("vllm.kvlake")

_wrappers: Final = weakref.WeakSet[Any]()
"""Functions of ours in vLLM's place."""


def _callers() -> Iterator[Mapping[str, Any]]:
    """Local variables of the functions that are running, the nearest caller first."""
    frame = currentframe()
    while frame is not None:
        yield frame.f_locals
        frame = frame.f_back


# --- blocks that were hashed and not computed --------------------------------------------------


class UncomputedBlocks:
    """How far each request was scheduled, and which blocks in vLLM's pool lie beyond that."""

    def __init__(self, block_pool: Any, num_groups: int) -> None:
        self._block_pool = block_pool
        self._num_groups = num_groups
        self._requests: dict[str, Any] = {}
        self._reached: dict[str, int] = {}

    def allocated(self, request: Any) -> None:
        """A request was given blocks; it is scheduled in this step, or after its load."""
        self._requests[request.request_id] = request

    def ended(self, request_id: str) -> None:
        """Forget a request."""
        self._requests.pop(request_id, None)
        self._reached.pop(request_id, None)

    def step(self, scheduled: Mapping[str, int], preempted: Iterable[str]) -> None:
        """Evict what `preempted` requests did not compute; others compute `scheduled` tokens."""
        for request_id in preempted:
            reached = self._reached.pop(request_id, None)
            if reached is not None:
                self._evict_from(self._requests[request_id], reached)
        for request_id, num_tokens in scheduled.items():
            request = self._requests.get(request_id)
            if request is not None:
                # vLLM hashes no block of drafts that may be rejected.
                computed = request.num_computed_tokens + num_tokens
                self._reached[request_id] = min(computed, request.num_tokens)

    def _evict_from(self, request: Any, num_tokens: int) -> None:
        """Evict all blocks with hashes of a request beyond `num_tokens`."""
        # One of two blocks with the same hash may be right; which is not known.
        pool = self._block_pool
        for block_hash in request.block_hashes[num_tokens // pool.hash_block_size :]:
            for group in range(self._num_groups):
                seen = set[int]()
                while found := pool.get_cached_block(block_hash, [group]):
                    block_id = found[0].block_id
                    if block_id in seen:
                        break
                    seen.add(block_id)
                    pool.evict_blocks({block_id})


# --- MultiConnector ----------------------------------------------------------------------------


def multi_connector_transfer() -> Any | None:
    """`kv_transfer_config` of the `MultiConnector` that makes this child; None without one."""
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    for variables in _callers():
        config = variables.get("vllm_config")
        if isinstance(variables.get("self"), MultiConnector) and config is not None:
            return config.kv_transfer_config
    return None


def called_by_multi_connector() -> bool:
    """Whether a class method is being called by one of `MultiConnector`, for its children."""
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    owners = (variables.get("cls") for variables in _callers())
    return any(isinstance(owner, type) and issubclass(owner, MultiConnector) for owner in owners)


def recomputes_failed_loads(transfer: Any, outer: Any | None) -> bool:
    """Whether vLLM computes what could not be loaded. A connector without `outer` is set to."""
    if outer is None:
        if transfer.kv_load_failure_policy != "recompute":
            # vLLM reads this after it made the connector.
            logger.info("kvlake: kv_load_failure_policy is set to 'recompute'")
            transfer.kv_load_failure_policy = "recompute"
        return True
    if outer.kv_load_failure_policy == "recompute":
        return True
    logger.warning(
        "kvlake: chunks are stored but not loaded, because kv_load_failure_policy=%r of the "
        "MultiConnector would fail a request whose chunk is evicted while it is loaded; set "
        '"kv_load_failure_policy": "recompute" on the MultiConnector itself',
        outer.kv_load_failure_policy,
    )
    return False


# --- LoRA adapters -----------------------------------------------------------------------------

_adapter_listeners: Final = weakref.WeakSet[Any]()


def watch_adapter_loads(adapters: LoadedAdapters) -> None:
    """Tell `adapters` what vLLM loads in this process from now on."""
    # Not at import: vLLM imports the connector in processes that have no adapters.
    from vllm.lora.worker_manager import WorkerLoRAManager

    @contextmanager
    def loading(listener: LoadedAdapters, _manager: Any, lora: Any) -> Generator[None, None, None]:
        before = listener.begin(lora)
        yield
        listener.note(lora, before)

    _adapter_listeners.add(adapters)
    # The one method that all loads pass.
    _wrap(WorkerLoRAManager, "_load_adapter", _adapter_listeners, loading)


# --- weights that are replaced at run time -----------------------------------------------------

WEIGHT_CALLS: Final = (
    "reload_weights",
    "start_weight_update",
    "start_draft_weight_update",
    "update_weights",
    "finish_weight_update",
    "reset_weights",
)
"""Methods of vLLM's worker that replace weights, in the releases that have them."""
_engine_listeners: Final = weakref.WeakSet[Any]()
_worker_listeners: Final = weakref.WeakSet[Any]()


class WeightChanges:
    """Changes of one worker's weights, and whether the scheduler knows of them.

    Each plan says how many changes the scheduler knew of when it was made. Plans and the engine
    core's calls reach a worker in the order in which they were made. So if the plan after a change
    says no more than the last one before it, the scheduler did not notice the change.
    """

    def __init__(self) -> None:
        self._known = 0
        self._changed = self._reported = False

    def watch(self) -> None:
        """Notice calls in this process, and those to the model of the runner that calls this."""
        _worker_listeners.add(self)
        # A process that has not imported it runs none.
        if module := sys.modules.get("vllm.v1.worker.gpu_worker"):
            for name in WEIGHT_CALLS:
                _wrap(module.Worker, name, _worker_listeners)
        runner = next(filter(_is_runner, (one.get("self") for one in _callers())), None)
        if runner is None:
            return
        _wrap(runner, "reload_weights", _worker_listeners)
        drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
        for model in (runner.get_model(), getattr(drafter, "model", None)):
            if model is not None:
                _wrap(model, "load_weights", _worker_listeners)

    def weights_changed(self) -> None:
        """Weights of this worker are about to be replaced, or were."""
        self._changed, self._reported = True, False

    def unknown_to(self, known: int) -> bool:
        """Whether a plan was made without knowing of a change, by how many were known to it."""
        self._changed = self._changed and known == self._known
        self._known = known
        return self._changed

    def take(self) -> bool:
        """Whether a change is to be reported to the scheduler; once for each change."""
        reported, self._reported = self._reported, self._changed
        return self._changed and not reported


def watch_engine_weights(listener: Any) -> None:
    """Call `listener.weights_changed` around calls to the engine core that replace weights."""
    _engine_listeners.add(listener)
    # A process that has not imported it runs none.
    if module := sys.modules.get("vllm.v1.engine.core"):
        core = module.EngineCore
        _wrap(core, "set_weight_version", _engine_listeners)
        _wrap(core, "collective_rpc", _engine_listeners, _calling)


def unwatch_weights(listener: Any) -> None:
    """Tell a listener no more; may be repeated."""
    _engine_listeners.discard(listener)
    _worker_listeners.discard(listener)


@contextmanager
def _changing(listener: Any, *_args: Any, **_kwargs: Any) -> Generator[None, None, None]:
    """Tells it before a call, and after it however it ended: it may have changed a part."""
    listener.weights_changed()
    try:
        yield
    finally:
        listener.weights_changed()


def _calling(
    listener: Any, _core: Any, method: Any, *_args: Any, **_kwargs: Any
) -> AbstractContextManager[None]:
    return _changing(listener) if method in WEIGHT_CALLS else nullcontext()


def _wrap(
    owner: Any,
    name: str,
    listeners: weakref.WeakSet[Any],
    around: Callable[..., AbstractContextManager[None]] = _changing,
) -> None:
    """Put calls of a method, if there is one, in `around` of each listener and their arguments."""
    call = getattr(owner, name, None)
    if call is None or call in _wrappers:
        return

    @wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for listener in list(listeners):
                stack.enter_context(around(listener, *args, **kwargs))
            return call(*args, **kwargs)

    _wrappers.add(wrapped)
    setattr(owner, name, wrapped)


def _is_runner(caller: Any) -> bool:
    """Whether a caller is the model runner, which no connector is shown."""
    return hasattr(caller, "get_model") and hasattr(caller, "reload_weights")

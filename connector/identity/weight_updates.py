"""Weights that are replaced while an engine runs: a workaround, for vLLM tells no connector of it.

vLLM 0.31 to 0.33 replace weights on the workers, by calls that come through the engine core
(`reload_weights`, `update_weights` and those around it, `set_weight_version`), or by calls that go
round it: of an extension of the worker's class that calls the model's `load_weights`, or of a
program that drives the workers itself. vLLM's own prefix cache is not reset by any of them.

So the engine core's calls are noticed before and after they run, in the process of the scheduler.
Workers notice each call too, and say so where the scheduler does not know of it. What writes to
parameters without any of these calls is not noticed.

Owns the noticing. What follows from it is decided by who asked for it.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

CALLS: Final = (
    "reload_weights",
    "start_weight_update",
    "start_draft_weight_update",
    "update_weights",
    "finish_weight_update",
    "reset_weights",
)
"""Methods of vLLM's worker, so far as a release has them."""


class Noticing(Protocol):
    """Who is to know."""

    def weights_changed(self) -> None:
        """Weights are about to be replaced, or were."""


_engines: weakref.WeakSet[Any] = weakref.WeakSet()
_workers: weakref.WeakSet[Any] = weakref.WeakSet()
_wrappers: weakref.WeakSet[Any] = weakref.WeakSet()
"""Functions of ours in vLLM's place."""


class WeightChanges:
    """Changes of one worker's weights, and whether the scheduler knows of them.

    Each plan says how many changes the scheduler knew of when it was made. Plans reach a worker in
    the order in which they are made, and so do the calls between them. So where the next plan says
    no more than the last one before a change, the scheduler did not notice it.
    """

    def __init__(self) -> None:
        self._known = 0
        """Changes that the scheduler knew of with the last plan."""
        self._changed = self._told = False

    def watch(self) -> None:
        """Notice calls in this process, and those to the model of whoever is calling this."""
        _workers.add(self)
        # A process that has not imported it runs none.
        if module := sys.modules.get("vllm.v1.worker.gpu_worker"):
            for name in CALLS:
                _wrap(module.Worker, name, _workers)
        runner = _calling_runner()
        if runner is None:
            return
        _wrap(runner, "reload_weights", _workers)
        drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
        for model in (runner.get_model(), getattr(drafter, "model", None)):
            if model is not None:
                _wrap(model, "load_weights", _workers)

    def weights_changed(self) -> None:
        """Weights of this worker are about to be replaced, or were."""
        self._changed, self._told = True, False

    def unknown_to(self, known: int) -> bool:
        """Whether a plan was made without knowing of a change, by how many were known to it."""
        self._changed = self._changed and known == self._known
        self._known = known
        return self._changed

    def take(self) -> bool:
        """Whether the scheduler is to be told of a change; once of each."""
        told, self._told = self._told, self._changed
        return self._changed and not told


def watch_engine(who: Noticing) -> None:
    """Have somebody notice calls to the engine core of this process."""
    _engines.add(who)
    # A process that has not imported it runs none.
    module = sys.modules.get("vllm.v1.engine.core")
    if module is None:
        return
    core = module.EngineCore
    _wrap(core, "set_weight_version", _engines)
    call = core.collective_rpc
    if call in _wrappers:
        return

    @wraps(call)
    def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        def run() -> Any:
            return call(self, method, *args, **kwargs)

        return _around(run, _engines) if method in CALLS else run()

    _wrappers.add(collective_rpc)
    core.collective_rpc = collective_rpc


def unwatch(who: Noticing) -> None:
    """Have somebody notice no more; again is harmless."""
    _engines.discard(who)
    _workers.discard(who)


def _wrap(owner: Any, name: str, who: weakref.WeakSet[Any]) -> None:
    call = getattr(owner, name, None)
    if call is None or call in _wrappers:
        return

    @wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return _around(lambda: call(*args, **kwargs), who)

    _wrappers.add(wrapped)
    setattr(owner, name, wrapped)


def _around(run: Callable[[], Any], who: weakref.WeakSet[Any]) -> Any:
    """Run a call, noticed before, and after however it ended: it may have replaced some weights."""
    for one in list(who):
        one.weights_changed()
    try:
        return run()
    finally:
        for one in list(who):
            one.weights_changed()


def _calling_runner() -> Any | None:
    """The model runner that registers its KV caches now, which no connector is shown."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if hasattr(caller, "get_model") and hasattr(caller, "reload_weights"):
            return caller
        frame = frame.f_back
    return None

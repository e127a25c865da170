"""Weights that are replaced while an engine runs: KV of the old ones is never used with the new."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.gpu_worker import Worker

from connector.plan import StepReport
from connector.vllm_workarounds import WEIGHT_CALLS, WeightChanges
from tests.connector.configurations import request_of
from tests.connector.engine import Engine
from tests.connector.prompts import CACHED, PROMPT, chain_of
from tests.connector.test_speculative import NGRAM

pytestmark = pytest.mark.promise("weights-replaced")
OTHER = [number + 1 for number in PROMPT]


def core_of(engine: Engine, replace: Callable[[], None]) -> Any:
    """vLLM's engine core, with workers that are calls of ours."""
    core: Any = object.__new__(EngineCore)
    core.scheduler = engine.scheduler
    core.model_executor = SimpleNamespace(collective_rpc=lambda *_: replace())
    return core


class Runner:
    """A model runner, as far as a worker's connector comes to see it."""

    def __init__(self, load: Callable[[], None]) -> None:
        self.model = SimpleNamespace(load_weights=load)
        self.drafter = SimpleNamespace(model=SimpleNamespace(load_weights=load))

    def get_model(self) -> Any:
        return self.model

    def reload_weights(self) -> None:
        self.model.load_weights()

    def register(self, engine: Engine) -> None:
        """As it registers its KV caches with the connectors of all ranks."""
        for rank in engine.ranks:
            rank.connector._weights.watch()  # noqa: SLF001 (its public names are vLLM's)


@pytest.fixture(params=["one rank", "two ranks", "a drafter"])
def engine(make: Callable[..., Engine], request: pytest.FixtureRequest) -> Engine:
    if request.param == "a drafter":
        return make(draft=lambda _: list[int](), speculative=NGRAM)
    return make(ranks=2 if request.param == "two ranks" else 1)


def stored_keys(engine: Engine) -> set[bytes]:
    return set(engine.sidecar.parts)


def replaced(engine: Engine) -> Callable[[], None]:
    def replace() -> None:
        engine.weights += 1

    return replace


def cached(engine: Engine, name: str, prompt: list[int] = PROMPT) -> int:
    """Tokens of a request that were not computed. What is read must be of the weights of now."""
    engine.run(request_of(name, prompt, max_tokens=1))
    engine.check_idle()
    return len(prompt) - engine.computed[name]


@pytest.mark.parametrize("method", WEIGHT_CALLS)
def test_calls_through_the_engine_core(
    engine: Engine, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    assert cached(engine, "before") == 0
    core = core_of(engine, replaced(engine))
    core.collective_rpc(method)
    engine.forget()
    assert cached(engine, "after") == 0
    # What is stored now is found by this engine, and under no name of the namespace.
    engine.forget()
    assert cached(engine, "again") == CACHED
    before = stored_keys(engine)
    assert cached(engine, "other", OTHER) == 0
    assert not (stored_keys(engine) - before) & {*chain_of(engine, OTHER).keys}
    assert stored_keys(engine) - before
    core.collective_rpc(method)
    engine.forget()
    assert cached(engine, "third") == 0
    assert caplog.text.count("finds only what it stored since the last change") == 1


def test_set_weight_version(engine: Engine) -> None:
    """For programs that replace weights in a way that is not noticed."""
    assert cached(engine, "before") == 0
    replaced(engine)()
    core_of(engine, lambda: None).set_weight_version("2")
    engine.forget()
    assert cached(engine, "after") == 0


def test_other_calls_change_nothing(engine: Engine) -> None:
    assert cached(engine, "before") == 0
    core = core_of(engine, lambda: None)
    core.collective_rpc("execute_dummy_batch")
    core.collective_rpc(print)
    engine.forget()
    assert cached(engine, "after") == CACHED


def test_a_failed_call_may_have_replaced_a_part(engine: Engine) -> None:
    assert cached(engine, "before") == 0

    def fail() -> None:
        engine.weights += 1
        raise ValueError("no such file")

    with pytest.raises(ValueError, match="no such file"):
        core_of(engine, fail).collective_rpc("reload_weights")
    engine.forget()
    assert cached(engine, "after") == 0


def test_requests_that_run_are_not_stored(engine: Engine) -> None:
    running = engine.add(request_of("running", PROMPT, max_tokens=60))
    for _ in range(3):
        engine.step()
    engine.sidecar.run_all()
    stored = stored_keys(engine)
    # The same weights, so that the model of the test goes on with its KV.
    core_of(engine, lambda: None).collective_rpc("update_weights")
    engine.finish(running)
    engine.settle()
    assert stored_keys(engine) == stored
    # Nor what begins with what they left in vLLM's own cache, which was not reset.
    assert cached(engine, "next", [*PROMPT, *OTHER])
    assert stored_keys(engine) == stored
    engine.forget()
    assert cached(engine, "after", OTHER) == 0
    assert stored_keys(engine) > stored


@pytest.mark.parametrize("way", ["model", "drafter", "runner"])
def test_calls_that_bypass_the_engine_core(engine: Engine, way: str) -> None:
    """The next step's loads and stores were planned for the old weights."""
    runner = Runner(replaced(engine))
    runner.register(engine)
    assert cached(engine, "before") == 0
    if way == "runner":
        runner.reload_weights()
    else:
        (runner.model if way == "model" else runner.drafter.model).load_weights()
    engine.forget()
    stored = stored_keys(engine)
    assert cached(engine, "after") == 0
    assert stored_keys(engine) == stored
    engine.forget()
    assert cached(engine, "later") == 0
    engine.forget()
    assert cached(engine, "again") == CACHED


def test_calls_of_the_engine_core_void_nothing_planned_after_them(engine: Engine) -> None:
    """Workers notice them too, and the scheduler knew before."""
    runner = Runner(replaced(engine))
    runner.register(engine)
    assert cached(engine, "before") == 0
    core_of(engine, runner.reload_weights).collective_rpc("reload_weights")
    engine.forget()
    assert cached(engine, "after") == 0
    engine.forget()
    assert cached(engine, "again") == CACHED


def test_calls_of_vllms_worker_are_noticed() -> None:
    """Also if a program drives the workers itself."""
    changes = WeightChanges()
    changes.watch()
    changes.watch()
    heard: list[str] = []
    for name in WEIGHT_CALLS:
        if not hasattr(Worker, name):
            continue
        worker: Any = object.__new__(Worker)
        with pytest.raises(AttributeError):
            # It has no model; it is noticed all the same.
            getattr(worker, name)(*([{}] if name == "update_weights" else []))
        assert changes.unknown_to(0)
        assert changes.take()
        assert not changes.take()
        assert not changes.unknown_to(1)
        assert not changes.take()
        changes.unknown_to(0)
        heard.append(name)
    assert {"reload_weights", "start_weight_update", "update_weights"} <= {*heard}


def test_a_report_of_weights_is_not_empty() -> None:
    one = StepReport(weights_changed=True)
    assert not one.empty
    assert one.add(StepReport()).weights_changed
    assert StepReport().add(one).weights_changed

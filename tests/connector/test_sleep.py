"""Sleep mode in a worker: detaches once, and attaches again with the memory that came back."""

from __future__ import annotations

import logging

import pytest

from connector.export import ExportedMemory, ExportRefused
from connector.plan import StepPlan
from sidecar.protocol import Outcome
from tests.connector.test_worker import Rank, load, store


class Sleeper(Rank):
    """A rank whose memory goes and comes back; `exports` says how often it was shared."""

    def __init__(self) -> None:
        self.exports = 0
        self.fault: Exception | None = None
        super().__init__()

    def export(self) -> ExportedMemory:
        self.exports += 1
        if self.fault is not None:
            raise self.fault
        return super().export()


def test_jobs_end_before_sleep_and_steps_are_counted_on_after_it() -> None:
    rank = Sleeper()
    rank.role.submit(StepPlan(loads=[load(1, "one")], stores=[store(2)]))
    rank.role.unregister()
    results = rank.role.collect()
    assert results.failed == {"one"}
    assert results.report.ended == {2: 1}
    assert rank.memory.fd < 0
    assert rank.void(1), "however late the sidecar looks at it"
    rank.role.submit(StepPlan(loads=[load(3, "three")]))
    assert rank.role.collect().failed == {"three"}
    rank.role.restore()
    rank.attach()
    rank.role.submit(StepPlan(stores=[store(4)]))
    assert rank.fence.reached(2)
    rank.answer((4, Outcome.OK))
    assert rank.role.collect().report.ended == {4: 1}
    rank.close()


def test_both_calls_may_be_repeated() -> None:
    rank = Sleeper()
    rank.role.restore()
    rank.role.unregister()
    rank.role.unregister()
    rank.role.restore()
    rank.role.restore()
    assert rank.exports == 2, "at the start, and after sleep"
    rank.close()


def test_a_sidecar_that_keeps_the_memory_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    rank = Sleeper()
    rank.client.releases = False
    with caplog.at_level(logging.WARNING, "vllm.kvlake"):
        rank.role.unregister()
    assert "did not release" in caplog.text
    rank.close()


def test_a_rank_of_an_engine_that_retired_does_not_come_back() -> None:
    rank = Sleeper()
    rank.role.submit(StepPlan(retired=True))
    rank.role.unregister()
    rank.role.restore()
    assert rank.exports == 1
    assert rank.client.closed
    rank.close()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ExportRefused("it is in pieces"), "it is in pieces; restart the engine"),
        (OSError(24, "Too many open files"), "cannot be shared: [Errno 24] Too many open files;"),
        (KeyError("layer.0"), "vLLM registered no cache of layer 'layer.0'; restart"),
    ],
)
def test_memory_that_cannot_be_shared_again_is_reported_to_the_scheduler(
    error: Exception, told: str
) -> None:
    rank = Sleeper()
    rank.fault = error
    rank.role.unregister()
    rank.role.restore()
    rank.role.submit(StepPlan(loads=[load(1, "one")]))
    results = rank.role.collect()
    assert results.failed == {"one"}
    assert told in results.report.refusal
    assert rank.role.refusal == results.report.refusal
    assert rank.role.collect().report.empty, "told once"
    # The others have left for good, so there is nothing to come back to.
    rank.role.unregister()
    rank.role.restore()
    assert rank.exports == 2
    rank.close()

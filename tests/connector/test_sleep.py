"""Sleep mode in a worker: detaches once, and attaches again with the memory that came back."""

from __future__ import annotations

import logging
import os

import pytest

from connector.export import ExportedMemory, ExportRefused
from connector.plan import StepPlan
from connector.worker import SleepMode
from sidecar.protocol import Outcome
from tests.connector.test_worker import LAYOUT, Rank, load, store


def exported() -> ExportedMemory:
    return ExportedMemory(os.memfd_create("kv"), 4096, LAYOUT)


def test_jobs_end_before_sleep_and_steps_are_counted_on_after_it() -> None:
    rank = Rank()
    rank.role.submit(StepPlan(loads=[load(1, "one")], stores=[store(2)]))
    sleep_mode = SleepMode(rank.role, exported)
    sleep_mode.unregister()
    results = rank.role.collect()
    assert results.failed == {"one"}
    assert results.report.ended == {2: 1}
    assert rank.memory.fd < 0
    assert rank.void(1), "however late the sidecar looks at it"
    rank.role.submit(StepPlan(loads=[load(3, "three")]))
    assert rank.role.collect().failed == {"three"}
    sleep_mode.restore()
    rank.attach()
    rank.role.submit(StepPlan(stores=[store(4)]))
    assert rank.fence.reached(2)
    rank.answer((4, Outcome.OK))
    assert rank.role.collect().report.ended == {4: 1}
    rank.close()


def test_both_calls_may_be_repeated() -> None:
    rank = Rank()
    given: list[ExportedMemory] = []

    def share() -> ExportedMemory:
        given.append(exported())
        return given[-1]

    sleep_mode = SleepMode(rank.role, share)
    sleep_mode.restore()
    sleep_mode.unregister()
    sleep_mode.unregister()
    sleep_mode.restore()
    sleep_mode.restore()
    assert len(given) == 1
    rank.close()


def test_a_sidecar_that_keeps_the_memory_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    rank = Rank()
    rank.client.releases = False
    with caplog.at_level(logging.WARNING, "vllm.kvlake"):
        SleepMode(rank.role, exported).unregister()
    assert "did not release" in caplog.text
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
    rank = Rank()
    given: list[int] = []

    def share() -> ExportedMemory:
        given.append(1)
        raise error

    sleep_mode = SleepMode(rank.role, share)
    sleep_mode.unregister()
    sleep_mode.restore()
    rank.role.submit(StepPlan(loads=[load(1, "one")]))
    results = rank.role.collect()
    assert results.failed == {"one"}
    assert told in results.report.refusal
    assert sleep_mode.failure == results.report.refusal
    assert rank.role.collect().report.empty, "told once"
    # The others have left for good, so there is nothing to come back to.
    sleep_mode.unregister()
    sleep_mode.restore()
    assert len(given) == 1
    rank.close()

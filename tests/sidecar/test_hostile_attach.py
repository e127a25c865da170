"""Attach messages whose fields contradict each other: refused in words, and the sidecar lives on.

Each of those that are named here ended the sidecar once, and its host memory with it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sidecar.protocol import Attach, Group, Memory, Outcome, Role
from sidecar.sessions.namespaces import Realms
from tests import places
from tests.mappings import open_fds
from tests.sidecar.client import (
    BLOCK_TOKENS,
    BLOCKS_PER_CHUNK,
    NAMESPACE,
    WAIT_SECONDS_MAX,
    Client,
    RefusedError,
    RunningSidecar,
    Scheduler,
    Worker,
    attach_message,
    key_of,
    layout_of,
)
from tiers.kv.fence import PAGE_BYTES
from tiers.kv.index import FLAG_HOST
from tiers.kv.layout import KVLayout, Segment
from tiers.kv.memfd import sealed_memfd

LAYOUT = layout_of()
UNCHUNKED: dict[str, Any] = {"block_tokens": 2, "blocks_per_chunk": 65_536}
"""Fields that a layout of this file's makes no chunk with, each of which may have its value."""


def serves(sidecar: RunningSidecar) -> None:
    with (
        Worker(sidecar.path, engine_id="honest") as worker,
        Scheduler(sidecar.path, engine_id="honest") as scheduler,
    ):
        content = worker.fill([0], seed=1)
        assert worker.store(1, key_of("honest"), [0]) is Outcome.OK
        assert scheduler.flags(key_of("honest")) == [FLAG_HOST]
        worker.poison()
        assert worker.load(2, key_of("honest"), [1]) is Outcome.OK
        assert worker.read(1) == content[0]


def refused(call: Callable[[], Client]) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        call()
    return caught.value


def group_of(layout: KVLayout | None = None, **changes: Any) -> Group:
    """Another group with the first one's identity."""
    segment = None if layout is None else layout.segment
    group = Group(NAMESPACE, BLOCK_TOKENS, BLOCKS_PER_CHUNK, segment, layout)
    return msgspec.structs.replace(group, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"memory": Memory("x", 1)}, "memory"),
        ({"memory": Memory("memfd", LAYOUT.size_bytes)}, "memory"),
        ({"layout": LAYOUT, **UNCHUNKED}, "layout"),
        ({"layout": LAYOUT}, "layout"),
        ({"segment": LAYOUT.segment}, "segment"),
        ({"groups": (group_of(LAYOUT, namespace=b"{}"),)}, "segment, layout"),
    ],
    ids=["kind", "memory", "unchunked", "layout", "segment", "group"],
)
def test_a_scheduler_gives_nothing_of_a_workers(
    sidecar: RunningSidecar, changes: dict[str, Any], words: str
) -> None:
    message = msgspec.structs.replace(attach_message(Role.SCHEDULER), **changes)
    error = refused(lambda: Client(sidecar.path, message))
    assert (error.code, f"a scheduler gave {words}:" in error.message) == ("field", True), error
    assert sidecar.status()["realms"] == []
    serves(sidecar)


@pytest.mark.parametrize(
    "other",
    [LAYOUT, msgspec.structs.replace(LAYOUT, dtype="bfloat16")],
    ids=["equal", "different"],
)
def test_groups_of_one_identity_are_refused(sidecar: RunningSidecar, other: KVLayout) -> None:
    """Where their layouts were equal, too, one group's chunks were copied through the other."""
    apart = group_of(LAYOUT, namespace=b'{"group":1}')
    error = refused(lambda: Worker(sidecar.path, groups=(apart, group_of(other))))
    assert (error.code, "groups 0 and 2" in error.message) == ("field", True), error
    error = refused(lambda: Scheduler(sidecar.path, groups=(group_of(),)))
    assert (error.code, "groups 0 and 1" in error.message) == ("field", True), error
    assert sidecar.status()["realms"] == []
    serves(sidecar)


def test_realms_may_be_forgotten_twice() -> None:
    known = Realms()
    message = attach_message(Role.SCHEDULER)
    joined = known.join(message.parts)
    known.forget([*joined, *joined])
    known.forget(joined)
    assert known.find(message.parts) == (None,)


def test_an_index_that_cannot_be_had_is_told(
    sidecar: RunningSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client saw its connection end, and nobody was told why."""
    places.patch(monkeypatch, "INDEX_ENTRIES_FIRST", 1 << 16)
    serves(sidecar)
    before = open_fds()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Enough for a worker's memory, and not for an index.
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * LAYOUT.size_bytes, limits[1]))
    try:
        for make in (Worker, Scheduler):
            error = refused(lambda: make(sidecar.path, topology="other"))  # noqa: B023 (called at once)
            assert (error.code, "File too large" in error.message) == ("resources", True), error
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(sidecar.status()["realms"]) == 1
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    # Both ends of a connection are here, and the sidecar closes its own when it comes to it.
    while open_fds() > before + 2:
        assert time.monotonic() < deadline, "a descriptor was kept"
        time.sleep(0.01)
    serves(sidecar)


@pytest.mark.parametrize("raised", [KeyError("x"), ValueError("y"), OverflowError("z")])
def test_a_bug_in_a_check_is_one_clients_end(
    sidecar: RunningSidecar,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    raised: Exception,
) -> None:
    def fails(*_: object) -> None:
        raise raised

    serves(sidecar)
    places.patch(monkeypatch, "check_shape", fails)
    assert refused(lambda: Scheduler(sidecar.path)).code == "internal"
    monkeypatch.undo()
    places.patch(monkeypatch, "RealmLayout.register", fails)
    error = refused(lambda: Worker(sidecar.path, topology="other"))
    assert (error.code, type(raised).__name__ in error.message) == ("internal", True), error
    monkeypatch.undo()
    assert len(sidecar.status()["realms"]) == 1, "a refused client's realm was kept"
    assert len([one for one in caplog.records if one.exc_info]) == 2
    serves(sidecar)


# --- every combination ---------------------------------------------------------------------------

LAYOUTS = (
    None,
    LAYOUT,
    msgspec.structs.replace(LAYOUT, dtype="bfloat16"),
    msgspec.structs.replace(LAYOUT, block_tokens=2),
)
SEGMENTS = (None, LAYOUT.segment, Segment(0, 1, 0, 1))
MEMORIES = (
    None,
    Memory("memfd", LAYOUT.size_bytes),
    Memory("memfd", 1),
    Memory("x", 1),
    Memory("cuda_ipc", LAYOUT.size_bytes, bytes(16), bytes(64)),
    Memory("cuda_vmm", LAYOUT.size_bytes, bytes(16)),
)
SIZES = {
    "block_tokens": st.sampled_from((BLOCK_TOKENS, 2)),
    "blocks_per_chunk": st.sampled_from((BLOCKS_PER_CHUNK, 65_536)),
}
GROUPS = st.builds(
    Group,
    namespace=st.sampled_from((NAMESPACE, b'{"group":1}', b"[]")),
    segment=st.sampled_from(SEGMENTS),
    layout=st.sampled_from(LAYOUTS),
    **SIZES,
)
MESSAGES = st.builds(
    lambda role, **changes: attach_message(role, engine_id="any", topology="any", **changes),
    role=st.sampled_from(Role),
    segment=st.sampled_from(SEGMENTS),
    layout=st.sampled_from(LAYOUTS),
    memory=st.sampled_from(MEMORIES),
    groups=st.lists(GROUPS, max_size=2).map(tuple),
    want_events=st.booleans(),
    world_size=st.sampled_from((1, 2)),
    replicas=st.sampled_from((1, 2)),
    events_endpoint=st.sampled_from(("", "ipc:///nobody")),
    **SIZES,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(message=MESSAGES, sends=st.booleans())
def test_whatever_an_attach_holds_it_is_answered(
    sidecar: RunningSidecar, message: Attach, sends: bool
) -> None:
    fds: list[int] = []
    if sends:
        fds.append(sealed_memfd("fence", PAGE_BYTES))
        if message.memory is not None and message.memory.kind != "cuda_ipc":
            fds.insert(0, sealed_memfd("kv", LAYOUT.size_bytes))
    try:
        # `EOFError` where the sidecar ended, or hung up without a word.
        with contextlib.suppress(RefusedError):
            Client(sidecar.path, message, fds).close()
    finally:
        for fd in fds:
            os.close(fd)
    serves(sidecar)

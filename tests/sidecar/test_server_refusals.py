"""Clients that a real sidecar refuses: in words, and without a trace."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sidecar import protocol
from sidecar.protocol import Outcome
from tests.mappings import open_fds
from tests.sidecar.client import (
    BLOCK_TOKENS,
    Client,
    RefusedError,
    RunningSidecar,
    Scheduler,
    Worker,
    config_in,
    key_of,
    layout_of,
)
from tiers.kv.layout import KVLayout, Segment
from tiers.kv.memfd import sealed_memfd


def refused(call: Callable[[], Client]) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        call()
    return caught.value


def test_another_version_is_refused_by_name(sidecar: RunningSidecar) -> None:
    message = msgspec.msgpack.encode({"type": "attach", "version": 99, "future": True})
    error = refused(lambda: Client(sidecar.path, message))
    assert error.code == "version"
    assert "99" in error.message
    assert "same kvlake release" in error.message


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"segment": Segment(0, 1, 0, 1)}, "layout", "0-1.0-1"),
        ({"block_tokens": BLOCK_TOKENS * 2}, "layout", "block_tokens=32"),
        ({"memory": protocol.Memory("memfd", 4096)}, "layout", "memory.size_bytes=4096"),
        ({"memory": protocol.Memory("rocm_ipc", 4096)}, "memory_kind", "cuda_vmm"),
        ({"namespace": b"[1]"}, "namespace", "object"),
        ({"namespace": b"{"}, "namespace", "not JSON"),
        ({"namespace": b'{"a":' * 16 + b"{}" + b"}" * 16}, "namespace", "nested more than 16"),
        ({"rank": 3}, "field", "rank=3"),
        ({"blocks_per_chunk": 4096}, "pool", "host.size"),
        ({"blocks_per_chunk": 65536}, "layout", "blocks_per_chunk * block_tokens=1048576"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(
    sidecar: RunningSidecar, changes: dict[str, Any], code: str, words: str
) -> None:
    error = refused(lambda: Worker(sidecar.path, layout=layout_of(), **changes))
    assert (error.code, words in error.message) == (code, True), error
    assert sidecar.status()["sockets"]["attaches_refused"] == {code: 1}
    with Worker(sidecar.path) as worker:
        assert worker.store(1, key_of("fine"), [0]) is Outcome.OK


@pytest.mark.parametrize(
    ("content_bytes", "block_tokens", "blocks_per_chunk", "words"),
    [
        # Each of them ended the sidecar once: fuzzing found them.
        (1 << 20, 16, 4096, "over the 2147483647 that Arrow can hold"),
        (1, 1, 4, "block_payload_bytes=1"),
    ],
)
def test_a_geometry_that_has_no_image_is_refused(
    sidecar: RunningSidecar,
    content_bytes: int,
    block_tokens: int,
    blocks_per_chunk: int,
    words: str,
) -> None:
    layout = KVLayout(
        Segment(0, 1, 0, 1), 1, block_tokens, content_bytes, "uint8", "plain", 1 << 25, (0,), 0, 0,
        content_bytes,
    )  # fmt: skip
    changes = {"block_tokens": block_tokens, "blocks_per_chunk": blocks_per_chunk}
    error = refused(lambda: Worker(sidecar.path, layout=layout, **changes))
    assert (error.code, words in error.message) == ("layout", True), error
    with Worker(sidecar.path) as worker:
        assert worker.store(1, key_of("fine"), [0]) is Outcome.OK


def test_refused_clients_use_up_no_realm(sidecar: RunningSidecar) -> None:
    # Each of the 300 used to leave a realm behind, of which there are 256 at most.
    before = open_fds()
    for number in range(300):
        topology = f"other-{number}"
        error = refused(lambda: Worker(sidecar.path, topology=topology, blocks_per_chunk=4096))  # noqa: B023 (called at once)
        assert error.code == "pool"
    assert open_fds() <= before + 2, "a refused client's index was kept"
    with Worker(sidecar.path, topology="the last") as worker:
        assert worker.store(1, key_of("fine"), [0]) is Outcome.OK


def test_memory_smaller_than_its_layout_is_refused(sidecar: RunningSidecar) -> None:
    small = os.memfd_create("small")
    os.ftruncate(small, 4096)
    fence = sealed_memfd("fence", 4096)
    try:
        error = refused(lambda: Worker(sidecar.path, fds=(small, fence)))
        assert error.code == "memory"
        assert "4096 bytes" in error.message
    finally:
        for fd in (small, fence):
            os.close(fd)


def test_layout_of_a_rank_is_fixed(sidecar: RunningSidecar) -> None:
    with Worker(sidecar.path):
        pass
    other = msgspec.structs.replace(layout_of(), dtype="bfloat16")
    error = refused(lambda: Worker(sidecar.path, layout=other))
    assert error.code == "layout"
    with Worker(sidecar.path, num_blocks=32) as worker:
        assert worker.store(1, key_of("smaller cache"), [0]) is Outcome.OK


def test_ranks_of_one_engine_must_agree(sidecar: RunningSidecar) -> None:
    with Worker(sidecar.path, world_size=2, topology="tp2"):
        error = refused(lambda: Worker(sidecar.path, rank=1, world_size=2, topology="other"))
        assert error.code == "engine"
        assert "topology='tp2'" in error.message


@pytest.mark.promise("session-limit")
def test_sessions_are_bounded(short_directory: Path) -> None:
    config = config_in(short_directory, limits={"sessions_max": 1})
    with RunningSidecar(config) as sidecar, Worker(sidecar.path):
        error = refused(lambda: Scheduler(sidecar.path))
        assert error.code == "sessions"
        assert "limits.sessions_max=1" in error.message

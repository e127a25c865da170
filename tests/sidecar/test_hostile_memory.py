"""Descriptors that a hostile client hands over: refused in words, and the sidecar lives on."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from sidecar.protocol import Outcome
from tests.mappings import flags_of, open_fds
from tests.sidecar.client import (
    WAIT_SECONDS_MAX,
    RefusedError,
    RunningSidecar,
    Worker,
    key_of,
    layout_of,
)
from tiers.kv.fence import PAGE_BYTES
from tiers.kv.memfd import sealed_memfd

SIZE_BYTES = layout_of().size_bytes


def serves(sidecar: RunningSidecar) -> None:
    with Worker(sidecar.path, engine_id="honest") as worker:
        content = worker.fill([0], seed=1)
        assert worker.store(1, key_of("honest"), [0]) is Outcome.OK
        assert worker.load(2, key_of("honest"), [1]) is Outcome.OK
        assert worker.read(1) == content[0]


def unsealed() -> int:
    fd = os.memfd_create("hostile", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SIZE_BYTES)
    return fd


def sparse() -> int:
    fd = os.memfd_create("hostile", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 40)
    return fd


def plain_file(directory: Path) -> int:
    path = directory / "plain"
    path.write_bytes(bytes(SIZE_BYTES))
    return os.open(path, os.O_RDWR)


def reopened(flags: int) -> int:
    fd = sealed_memfd("hostile", SIZE_BYTES)
    again = os.open(f"/proc/self/fd/{fd}", flags)
    os.close(fd)
    return again


def write_sealed() -> int:
    fd = os.memfd_create("hostile", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SIZE_BYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE)
    return fd


HOSTILE: dict[str, tuple[Callable[[Path], int], str]] = {
    "socket": (lambda _: socket.socket().detach(), "not a memfd"),
    "directory": (lambda _: os.open("/", os.O_RDONLY), "not a memfd"),
    "/dev/null": (lambda _: os.open("/dev/null", os.O_RDWR), "not a memfd"),
    "/dev/zero": (lambda _: os.open("/dev/zero", os.O_RDWR), "not a memfd"),
    "pipe": (lambda _: os.pipe()[0], "not a memfd"),
    "file": (plain_file, "not a memfd"),
    "O_PATH": (lambda _: reopened(os.O_PATH), "not a memfd"),
    "read-only": (lambda _: reopened(os.O_RDONLY), "Permission denied"),
    "write-sealed": (lambda _: write_sealed(), "not permitted"),
    "unsealed": (lambda _: unsealed(), "F_SEAL_SHRINK"),
    "too small": (lambda _: sealed_memfd("hostile", SIZE_BYTES - 4096), "at least"),
    "empty": (lambda _: sealed_memfd("hostile", 0), "at least"),
    "sparse and unsealed": (lambda _: sparse(), "F_SEAL_SHRINK"),
}


@pytest.mark.promise("memory-sealed")
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_memory_is_refused_in_words(
    sidecar: RunningSidecar, short_directory: Path, name: str
) -> None:
    make, said = HOSTILE[name]
    fd, fence = make(short_directory), sealed_memfd("fence", PAGE_BYTES)
    with pytest.raises(RefusedError) as caught:
        Worker(sidecar.path, fds=(fd, fence))
    assert caught.value.code == "memory"
    assert said in caught.value.message
    os.close(fd)
    os.close(fence)
    assert sidecar.status()["sockets"]["attaches_refused"] == {"memory": 1}
    serves(sidecar)


@pytest.mark.promise("fence-page-kind")
@pytest.mark.parametrize(
    "name", [name for name in HOSTILE if name not in ("read-only", "write-sealed")]
)
def test_a_hostile_fence_page_is_refused_in_words(
    sidecar: RunningSidecar, short_directory: Path, name: str
) -> None:
    make, said = HOSTILE[name]
    if name == "too small":
        make = lambda _: sealed_memfd("hostile", PAGE_BYTES - 1)  # noqa: E731
    memory, fd = sealed_memfd("kv", SIZE_BYTES), make(short_directory)
    with pytest.raises(RefusedError) as caught:
        Worker(sidecar.path, fds=(memory, fd))
    assert caught.value.code == "memory"
    assert "fence page" in caught.value.message
    assert said in caught.value.message
    os.close(memory)
    os.close(fd)
    serves(sidecar)


@pytest.mark.promise("memory-shrink")
def test_a_client_cannot_shrink_what_it_handed_over(sidecar: RunningSidecar) -> None:
    with Worker(sidecar.path) as worker:
        worker.fill(range(4), seed=1)
        for fd in (worker.memory_fd, worker.fence.fd):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, 0)
        assert worker.store(1, key_of("kept"), range(4)) is Outcome.OK


def test_a_hole_in_the_memory_reads_as_zeroes(sidecar: RunningSidecar) -> None:
    with Worker(sidecar.path) as worker:
        worker.fill(range(4), seed=1)
        # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE: what a client may still do to its memory.
        punch(worker.memory_fd, worker.layout.size_bytes)
        assert worker.store(1, key_of("hole"), range(4)) is Outcome.OK
        worker.poison()
        assert worker.load(2, key_of("hole"), [5, 6, 7, 8]) is Outcome.OK
        assert set(worker.read(5)) == {0}


def punch(fd: int, size_bytes: int) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.fallocate(fd, 3, ctypes.c_long(0), ctypes.c_long(size_bytes)) == 0, (
        ctypes.get_errno()
    )


@pytest.mark.promise("memory-size")
def test_memory_larger_than_the_machine_is_refused_before_it_is_mapped(
    sidecar: RunningSidecar,
) -> None:
    layout = msgspec.structs.replace(layout_of(), size_bytes=1 << 44)
    memory, fence = sealed_memfd("kv", 1 << 44), sealed_memfd("fence", PAGE_BYTES)
    with pytest.raises(RefusedError, match="this machine has"):
        Worker(sidecar.path, layout=layout, fds=(memory, fence))
    os.close(memory)
    os.close(fence)
    serves(sidecar)


@pytest.mark.promise("descriptors")
@pytest.mark.parametrize("count", [0, 1, 3, 5, 60])
def test_another_number_of_descriptors_is_refused_and_none_is_kept(
    sidecar: RunningSidecar, count: int
) -> None:
    serves(sidecar)
    fd = sealed_memfd("kv", SIZE_BYTES)
    before = open_fds()
    for _ in range(3):
        # The client may be refused before it has read the answer.
        with contextlib.suppress(EOFError, OSError), pytest.raises(RefusedError) as caught:
            Refusing(sidecar, [fd] * count)
        assert caught.value.code == "descriptors"
    serves(sidecar)
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while open_fds() > before:
        assert time.monotonic() < deadline, os.listdir("/proc/self/fd")
        time.sleep(0.01)
    os.close(fd)


class Refusing:
    """An attach with any list of descriptors; leaves none of its own behind."""

    def __init__(self, sidecar: RunningSidecar, fds: list[int]) -> None:
        from sidecar.protocol import Role
        from tests.sidecar.client import Client, attach_message

        Client(sidecar.path, attach_message(Role.WORKER, layout_of()), fds)


def test_the_memory_may_be_mapped_whole(sidecar: RunningSidecar) -> None:
    """The seals do not keep the owner from using its own memory."""
    with Worker(sidecar.path) as worker, mmap.mmap(worker.memory_fd, 0) as mapping:
        mapping[:4096] = bytes(4096)
        assert worker.store(1, key_of("x"), [0]) is Outcome.OK


@pytest.mark.promise("core-dumps")
def test_engines_memory_is_not_in_the_sidecars_core_dumps(sidecar: RunningSidecar) -> None:
    with Worker(sidecar.path) as worker:
        assert worker.store(1, key_of(1), [0]) is Outcome.OK
        # The worker's own mapping, and the sidecar's.
        found = flags_of("memfd:test-kv", os.fstat(worker.memory_fd).st_ino)
        assert sorted("dd" in flags for flags in found) == [False, True]

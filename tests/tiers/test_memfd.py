"""Sealed memory: its size is fixed for everybody, and nothing else passes for it."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tiers.kv.memfd import NotSealed, check_sealed, sealed_memfd

SIZE_BYTES = 2 * 4096


def test_nobody_can_change_the_size() -> None:
    fd = sealed_memfd("test", SIZE_BYTES)
    reopened = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    with mmap.mmap(fd, SIZE_BYTES) as mapping:
        for one in (fd, reopened):
            check_sealed("test", one, SIZE_BYTES)
            for size_bytes in (0, SIZE_BYTES - 1, SIZE_BYTES + 1):
                with pytest.raises(PermissionError):
                    os.ftruncate(one, size_bytes)
            with pytest.raises(PermissionError):
                fcntl.fcntl(one, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        mapping[SIZE_BYTES - 1] = 1
    os.close(fd)
    os.close(reopened)


def test_it_is_not_inherited() -> None:
    fd = sealed_memfd("test", SIZE_BYTES)
    assert not os.get_inheritable(fd)
    os.close(fd)


def test_a_size_that_cannot_be_leaves_no_descriptor() -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match=r"Invalid argument|File too large"):
        sealed_memfd("test", -1)
    assert os.listdir("/proc/self/fd") == before


def _unsealed() -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SIZE_BYTES)
    return fd


def _grow_only() -> int:
    fd = _unsealed()
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    return fd


def _path_only() -> int:
    fd = sealed_memfd("test", SIZE_BYTES)
    path_only = os.open(f"/proc/self/fd/{fd}", os.O_PATH)
    os.close(fd)
    return path_only


def _file() -> int:
    path = Path("/dev/shm/kvlake-test-memfd")
    path.write_bytes(bytes(SIZE_BYTES))
    fd = os.open(path, os.O_RDWR)
    path.unlink()
    return fd


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: os.open("/dev/null", os.O_RDWR), "not a memfd"),
        (lambda: os.open("/tmp", os.O_RDONLY), "not a memfd"),
        (lambda: socket.socket().detach(), "not a memfd"),
        (lambda: os.eventfd(0), "not a memfd"),
        (lambda: os.open(__file__, os.O_RDONLY), "not a memfd|at least"),
        (_file, "not sealed"),
        (_path_only, "not a memfd"),
        (_unsealed, "not sealed against shrinking"),
        (_grow_only, "not sealed against shrinking"),
        (lambda: sealed_memfd("test", SIZE_BYTES - 1), f"must have at least {SIZE_BYTES}"),
    ],
)
def test_nothing_else_passes_for_it(make: Callable[[], int], said: str) -> None:
    fd = make()
    try:
        with pytest.raises(NotSealed, match=said) as caught:
            check_sealed("KV memory", fd, SIZE_BYTES)
        assert "the KV memory descriptor" in str(caught.value)
    finally:
        os.close(fd)


def test_huge_pages_are_refused_for_they_may_be_missing_later() -> None:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
    os.ftruncate(fd, 1 << 30)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    with pytest.raises(NotSealed, match="hugetlb"):
        check_sealed("KV memory", fd, SIZE_BYTES)
    os.close(fd)

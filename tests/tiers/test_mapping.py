"""Shared memory: mapped where huge pages fit, and allocated in them without losing a byte.

The kernel is the real one. Whether it gives huge pages is its decision: where it refuses them for
plain memory of this process, the tests of their number are skipped.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import places
from tests.mappings import flags_of, huge_bytes_of, open_fds, policy_at, sizes_of
from tiers.kv.index import IndexReader, IndexWriter
from tiers.kv.mapping import HUGE_PAGE_BYTES, map_shared, place_as_here, populate
from tiers.kv.memfd import sealed_memfd
from tiers.pool.host_pool import HostPool

NAME = "kvlake-mapped"
PAGE = mmap.PAGESIZE


@contextlib.contextmanager
def memfd(size_bytes: int) -> Iterator[int]:
    fd = sealed_memfd(NAME, size_bytes)
    try:
        yield fd
    finally:
        os.close(fd)


def require_huge_pages() -> None:
    """Skip where the kernel does not collapse two pages that nobody else uses."""
    with memfd(2 * HUGE_PAGE_BYTES) as fd:
        _, memory = map_shared(fd, 2 * HUGE_PAGE_BYTES)
        memory[::PAGE] = 1
        libc = ctypes.CDLL(None)
        address, collapse = ctypes.c_void_p(memory.ctypes.data), 25
        if libc.madvise(address, ctypes.c_size_t(memory.size), collapse):
            pytest.skip("this kernel gives no huge pages of shared memory")


@pytest.mark.parametrize("size_bytes", [PAGE, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES + 5 * PAGE])
def test_bytes_are_those_of_the_file(size_bytes: int) -> None:
    with memfd(size_bytes) as fd:
        fds = open_fds()
        owner, memory = map_shared(fd, size_bytes)
        assert open_fds() == fds
        assert memory.size == size_bytes
        assert memory.ctypes.data % HUGE_PAGE_BYTES == 0
        memory[:] = np.arange(size_bytes, dtype=np.uint64).astype(np.uint8)
        assert os.pread(fd, size_bytes, 0) == memory.tobytes()
        inode = os.fstat(fd).st_ino
        assert sizes_of(NAME)[inode] == size_bytes
        assert all("dd" in flags for flags in flags_of(NAME, inode)), "in no core dump"
        del memory
        owner.close()
        assert inode not in sizes_of(NAME)


def test_mapping_ends_with_the_last_array_over_it() -> None:
    with memfd(PAGE) as fd:
        inode = os.fstat(fd).st_ino
        owner, memory = map_shared(fd, PAGE)
        part = memory[:10]
        del owner, memory
        assert inode in sizes_of(NAME)
        part[:] = 1
        del part
        assert inode not in sizes_of(NAME)


def test_file_that_cannot_be_mapped_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "read-only"
    path.write_bytes(bytes(PAGE))
    fd = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(PermissionError):
            map_shared(fd, PAGE)
        assert not sizes_of(str(path))
    finally:
        os.close(fd)


def test_file_is_mapped_where_the_kernel_has_no_room_for_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with vm.overcommit_memory=2 for memory that a file has already."""
    map_file = mmap.mmap

    def refuse(fd: int, *args: Any, **kwargs: Any) -> mmap.mmap:
        if fd == -1:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return map_file(fd, *args, **kwargs)

    with memfd(3 * PAGE) as fd:
        monkeypatch.setattr(mmap, "mmap", refuse)
        owner, memory = map_shared(fd, 3 * PAGE)
        _, reader = map_shared(fd, 3 * PAGE, writable=False)
        monkeypatch.undo()
        found = flags_of(NAME, os.fstat(fd).st_ino)
        assert len(found) == 2
        assert all("dd" in flags for flags in found), "in no core dump"
        assert populate(memory)
        memory[:] = 5
        assert (reader == 5).all()
        with pytest.raises(ValueError, match="read-only"):
            reader[0] = 4
        assert os.pread(fd, 3 * PAGE, 0) == bytes([5]) * 3 * PAGE
        del memory
        owner.close()


@pytest.mark.parametrize("nodes", range(2, 9))
def test_huge_pages_are_on_all_numa_nodes(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Linux's rule: page n of a file is on node n % nodes, a huge page where its first page is.

    This machine has one node, so that the double shows which page is allocated first.
    """
    module = places.find("map_shared").module
    real, touched = vars(module)["_libc"], list[int]()

    class LibcDouble:
        mmap = real.mmap

        @staticmethod
        def madvise(address: int, size_bytes: int, advice: int) -> int:
            if size_bytes == PAGE:
                touched.append(address)
            return int(real.madvise(address, size_bytes, advice))

    monkeypatch.setattr(module, "_libc", LibcDouble)
    count = 48
    with memfd(count * HUGE_PAGE_BYTES) as fd:
        _, memory = map_shared(fd, count * HUGE_PAGE_BYTES)
        for start in range(0, memory.size, 8 * HUGE_PAGE_BYTES):
            assert populate(memory[start : start + 8 * HUGE_PAGE_BYTES])
        pages = [(address - memory.ctypes.data) // PAGE for address in touched]
        assert [page // (HUGE_PAGE_BYTES // PAGE) for page in pages] == list(range(count))
    on_node = Counter(page % nodes for page in pages)
    assert len(on_node) == nodes
    assert max(on_node.values()) <= 2 * min(on_node.values())


@pytest.mark.parametrize("bound", [False, True])
def test_memory_of_an_engine_is_placed_by_its_policy_for_everybody(*, bound: bool) -> None:
    """A sidecar that touches the pages first puts them on the engine's node, and not on its own."""
    default, preferred, bind = 0, 1, 2
    with memfd(PAGE) as fd:
        _, engine = map_shared(fd, PAGE)
        _, sidecar = map_shared(fd, PAGE)
        assert policy_at(sidecar.ctypes.data)[0] == default
        placed = list[bool]()

        def place() -> None:
            if bound:
                # As vLLM binds its workers, for this thread alone.
                call = {"x86_64": 238, "aarch64": 237}[platform.machine()]
                nodes = ctypes.c_ulong(1)
                ctypes.CDLL(None).syscall(call, bind, ctypes.byref(nodes), ctypes.c_ulong(64))
            placed.append(place_as_here(engine))

        thread = threading.Thread(target=place)
        thread.start()
        thread.join()
        assert placed == [True]
        mode, nodes = policy_at(sidecar.ctypes.data)
        assert mode == (bind if bound else preferred)
        assert nodes == 1 if bound else nodes.bit_count() == 1


def test_pages_stay_as_they_are_without_a_collapse() -> None:
    size_bytes = 2 * HUGE_PAGE_BYTES
    with memfd(size_bytes) as fd:
        _, memory = map_shared(fd, size_bytes)
        assert populate(memory, collapse=False)
        assert huge_bytes_of(NAME, os.fstat(fd).st_ino) == 0
        assert os.fstat(fd).st_blocks * 512 == size_bytes


@pytest.mark.parametrize("touched", [0, 1, 2, 3])
def test_memory_is_in_huge_pages_and_keeps_its_bytes(touched: int) -> None:
    """Whether none, one, some or all of its pages were allocated before."""
    require_huge_pages()
    tail_bytes = 7 * PAGE
    size_bytes = 4 * HUGE_PAGE_BYTES + tail_bytes
    with memfd(size_bytes) as fd:
        _, memory = map_shared(fd, size_bytes)
        steps = (size_bytes, HUGE_PAGE_BYTES, 3 * PAGE, PAGE)
        memory[PAGE :: steps[touched]] = 7
        before = memory.copy()
        assert populate(memory)
        assert huge_bytes_of(NAME, os.fstat(fd).st_ino) == size_bytes - tail_bytes
        assert os.fstat(fd).st_blocks * 512 == size_bytes
        assert np.array_equal(memory, before)


def test_second_process_maps_the_same_huge_pages() -> None:
    """As a sidecar maps an engine's memory, and both call for its pages."""
    require_huge_pages()
    with memfd(2 * HUGE_PAGE_BYTES) as fd:
        _, engine = map_shared(fd, 2 * HUGE_PAGE_BYTES)
        _, sidecar = map_shared(fd, 2 * HUGE_PAGE_BYTES)
        engine[::PAGE] = 5
        assert populate(sidecar)
        assert populate(engine)
        assert huge_bytes_of(NAME, os.fstat(fd).st_ino) == 2 * engine.size
        assert (sidecar[::PAGE] == 5).all()


def test_memory_that_may_only_be_read_is_in_the_huge_pages_that_it_has() -> None:
    require_huge_pages()
    with memfd(2 * HUGE_PAGE_BYTES) as fd:
        _, writer = map_shared(fd, 2 * HUGE_PAGE_BYTES)
        _, reader = map_shared(fd, 2 * HUGE_PAGE_BYTES, writable=False)
        assert populate(writer)
        writer[:] = 3
        assert populate(reader)
        assert huge_bytes_of(NAME, os.fstat(fd).st_ino) == 2 * writer.size
        with pytest.raises(ValueError, match="read-only"):
            reader[0] = 4
        assert (reader == 3).all()


def test_index_is_in_huge_pages_of_its_writer_and_its_readers() -> None:
    require_huge_pages()
    writer = IndexWriter(200_000)
    reader = IndexReader(os.dup(writer.fd), writer.size_bytes)
    try:
        found = huge_bytes_of("kvlake-index", os.fstat(writer.fd).st_ino)
        assert found == 2 * (writer.size_bytes - writer.size_bytes % HUGE_PAGE_BYTES) > 0
    finally:
        reader.close()
        writer.close()


def test_piece_that_begins_within_a_huge_page_is_populated_whole() -> None:
    size_bytes = 3 * HUGE_PAGE_BYTES
    with memfd(size_bytes) as fd:
        _, memory = map_shared(fd, size_bytes)
        assert populate(memory[PAGE : -2 * PAGE])
        assert os.fstat(fd).st_blocks * 512 >= size_bytes - 3 * PAGE


def test_writes_of_others_are_kept_meanwhile() -> None:
    size_bytes = 16 * HUGE_PAGE_BYTES
    with memfd(size_bytes) as fd:
        _, ours = map_shared(fd, size_bytes)
        _, theirs = map_shared(fd, size_bytes)
        counters = theirs[::PAGE]
        rounds = 0
        ending = threading.Event()

        def write() -> None:
            nonlocal rounds
            while not ending.is_set() or not rounds:
                np.add(counters, 1, out=counters)
                rounds += 1

        writer = threading.Thread(target=write)
        writer.start()
        try:
            for _ in range(3):
                assert populate(ours)
        finally:
            ending.set()
            writer.join()
        assert (ours[::PAGE] == rounds % 256).all()


def test_kernel_that_refuses_huge_pages_maps_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    places.patch(monkeypatch, "_MADV_COLLAPSE", 12345)
    size_bytes = 2 * HUGE_PAGE_BYTES
    with memfd(size_bytes) as fd:
        _, memory = map_shared(fd, size_bytes)
        assert populate(memory)
        assert huge_bytes_of(NAME, os.fstat(fd).st_ino) == 0
        assert os.fstat(fd).st_blocks * 512 == size_bytes


def test_memory_that_is_missing_is_an_error() -> None:
    """Never a SIGBUS, which would end the process: here the file is shorter than its mapping."""
    fd = os.memfd_create(NAME)
    try:
        os.ftruncate(fd, 2 * HUGE_PAGE_BYTES)
        _, memory = map_shared(fd, 2 * HUGE_PAGE_BYTES)
        os.ftruncate(fd, HUGE_PAGE_BYTES)
        with pytest.raises(OSError, match="Bad address"):
            populate(memory)
    finally:
        os.close(fd)


@pytest.mark.parametrize("threads", [1, 3])
def test_pool_is_in_huge_pages(threads: int) -> None:
    require_huge_pages()
    path = Path(f"/dev/shm/kvlake-test-mapped-{os.getpid()}-{threads}.pool")
    pool = HostPool.open(path, 9 * HUGE_PAGE_BYTES, threads=threads)
    try:
        found = path.stat()
        assert huge_bytes_of(path.name, found.st_ino) == found.st_size - found.st_size % (2 << 20)
    finally:
        pool.close()


@pytest.mark.parametrize("nodes", [(), (0,), (0, 1)])
def test_pool_that_is_taken_over_is_in_huge_pages_once_it_is_mapped_ahead(
    nodes: tuple[int, ...],
) -> None:
    """Not where its small pages are on several nodes: a huge one would move them to one of them."""
    require_huge_pages()
    path = Path(f"/dev/shm/kvlake-test-mapped-{os.getpid()}.pool")
    pool = HostPool.open(path, 9 * HUGE_PAGE_BYTES, prefault=False)
    size = pool.register_class(PAGE)
    slot = pool.allocate(size)
    assert slot is not None
    pool.memory[slot : slot + PAGE] = 9
    pool.seal(slot)
    pool.close(keep=True)
    del pool
    pool = HostPool.open(path, 9 * HUGE_PAGE_BYTES)
    # This machine has one node.
    pool.placement.nodes = nodes
    try:
        for piece in pool.pieces():
            pool.populate(piece)
        found = path.stat()
        in_huge_pages = found.st_size - found.st_size % (2 << 20) if len(nodes) < 2 else 0
        assert huge_bytes_of(path.name, found.st_ino) == in_huge_pages
        assert (pool.memory[slot : slot + PAGE] == 9).all()
    finally:
        pool.close()

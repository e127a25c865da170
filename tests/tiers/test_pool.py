"""The host pool: slots against a dict, ownership between real processes, and full disks."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from tests import places
from tests.mappings import flags_of
from tiers.errors import PoolError
from tiers.kv.mapping import populate
from tiers.pool.file import inspect_pool
from tiers.pool.host_pool import HostPool
from tiers.pool.table import TableShape

PAGE = 4096
MIB = 1 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pool"


def test_slots_are_where_the_memory_is(path: Path) -> None:
    pool = HostPool.open(path, 64 * PAGE + 17)
    assert pool.size_bytes == len(pool.memory) == 64 * PAGE
    table_bytes = TableShape.of(64 * PAGE).table_bytes
    assert path.stat().st_size == table_bytes + 64 * PAGE
    assert path.stat().st_mode & 0o777 == 0o600
    small, large = pool.register_class(PAGE), pool.register_class(3 * PAGE - 5)
    assert pool.register_class(3 * PAGE) == large != small
    offset = pool.allocate(large)
    assert offset is not None
    assert offset % PAGE == 0
    assert pool.class_of(offset) == large
    pool.memory[offset : offset + 3 * PAGE] = 7
    assert path.read_bytes()[table_bytes:][offset : offset + 3 * PAGE] == b"\7" * (3 * PAGE)
    pool.free(offset)
    assert pool.close() == ()
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("prefault", [False, True])
def test_all_of_the_file_is_backed(path: Path, prefault: bool) -> None:
    pool = HostPool.open(path, MIB, prefault=prefault)
    assert path.stat().st_blocks * 512 >= MIB
    assert not pool.memory.any()
    pool.close()


def test_kernel_without_populate_touches_the_pages(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places.patch(monkeypatch, "_MADV_POPULATE_WRITE", 12345)
    pool = HostPool.open(path, MIB)
    assert not pool.memory.any()
    pool.close()


def test_several_threads_touch_a_new_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places.patch(monkeypatch, "PREFAULT_PIECE_BYTES", 16 * PAGE)
    touched: list[int] = []
    real = populate

    def touch(piece: npt.NDArray[np.uint8]) -> bool:
        touched.append(piece.size)
        return real(piece)

    places.patch(monkeypatch, "populate", touch)
    pool = HostPool.open(path, 100 * PAGE, threads=4)
    assert sum(touched) == path.stat().st_size
    assert len(touched) == -(-path.stat().st_size // (16 * PAGE))
    assert not pool.memory.any()
    pool.close()


def test_every_page_can_be_a_slot(path: Path) -> None:
    pool = HostPool.open(path, 37 * PAGE)
    for slot_pages in (1, 2, 5, 37):
        class_id = pool.register_class(slot_pages * PAGE)
        offsets = [pool.allocate(class_id) for _ in range(37 // slot_pages)]
        assert None not in offsets
        assert len(set(offsets)) == 37 // slot_pages
        assert pool.allocate(class_id) is None
        for offset in offsets:
            assert offset is not None
            pool.free(offset)
        assert pool.stats().slab_bytes == 0
    pool.close()


@pytest.mark.parametrize("slot_pages", [1, 3])
def test_what_is_free_is_what_can_still_be_allocated(path: Path, slot_pages: int) -> None:
    pool = HostPool.open(path, 48 * PAGE)
    assert pool.free_bytes() == 48 * PAGE
    class_id = pool.register_class(slot_pages * PAGE)
    for left in reversed(range(48 // slot_pages)):
        assert pool.allocate(class_id) is not None
        assert pool.free_bytes() == left * slot_pages * PAGE
    pool.close()


def test_a_full_class_leaves_and_returns_its_slabs(path: Path) -> None:
    pool = HostPool.open(path, 16 * PAGE)
    one, two = pool.register_class(PAGE), pool.register_class(2 * PAGE)
    offsets = [pool.allocate(one) for _ in range(16)]
    assert pool.allocate(two) is None
    for offset in offsets[3:6]:
        assert offset is not None
        pool.free(offset)
    other = pool.allocate(two)
    assert other is not None
    assert pool.class_of(other) == two
    stats = pool.stats()
    assert stats.used_bytes == 15 * PAGE
    assert [(kind.slot_bytes, kind.slots_used) for kind in stats.classes] == [
        (PAGE, 13),
        (2 * PAGE, 1),
    ]
    pool.close()


def test_freeing_what_is_not_allocated_is_refused(path: Path) -> None:
    pool = HostPool.open(path, 16 * PAGE)
    class_id = pool.register_class(2 * PAGE)
    offset = pool.allocate(class_id)
    assert offset is not None
    for foreign in (offset + PAGE, offset + 1, -PAGE, 1 << 40):
        with pytest.raises(PoolError, match="no allocated slot"):
            pool.free(foreign)
        with pytest.raises(PoolError, match="no allocated slot"):
            pool.class_of(foreign)
    pool.free(offset)
    with pytest.raises(PoolError, match=f"offset={offset} is no allocated slot"):
        pool.free(offset)
    for unknown in (1, -1):
        with pytest.raises(KeyError):
            pool.allocate(unknown)
    pool.close()


def test_impossible_sizes_name_the_setting(path: Path) -> None:
    with pytest.raises(PoolError, match="at least 4096 bytes"):
        HostPool.open(path, PAGE - 1)
    pool = HostPool.open(path, 4 * PAGE)
    for slot_bytes in (0, -1, 4 * PAGE + 1):
        with pytest.raises(PoolError, match=r"raise host\.size or lower chunk_tokens"):
            pool.register_class(slot_bytes)
    pool.close()


def test_leaks_are_reported_and_close_may_be_repeated(path: Path) -> None:
    pool = HostPool.open(path, 16 * PAGE)
    class_id = pool.register_class(PAGE)
    kept = [pool.allocate(class_id) for _ in range(3)]
    freed = pool.allocate(class_id)
    assert freed is not None
    pool.free(freed)
    assert pool.close() == tuple(kept)
    assert pool.close() == ()
    with pytest.raises(PoolError, match="is closed"):
        _ = pool.memory


def test_an_array_that_is_still_held_stays_valid(path: Path) -> None:
    """A copy thread that ends after close touches its old memory, not another owner's."""
    pool = HostPool.open(path, 16 * PAGE)
    held = pool.memory[:PAGE]
    pool.close()
    successor = HostPool.open(path, 16 * PAGE)
    held[:] = 9
    assert not successor.memory.any()
    successor.close()


# --- ownership ---------------------------------------------------------------------------------

OWNER = """
import pathlib, sys
from tiers.pool.host_pool import HostPool
pool = HostPool.open(pathlib.Path(sys.argv[1]), 16 * 4096)
pool.memory[:] = 1
print("ready", flush=True)
sys.stdin.read()
"""


def start_owner(path: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def test_second_owner_is_refused_until_the_first_is_dead(path: Path) -> None:
    with start_owner(path) as process:
        try:
            with pytest.raises(PoolError, match=f"locked by process {process.pid}; stop"):
                HostPool.open(path, 16 * PAGE)
            assert path.read_bytes()[-16 * PAGE :] == b"\1" * (16 * PAGE)
        finally:
            process.kill()
            process.wait()
    assert path.exists()
    pool = HostPool.open(path, 16 * PAGE)
    assert (pool.emptied, len(pool.recovered)) == ("", 0)
    pool.close()
    assert list(path.parent.iterdir()) == []


def test_pool_is_in_use_while_it_is_open(path: Path) -> None:
    pool = HostPool.open(path, 4 * PAGE)
    with pytest.raises(PoolError, match=f"process {os.getpid()};"):
        HostPool.open(path, 4 * PAGE)
    pool.close()


def test_a_lock_inherited_by_a_child_is_distinguished(path: Path) -> None:
    """The owner is dead, what it forked is not: the lock holds, and the message does not lie."""
    script = OWNER.replace(
        'print("ready", flush=True)',
        "import os\nif os.fork():\n    os._exit(0)\nprint(os.getppid(), flush=True)",
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.wait()
        with pytest.raises(PoolError, match=r"survived by a child\); stop that sidecar"):
            HostPool.open(path, 16 * PAGE)
    # Nobody can wait for the child but by trying.
    deadline = time.monotonic() + 20
    while True:
        try:
            HostPool.open(path, 16 * PAGE).close()
        except PoolError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        else:
            break


def test_files_of_others_are_left_alone(path: Path) -> None:
    path.write_text("precious")
    with pytest.raises(PoolError, match="was not made by kvlake"):
        HostPool.open(path, 4 * PAGE)
    assert path.read_text() == "precious"
    assert list(path.parent.iterdir()) == [path]
    path.unlink()

    lock = path.with_name("pool.lock")
    lock.write_text("precious")
    with pytest.raises(PoolError, match="it is no owner's record"):
        HostPool.open(path, 4 * PAGE)
    assert lock.read_text() == "precious"
    lock.unlink()

    target = path.with_name("target")
    target.write_text("precious")
    lock.symlink_to(target)
    with pytest.raises(PoolError, match="cannot lock"):
        HostPool.open(path, 4 * PAGE)
    lock.unlink()
    lock.write_text("kvlake pool of pid 1\n")
    path.symlink_to(target)
    with pytest.raises(PoolError, match="was not made by kvlake"):
        HostPool.open(path, 4 * PAGE)
    assert target.read_text() == "precious"


@pytest.mark.promise("pool-lock")
@pytest.mark.parametrize("there", [False, True])
def test_a_lock_of_another_user_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    """It was adopted: its owner could replace the record, and take the lock first."""
    lock = path.with_name("pool.lock")
    if there:
        lock.write_text("kvlake pool of pid 0\n")
    else:
        lock.touch()
    before = lock.read_bytes()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(PoolError, match=f"belongs to uid {lock.stat().st_uid}, not to uid 12345"):
        HostPool.open(path, 4 * PAGE)
    assert lock.read_bytes() == before
    assert not path.exists()


@pytest.mark.promise("pool-lock")
def test_a_pipe_in_the_locks_place_is_refused_and_stays(path: Path) -> None:
    """It was locked, and removed when the pool could not be made."""
    lock = path.with_name("pool.lock")
    os.mkfifo(lock)
    with pytest.raises(PoolError, match="it is no regular file"):
        HostPool.open(path, 4 * PAGE)
    assert lock.is_fifo()
    # To look at a pool waits for nobody who writes to the pipe.
    assert inspect_pool(path).owner is None


@pytest.mark.promise("core-dumps")
def test_a_pool_is_not_in_core_dumps(path: Path) -> None:
    for _ in range(2):
        # Made, and then taken over.
        pool = HostPool.open(path, 4 * PAGE)
        offset = pool.allocate(pool.register_class(PAGE))
        assert offset is not None
        pool.seal(offset)
        flags = flags_of(str(path))
        assert flags
        assert all("dd" in one for one in flags)
        pool.close(keep=True)


def test_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        PoolError, match=r"nowhere does not exist; make that folder, or choose another"
    ):
        HostPool.open(tmp_path / "nowhere" / "pool", 4 * PAGE)


def test_file_system_without_room_says_what_to_change(path: Path) -> None:
    with pytest.raises(PoolError, match=r" left; lower host\.size"):
        HostPool.open(path, 1 << 60)
    assert list(path.parent.iterdir()) == []


def test_room_that_is_gone_between_question_and_reservation(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(os.listdir("/proc/self/fd"))

    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(PoolError, match=r" left; lower host\.size"):
        HostPool.open(path, 4 * PAGE, prefault=False)
    assert list(path.parent.iterdir()) == []

    # As where the file system is full: touching fails, and the call that allocates says what is
    # missing.
    def full(piece: object) -> bool:
        raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))

    places.patch(monkeypatch, "populate", full)
    with pytest.raises(PoolError, match=r" left; lower host\.size"):
        HostPool.open(path, 4 * PAGE, threads=3)
    assert list(path.parent.iterdir()) == []
    assert set(os.listdir("/proc/self/fd")) == before


def test_mapping_that_fails_leaves_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, length: int, **_: int) -> mmap.mmap:
        raise PermissionError(errno.EPERM, "no mapping here")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(PoolError, match="cannot create the pool"):
        HostPool.open(path, 4 * PAGE)
    assert list(path.parent.iterdir()) == []


# --- a dict is the model -----------------------------------------------------------------------

POOL_PAGES = 160
"""Slabs of up to ten slots, sixteen of them."""
SLOT_PAGES = (1, 2, 3, 7)


class PoolMachine(RuleBasedStateMachine):
    """Slots that are held, and a byte that was written all over each."""

    slots = Bundle("slots")

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory(prefix="kvlake-pool-")
        self.pool = HostPool.open(
            Path(self.directory.name) / "pool", POOL_PAGES * PAGE, prefault=False
        )
        self.classes = [self.pool.register_class(pages * PAGE) for pages in SLOT_PAGES]
        self.model: dict[int, tuple[int, int]] = {}
        self.mark = 0

    @rule(target=slots, kind=st.sampled_from(range(len(SLOT_PAGES))), count=st.integers(1, 24))
    def allocate(self, kind: int, count: int) -> MultipleResults[int]:
        offsets: list[int] = []
        for _ in range(count):
            offset = self.pool.allocate(self.classes[kind])
            if offset is None:
                self.no_room_for(kind)
                break
            assert offset not in self.model
            self.mark = self.mark % 255 + 1
            self.model[offset] = (kind, self.mark)
            self.pool.memory[offset : offset + SLOT_PAGES[kind] * PAGE] = self.mark
            offsets.append(offset)
        return multiple(*offsets)

    def no_room_for(self, kind: int) -> None:
        assert self.pool.stats().classes[kind].slots_free == 0
        assert max(self.pool.extents.sizes, default=0) < SLOT_PAGES[kind] * PAGE

    @rule(offset=consumes(slots))
    def free(self, offset: int) -> None:
        if offset in self.model:
            self.pool.free(offset)
            del self.model[offset]
        with pytest.raises(PoolError):
            self.pool.free(offset)

    @rule(kind=st.sampled_from(range(len(SLOT_PAGES))), every=st.integers(1, 3))
    def free_many(self, kind: int, every: int) -> None:
        """Give back slots of a class in another order than the one they came in."""
        held = [offset for offset, (held_kind, _) in self.model.items() if held_kind == kind]
        for offset in reversed(held[::every]):
            self.pool.free(offset)
            del self.model[offset]

    @invariant()
    def nobody_wrote_into_anothers_slot(self) -> None:
        taken = np.zeros(POOL_PAGES, dtype=np.int64)
        for offset, (kind, mark) in self.model.items():
            pages = SLOT_PAGES[kind]
            assert self.pool.class_of(offset) == self.classes[kind]
            assert (self.pool.memory[offset : offset + pages * PAGE : 512] == mark).all()
            taken[offset // PAGE : offset // PAGE + pages] += 1
        assert taken.max() <= 1

    @invariant()
    def the_books_agree(self) -> None:
        stats = self.pool.stats()
        held = [kind for kind, _ in self.model.values()]
        assert [one.slots_used for one in stats.classes] == [
            held.count(kind) for kind in range(len(SLOT_PAGES))
        ]
        assert stats.used_bytes == sum(SLOT_PAGES[kind] * PAGE for kind in held)
        cut = sum((one.slots_used + one.slots_free) * one.slot_bytes for one in stats.classes)
        assert stats.slab_bytes == cut
        assert stats.slab_bytes + sum(self.pool.extents.sizes) == stats.size_bytes
        if not held:
            assert self.pool.extents.sizes == [stats.size_bytes]

    def teardown(self) -> None:
        assert self.pool.close() == tuple(sorted(self.model))
        self.directory.cleanup()


def test_pool_against_a_dict() -> None:
    run_state_machine_as_test(
        PoolMachine, settings=settings(max_examples=60, stateful_step_count=60, deadline=None)
    )

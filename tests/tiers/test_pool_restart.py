"""A pool that outlives its owner: what comes back, what does not, and what is refused."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests import places
from tiers.errors import PoolError
from tiers.pool.file import check_pool
from tiers.pool.host_pool import HostPool
from tiers.pool.lock import Owner, read_boot_id, read_owner
from tiers.pool.table import PAGE_BYTES, VERSION, TableShape

PAGE = 4096
PAGES = 64
SEED = int(os.environ.get("KVLAKE_TEST_SEED", "20"))
KILLER = Path(__file__).with_name("pool_killer.py")
RECORDS = PAGE_BYTES + 32 * TableShape.of(PAGES * PAGE).slabs_max
"""Where the records start."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pool"


def open_pool(path: Path, pages: int = PAGES) -> HostPool:
    return HostPool.open(path, pages * PAGE, prefault=False)


def sealed_slot(pool: HostPool, pages: int, number: int) -> int:
    offset = pool.allocate(pool.register_class(pages * PAGE))
    assert offset is not None
    pool.set_tag(offset, bytes([number]) * 16)
    pool.memory[offset : offset + pages * PAGE] = number
    pool.seal(offset)
    return offset


def left_pool(path: Path, count: int = 5) -> list[int]:
    """A pool that was closed with `count` sealed slots of two sizes."""
    pool = open_pool(path)
    offsets = [sealed_slot(pool, 1 + number % 2, number) for number in range(1, count + 1)]
    assert pool.close(keep=True) == ()
    return offsets


def came_back(pool: HostPool) -> dict[int, int]:
    """Recovered slots and the number that fills each; every one must be whole."""
    found = pool.recovered
    content: dict[int, int] = {}
    for offset, slot_bytes, tag in zip(
        found.offsets.tolist(), found.slot_bytes.tolist(), found.tags, strict=True
    ):
        slot = pool.memory[offset : offset + slot_bytes]
        assert (slot == slot[0]).all()
        assert bytes(tag) == bytes([slot[0]]) * 16
        content[offset] = int(slot[0])
    return content


def test_what_was_sealed_comes_back_and_nothing_else(path: Path) -> None:
    pool = open_pool(path)
    small = pool.register_class(PAGE)
    one, two, three = (sealed_slot(pool, 1, number) for number in (1, 2, 3))
    large = sealed_slot(pool, 3, 4)
    being_filled = pool.allocate(small)
    assert being_filled is not None
    pool.free(two)
    pool.unseal(three)
    assert pool.close(keep=True) == tuple(sorted((being_filled, three)))

    pool = open_pool(path)
    assert came_back(pool) == {one: 1, large: 4}
    stats = pool.stats()
    assert stats.used_bytes == 4 * PAGE
    assert pool.class_of(large) == pool.register_class(3 * PAGE)
    # What came back can be freed, and all of the rest can be had.
    pool.free(one)
    offsets = [pool.allocate(pool.register_class(PAGE)) for _ in range(PAGES - 3)]
    assert None not in offsets
    assert len(set(offsets)) == PAGES - 3
    assert not set(offsets) & set(range(large, large + 3 * PAGE, PAGE))
    pool.close()
    assert list(path.parent.iterdir()) == []


def test_an_end_at_once_after_the_close_leaves_what_is_kept(path: Path) -> None:
    """A signal may come between the close and the end of the process."""
    pool = open_pool(path)
    sealed_slot(pool, 1, 1)
    pool.close(keep=True)
    pool.remove_files()
    pool = open_pool(path)
    assert len(came_back(pool)) == 1
    pool.remove_files()
    assert not path.exists()
    pool.close()


def test_order_of_use_and_tags_come_back(path: Path) -> None:
    pool = open_pool(path)
    offsets = [sealed_slot(pool, 1, number) for number in (1, 2, 3)]
    pool.touch(offsets[0])
    pool.close(keep=True)
    for _ in range(2):
        pool = open_pool(path)
        found = pool.recovered
        by_use = found.offsets[np.argsort(found.used)].tolist()
        by_age = found.offsets[np.argsort(found.sealed)].tolist()
        assert by_use == [offsets[1], offsets[2], offsets[0]]
        assert by_age == offsets
        # A later life's numbers are higher than those of all earlier ones.
        offsets.append(sealed_slot(pool, 1, len(offsets) + 1))
        offsets.append(sealed_slot(pool, 2, len(offsets) + 1))
        pool.touch(offsets[1])
        pool.touch(offsets[2])
        pool.touch(offsets[0])
        assert pool.close(keep=True) == ()
        pool = open_pool(path)
        assert sorted(came_back(pool).values()) == list(range(1, len(offsets) + 1))
        for offset in offsets[3:]:
            pool.free(offset)
        del offsets[3:]
        pool.close(keep=True)


def test_tag_is_of_one_filling(path: Path) -> None:
    pool = open_pool(path)
    offset = sealed_slot(pool, 1, 7)
    with pytest.raises(AssertionError, match="set before the slot is sealed"):
        pool.set_tag(offset, b"later")
    pool.free(offset)
    assert pool.allocate(pool.register_class(PAGE)) == offset
    with pytest.raises(AssertionError):
        pool.set_tag(offset, bytes(17))
    pool.seal(offset)
    pool.close(keep=True)
    assert bytes(open_pool(path).recovered.tags[0]) == bytes(16)


def test_pool_with_nothing_in_it_is_not_kept(path: Path) -> None:
    pool = open_pool(path)
    offset = pool.allocate(pool.register_class(PAGE))
    assert pool.close(keep=True) == (offset,)
    assert list(path.parent.iterdir()) == []


def test_record_names_the_owner_and_then_nobody(path: Path) -> None:
    pool = open_pool(path)
    sealed_slot(pool, 1, 1)
    owner = read_owner(path.with_name("pool.lock"))
    assert owner is not None
    assert owner == Owner.current()
    assert owner.alive
    assert not Owner(owner.pid, owner.started_ticks + 1, owner.boot_id).alive
    assert not Owner(owner.pid, owner.started_ticks, bytes(16)).alive
    with pytest.raises(PoolError, match="pool is in use"):
        open_pool(path)
    pool.close(keep=True)
    assert read_owner(path.with_name("pool.lock")) == Owner(0)


# --- what is not taken over ----------------------------------------------------------------------


def flip(path: Path, offset: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def other_version(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(8)
        file.write((VERSION + 1).to_bytes(4, "little"))


def older_release(path: Path) -> None:
    """No table, and a record without a start time."""
    path.write_bytes(bytes(PAGES * PAGE))
    path.with_name("pool.lock").write_text("kvlake pool of pid 1\n")


def holes(path: Path) -> None:
    data = path.read_bytes()
    path.unlink()
    with path.open("wb") as file:
        file.truncate(len(data))
        file.write(data[: TableShape.of(PAGES * PAGE).table_bytes])


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (other_version, f"version {VERSION + 1}, this release reads version {VERSION}"),
        (older_release, "no superblock"),
        (lambda path: os.truncate(path, path.stat().st_size - PAGE), "its superblock says"),
        (lambda path: os.truncate(path, 100), "its superblock says"),
        (lambda path: os.truncate(path, 10), "too few"),
        (lambda path: os.truncate(path, 0), "too few"),
        (lambda path: path.write_bytes(b"precious" * 4096), "no superblock"),
        (lambda path: flip(path, 3, 1), "no superblock"),
        (lambda path: flip(path, 17, 1), "superblock is damaged"),
        (lambda path: flip(path, 45, 1), "superblock is damaged"),
        (lambda path: flip(path, PAGE_BYTES + 8 + 2, 1), "contradicts itself"),
        (holes, "holes"),
    ],
)
def test_file_that_is_not_as_it_was_left_is_emptied(
    path: Path, damage: Callable[[Path], object], reason: str
) -> None:
    left_pool(path)
    damage(path)
    pool = open_pool(path)
    assert reason in pool.emptied
    assert len(pool.recovered) == 0
    assert not pool.memory.any()
    sealed_slot(pool, 1, 9)
    pool.close(keep=True)
    pool = open_pool(path)
    assert (pool.emptied, list(came_back(pool).values())) == ("", [9])
    pool.close()
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("pages", [PAGES * 2, PAGES + 1, PAGES * 16])
def test_pool_grows_and_keeps_what_it_has(path: Path, pages: int) -> None:
    offsets = left_pool(path)
    pool = open_pool(path, pages)
    assert (pool.size_bytes, pool.resized_from_bytes) == (pages * PAGE, PAGES * PAGE)
    assert sorted(came_back(pool)) == sorted(offsets)
    # The last page can be used, and comes back.
    taken: list[int] = []
    while (offset := pool.allocate(pool.register_class(PAGE))) is not None:
        taken.append(offset)
    last = max(taken)
    assert last == (pages - 1) * PAGE
    pool.memory[last] = 1
    pool.seal(last)
    pool.close(keep=True)
    pool = open_pool(path, pages)
    assert sorted(pool.recovered.offsets.tolist()) == sorted([*offsets, last])
    assert pool.resized_from_bytes == pool.size_bytes
    pool.close()


def test_pool_shrinks_and_loses_what_lay_beyond(path: Path) -> None:
    pool = open_pool(path)
    offsets = [sealed_slot(pool, 4, number) for number in range(1, 17)]
    assert max(offsets) == (PAGES - 4) * PAGE
    pool.close(keep=True)
    pages = PAGES // 2 + 2
    pool = open_pool(path, pages)
    kept = [offset for offset in offsets if offset + 4 * PAGE <= pages * PAGE]
    assert sorted(came_back(pool)) == kept
    assert path.stat().st_size < TableShape.of(PAGES * PAGE).file_bytes
    pool.free(kept[0])
    assert pool.allocate(pool.register_class(4 * PAGE)) == kept[0]
    pool.close(keep=True)
    # And it grows again.
    pool = open_pool(path)
    assert sorted(came_back(pool)) == kept[1:]
    pool.close()


@pytest.mark.parametrize(
    ("made_for", "wanted", "kept"),
    [
        (8 << 30, 128 << 30, True),
        (8 << 30, 129 << 30, False),
        (128 << 30, 8 << 30, True),
        (256 << 30, 8 << 30, False),
        (1 << 20, 4 << 30, True),
    ],
)
def test_table_that_is_by_far_too_small_or_large_is_not_kept(
    made_for: int, wanted: int, kept: bool
) -> None:
    resized = TableShape.of(made_for).resized(wanted)
    assert (resized is not None) is kept
    if resized is not None:
        assert resized.size_bytes == wanted
        assert resized.table_bytes == TableShape.of(made_for).table_bytes


def test_a_table_that_cannot_grow_on_names_the_size_that_keeps_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It named the size after the last resize as that for which it had been made."""
    for name in ("_SLABS_MIN", "_RECORDS_MIN"):
        places.patch(monkeypatch, name, 4)
    left_pool(path)
    pool = open_pool(path, 16 * PAGES)
    assert pool.emptied == ""
    pool.close(keep=True)
    pool = open_pool(path, 32 * PAGES)
    assert "when the file was first made, host.size was too far from this one" in pool.emptied
    assert f"a host.size of {16 * PAGES * PAGE} bytes, as before, would keep" in pool.emptied
    pool.close()


def test_no_room_to_grow_costs_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offsets = left_pool(path)
    before = path.read_bytes()

    def full(fd: int, offset: int, length: int) -> None:
        os.ftruncate(fd, offset + length // 2)
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(PoolError, match=r"lower host\.size"):
            open_pool(path, PAGES * 2)
    assert path.read_bytes() == before
    pool = open_pool(path)
    assert sorted(came_back(pool)) == sorted(offsets)
    pool.close()


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("free_bytes", [0, 32 * PAGE, 1 << 30])
def test_a_check_says_what_opening_would_and_changes_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int, damaged: bool
) -> None:
    left_pool(path)
    if damaged:
        with path.open("r+b") as file:
            file.write(b"precious")
    before = path.read_bytes(), sorted(path.parent.iterdir())
    there_bytes = path.stat().st_blocks * 512

    def statvfs(directory: Path) -> SimpleNamespace:
        # What a pool takes is not free, and what is removed is.
        gone = there_bytes - (path.stat().st_blocks * 512 if path.exists() else 0)
        return SimpleNamespace(f_bavail=free_bytes + gone, f_frsize=1, f_blocks=1)

    monkeypatch.setattr(os, "statvfs", statvfs)

    def error_of(call: Callable[[], object]) -> str:
        try:
            call()
        except PoolError as error:
            return str(error)
        return ""

    checked = error_of(lambda: check_pool(path, PAGES * PAGE * 2))
    assert (path.read_bytes(), sorted(path.parent.iterdir())) == before
    assert checked == error_of(lambda: open_pool(path, PAGES * 2).close())
    assert bool(checked) == (free_bytes < PAGES * PAGE)


def test_a_hugetlbfs_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file there takes whole huge pages, and the pool's table ends at a small one."""
    places.patch(monkeypatch, "memory_kind", lambda _: "hugetlbfs")
    for call in (lambda: check_pool(path, PAGES * PAGE), lambda: open_pool(path)):
        with pytest.raises(PoolError, match=r"host\.directory=.*hugetlbfs.*/dev/shm"):
            call()
    assert not path.exists()


def test_file_longer_than_its_pool_is_cut(path: Path) -> None:
    """Its owner was killed after it grew the file, or before it shrank it."""
    offsets = left_pool(path)
    file_bytes = path.stat().st_size
    with path.open("ab") as file:
        file.write(bytes(5 * PAGE))
    pool = open_pool(path)
    assert sorted(came_back(pool)) == sorted(offsets)
    assert path.stat().st_size == file_bytes
    pool.close()


def test_pool_from_before_a_reboot_is_emptied(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where host.directory is on a disk, the file is there still, and nobody knows how whole."""
    left_pool(path)
    assert read_boot_id() != bytes(16)
    with monkeypatch.context() as patch:
        places.patch(patch, "read_boot_id", lambda: b"another boot, ok")
        pool = open_pool(path)
        assert "before the machine was started last" in pool.emptied
        pool.close()


def test_pool_of_another_user_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left_pool(path)
    before = path.read_bytes()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(PoolError, match="belongs to uid"):
        open_pool(path)
    assert path.read_bytes() == before


def test_pool_without_its_record_is_nobodys(path: Path) -> None:
    left_pool(path)
    before = path.read_bytes()
    path.with_name("pool.lock").unlink()
    with pytest.raises(PoolError, match="was not made by kvlake"):
        open_pool(path)
    assert path.read_bytes() == before


def test_flipped_bits_are_survived(path: Path) -> None:
    """Whatever bit of the table flips: no crash, and no slot that was never one.

    A flip in a record may cost a slot or bring an old one back; what is in it is checked elsewhere.
    """
    rng = np.random.default_rng(SEED)
    offsets = left_pool(path, 20)
    good = path.read_bytes()
    used = [
        *range(64),
        *range(PAGE_BYTES, PAGE_BYTES + 32 * 12),
        *range(RECORDS, RECORDS + 32 * 40),
    ]
    for _ in range(150):
        path.write_bytes(good)
        place, bit = int(rng.choice(used)), int(rng.integers(8))
        flip(path, place, bit)
        pool = open_pool(path)
        found = pool.recovered.offsets.tolist()
        where = f"bit {bit} of byte {place}: {pool.emptied}"
        assert len(set(found)) == len(found), where
        assert len(set(found) ^ set(offsets)) <= (1 if not pool.emptied else 20), where
        for offset in found:
            pool.free(offset)
        pages = [pool.allocate(pool.register_class(PAGE)) for _ in range(PAGES)]
        assert None not in pages, where
        sealed_in_this_life = pages[0]
        assert sealed_in_this_life is not None
        pool.seal(sealed_in_this_life)
        pool.close(keep=True)
        pool = open_pool(path)
        assert pool.recovered.offsets.tolist() == [sealed_in_this_life], where
        pool.close(keep=True)


def test_entries_that_contradict_each_other_are_not_believed(path: Path) -> None:
    """Each has a good checksum, and they claim the same pages."""
    pool = open_pool(path)
    sealed_slot(pool, 1, 1)
    sealed_slot(pool, 2, 2)
    pool.close(keep=True)
    with path.open("r+b") as file:
        file.seek(PAGE_BYTES)
        first = file.read(32)
        file.seek(PAGE_BYTES + 32)
        file.write(first)
    pool = open_pool(path)
    assert "contradicts itself" in pool.emptied
    pool.close()


# --- killed at any moment ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lines", "moments"])
def test_killed_owner_leaves_only_whole_slots(tmp_path: Path, mode: str) -> None:
    done = subprocess.run(
        [sys.executable, str(KILLER), mode, str(tmp_path), str(SEED)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert int(done.stdout) >= 30

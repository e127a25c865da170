"""Direct I/O of a local folder: what is aligned goes past the page cache, the rest as ever."""

# ruff: noqa: ASYNC240 - test files are small

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest

from tests import places
from tests.tiers.tier_suite import NAME, TierSuite, image_of
from tiers.errors import ImageTruncated, TierFull, TierUnavailable
from tiers.store.access import Access, Folder
from tiers.store.folder import DIRECT_ALIGNMENT, DIRECT_BYTES_MIN, LocalFolder
from tiers.store.object_tier import UrlObjects

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from tiers.store.client import Bytes

PAGE: Final = DIRECT_ALIGNMENT


def aligned(size_bytes: int, offset: int = 0) -> Bytes:
    """Memory that begins `offset` bytes after a page, as a slot does with 0."""
    whole = np.frombuffer(mmap.mmap(-1, size_bytes + 2 * PAGE), dtype=np.uint8)
    return whole[offset : offset + size_bytes]


def filled(size_bytes: int, offset: int = 0) -> Bytes:
    memory = aligned(size_bytes, offset)
    memory[:] = image_of(size_bytes)
    return memory


@pytest.fixture
def direct_bytes(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes that moved past the page cache, by system call."""
    moved = {"write": 0, "readv": 0}
    write, readv = os.write, os.readv

    def direct(fd: int) -> bool:
        return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)

    def counted_write(fd: int, data: Any) -> int:
        count = write(fd, data)
        moved["write"] += count * direct(fd)
        return count

    def counted_readv(fd: int, views: Any) -> int:
        count = readv(fd, views)
        moved["readv"] += count * direct(fd)
        return count

    monkeypatch.setattr(os, "write", counted_write)
    monkeypatch.setattr(os, "readv", counted_readv)
    return moved


def local(root: Path) -> LocalFolder:
    return LocalFolder(str(root), Folder())


class TestDirectContract(TierSuite):
    """The whole contract with direct I/O for every size that has a page."""

    @pytest.fixture
    async def tier(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> AsyncGenerator[UrlObjects]:
        places.patch(monkeypatch, "DIRECT_BYTES_MIN", PAGE)
        tier = UrlObjects(f"file://{tmp_path}/direct")
        yield tier
        await tier.close()


@pytest.mark.parametrize("tail", [0, 1, 511, 512, 4095])
@pytest.mark.parametrize("pages", [64, 65, 300])
async def test_whole_pages_go_directly_and_the_tail_does_not(
    tmp_path: Path, direct_bytes: dict[str, int], pages: int, tail: int
) -> None:
    store = local(tmp_path)
    image = filled(pages * PAGE + tail)
    await store.write(NAME, image)
    assert (tmp_path / NAME).read_bytes() == image.tobytes()
    into = aligned(image.nbytes + 2 * PAGE)
    into[:] = 0xAB
    assert await store.read(NAME, into) == image.nbytes
    assert np.array_equal(into[: image.nbytes], image)
    assert np.all(into[image.nbytes :] == 0xAB), "bytes beyond the object are left alone"
    assert direct_bytes == {"write": pages * PAGE, "readv": pages * PAGE}
    assert store.direct


@pytest.mark.parametrize("offset", [1, 64, 512, 4095])
async def test_memory_that_begins_elsewhere_goes_through_the_cache(
    tmp_path: Path, direct_bytes: dict[str, int], offset: int
) -> None:
    store = local(tmp_path)
    image = filled(DIRECT_BYTES_MIN + 100, offset)
    await store.write(NAME, image)
    into = aligned(image.nbytes + 10, offset)
    assert await store.read(NAME, into) == image.nbytes
    assert np.array_equal(into[: image.nbytes], image)
    assert direct_bytes == {"write": 0, "readv": 0}


async def test_small_objects_go_through_the_cache(
    tmp_path: Path, direct_bytes: dict[str, int]
) -> None:
    store = local(tmp_path)
    image = filled(DIRECT_BYTES_MIN - 1)
    await store.write(NAME, image)
    assert await store.read(NAME, aligned(image.nbytes)) == image.nbytes
    assert direct_bytes == {"write": 0, "readv": 0}


async def test_the_settings_turn_it_off(tmp_path: Path, direct_bytes: dict[str, int]) -> None:
    tier = UrlObjects(f"file://{tmp_path}", Access(folder=Folder(direct=False)))
    image = filled(DIRECT_BYTES_MIN)
    await tier.write(NAME, image)
    assert await tier.read(NAME, aligned(image.nbytes)) == image.nbytes
    assert direct_bytes == {"write": 0, "readv": 0}


async def test_an_object_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    store = local(tmp_path)
    await store.write(NAME, filled(DIRECT_BYTES_MIN + PAGE))
    into = aligned(DIRECT_BYTES_MIN)
    with pytest.raises(ImageTruncated, match="longer than its slot"):
        await store.read(NAME, into)
    assert not into.any()


async def test_pieces_are_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may take less than it was given, aligned or not."""
    write, readv = os.write, os.readv
    sizes = [3 * PAGE, 100, 5 * PAGE, 1]
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[: sizes[len(data) % 4]]))
    monkeypatch.setattr(
        os, "readv", lambda fd, views: readv(fd, [views[0][: sizes[len(views[0]) % 4]]])
    )
    places.patch(monkeypatch, "DIRECT_BYTES_MIN", PAGE)
    store = local(tmp_path)
    image = filled(20 * PAGE + 77)
    await store.write(NAME, image)
    into = aligned(image.nbytes)
    assert await store.read(NAME, into) == image.nbytes
    assert np.array_equal(into, image)


# --- file systems that refuse it -----------------------------------------------------------------


@pytest.fixture
def ramfs(tmp_path: Path) -> Iterator[Path | None]:
    """A file system without direct I/O, where this user may mount one; else None."""
    place = tmp_path / "ramfs"
    place.mkdir()
    mounted = shutil.which("mount") is not None and not subprocess.call(
        ["mount", "-t", "ramfs", "ramfs", str(place)], stderr=subprocess.DEVNULL
    )
    yield place if mounted else None
    if mounted:
        subprocess.run(["umount", str(place)], check=True)


async def round_trip(store: LocalFolder, root: Path) -> None:
    image = filled(DIRECT_BYTES_MIN + 10)
    await store.write(NAME, image)
    assert (root / NAME).read_bytes() == image.tobytes()
    into = aligned(image.nbytes)
    assert await store.read(NAME, into) == image.nbytes
    assert np.array_equal(into, image)
    assert not store.direct, "it is not tried again for every object"


async def test_a_file_system_without_direct_io(
    ramfs: Path | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ramfs is None:
        # What such a file system answers, where none can be mounted.
        call = fcntl.fcntl

        def refusing(fd: int, command: int, argument: int = 0) -> int:
            if command == fcntl.F_SETFL and argument & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return call(fd, command, argument)

        monkeypatch.setattr(fcntl, "fcntl", refusing)
    root = ramfs or tmp_path
    await round_trip(local(root), root)


@pytest.mark.parametrize("name", ["write", "readv"])
async def test_a_device_that_takes_the_flag_but_not_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Some refuse only what they are given: a block of 64 KiB, or a file on a network."""
    call = getattr(os, name)

    def refusing(fd: int, data: Any) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        count: int = call(fd, data)
        return count

    monkeypatch.setattr(os, name, refusing)
    await round_trip(local(tmp_path), tmp_path)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
async def test_another_error_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def failing(fd: int, data: Any) -> int:
        raise OSError(code, os.strerror(code))

    tier = UrlObjects(f"file://{tmp_path}")
    store = local(tmp_path)
    tier.store = store
    image = filled(DIRECT_BYTES_MIN)
    monkeypatch.setattr(os, "write", failing)
    with pytest.raises(TierFull if code == errno.ENOSPC else TierUnavailable):
        await tier.write(NAME, image)
    monkeypatch.undo()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    await tier.write(NAME, image)
    assert store.direct

"""The object tier on a folder: partial, failed and simultaneous writes and reads."""

# ruff: noqa: ASYNC110, ASYNC240 - threads are polled, and test files are small

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from tests.tiers.tier_suite import NAME, image_of, sized, slot
from tiers.errors import ImageTruncated, TierFull, TierUnavailable
from tiers.store.access import Access, Folder
from tiers.store.folder import TEMPORARY_SECONDS_MAX
from tiers.store.object_tier import UrlObjects


class TestLocalFolder:
    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        return tmp_path / "store"

    @pytest.fixture
    def tier(self, root: Path) -> UrlObjects:
        return UrlObjects(f"file://{root}")

    async def test_a_path_without_a_scheme_is_a_folder(self, root: Path) -> None:
        await UrlObjects(str(root)).write(NAME, image_of(10))
        assert (root / NAME).read_bytes() == image_of(10).tobytes()

    @pytest.mark.parametrize(
        ("code", "kind", "words"),
        [
            (errno.ENOSPC, TierFull, "no space is left"),
            (errno.EDQUOT, TierFull, "no space is left"),
            (errno.EROFS, TierUnavailable, "cannot be written"),
            (errno.EACCES, TierUnavailable, "cannot be written"),
            (errno.EIO, TierUnavailable, "failed"),
        ],
    )
    async def test_a_write_that_fails_leaves_no_file(
        self,
        tier: UrlObjects,
        root: Path,
        monkeypatch: pytest.MonkeyPatch,
        code: int,
        kind: type[Exception],
        words: str,
    ) -> None:
        await tier.write(NAME, image_of(10))
        pieces = iter([100])
        write = os.write

        def full(fd: int, data: memoryview) -> int:
            for piece in pieces:
                return write(fd, data[:piece])
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, "write", full)
        with pytest.raises(kind, match=words) as info:
            await tier.write(NAME, image_of(100_000))
        monkeypatch.undo()
        assert str(root) in str(info.value)
        if isinstance(info.value, TierUnavailable):
            assert info.value.retryable is (code == errno.EIO)
        assert [path.name for path in root.rglob("*") if path.is_file()] == [Path(NAME).name]
        assert await tier.read(NAME, slot()) == 10

    async def test_a_folder_that_cannot_be_written_fails_the_probe(
        self, tier: UrlObjects, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # The tests may run as root, for whom no mode forbids anything.
        opened = os.open

        def refuse(path: str, flags: int, *mode: int) -> int:
            if flags & os.O_CREAT:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            return opened(path, flags, *mode)

        monkeypatch.setattr(os, "open", refuse)
        with pytest.raises(TierUnavailable, match="owner or mode") as info:
            await tier.probe()
        assert not info.value.retryable
        assert str(root) in str(info.value)

    async def test_a_mount_without_hard_links_passes_the_probe(
        self, tier: UrlObjects, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(_source: str, _target: str) -> None:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

        monkeypatch.setattr(os, "link", refuse)
        assert (await tier.probe()).creates is False
        assert [path for path in root.rglob("*") if path.is_file()] == []

    async def test_a_file_where_the_folder_should_be(self, tier: UrlObjects, root: Path) -> None:
        root.write_text("a file")
        with pytest.raises(TierUnavailable, match="a file stands where a folder is needed"):
            await tier.probe()

    async def test_a_folder_that_cannot_be_made_is_not_a_miss(self, tmp_path: Path) -> None:
        (tmp_path / "dangling").symlink_to(tmp_path / "no" / "where")
        with pytest.raises(TierUnavailable) as info:
            await UrlObjects(f"file://{tmp_path}/dangling").write(NAME, image_of(10))
        assert not info.value.retryable

    async def test_pieces_of_a_write_and_a_read_are_put_together(
        self, tier: UrlObjects, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write, readv = os.write, os.readv
        monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:1000]))
        monkeypatch.setattr(os, "readv", lambda fd, views: readv(fd, [views[0][:999]]))
        into = slot()
        await tier.write(NAME, image_of(10_000))
        assert await tier.read(NAME, into) == 10_000
        assert np.array_equal(into[:10_000], image_of(10_000))

    async def test_writers_of_one_name_have_files_of_their_own(
        self, tier: UrlObjects, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begun, release = threading.Event(), threading.Event()
        write = os.write

        def held(fd: int, data: memoryview) -> int:
            if len(data) == 1000:
                begun.set()
                release.wait(60)
            return write(fd, data)

        monkeypatch.setattr(os, "write", held)
        into = slot()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(tier.write, NAME, image_of(1000))
            while not begun.is_set():
                await anyio.sleep(0.001)
            await tier.write(NAME, image_of(500))
            assert await tier.read(NAME, into) == 500
            release.set()
        assert await tier.read(NAME, into) == 1000
        assert [path.name for path in root.rglob("*") if path.is_file()] == [Path(NAME).name]

    async def test_a_file_that_shrinks_while_it_is_read(
        self, tier: UrlObjects, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await tier.write(NAME, image_of(10_000))
        monkeypatch.setattr(os, "readv", lambda fd, views: 0)
        with pytest.raises(ImageTruncated, match="ended at 0 of 10000"):
            await tier.read(NAME, slot())

    async def test_an_empty_file_is_no_image(self, tier: UrlObjects, root: Path) -> None:
        (root / NAME).parent.mkdir(parents=True)
        (root / NAME).touch()
        with pytest.raises(ImageTruncated, match="empty"):
            await tier.read(NAME, slot())

    @pytest.mark.promise("folder-links")
    async def test_temporary_files_are_not_listed_and_old_ones_are_removed(
        self, tier: UrlObjects, root: Path
    ) -> None:
        await tier.write(NAME, image_of(10))
        young, old = (root / f"{NAME}.{digit * 16}.tmp" for digit in "12")
        # In a shared folder another user may put a link in the place of a folder.
        foreign = root / "a file of others.tmp"
        long_ago = time.time() - 2 * TEMPORARY_SECONDS_MAX
        for path in (young, old, foreign):
            path.write_bytes(b"x")
        for path in (old, foreign):
            os.utime(path, (long_ago, long_ago))
        assert sized(await tier.list("")) == [(NAME, 10)]
        assert young.exists()
        assert not old.exists()
        assert foreign.exists()

    async def test_a_folder_that_is_only_readable_is_listed_with_old_temporary_files(
        self, tier: UrlObjects, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(path: str) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

        await tier.write(NAME, image_of(10))
        old = root / f"{NAME}.{'0' * 16}.tmp"
        old.write_bytes(b"x")
        os.utime(old, (0, 0))
        monkeypatch.setattr(os, "unlink", refuse)
        assert sized(await tier.list("")) == [(NAME, 10)]
        monkeypatch.undo()

    @pytest.mark.promise("folder-modes")
    @pytest.mark.parametrize(
        ("shared", "file_mode", "folder_mode"), [(False, 0o600, 0o700), (True, 0o640, 0o750)]
    )
    async def test_objects_are_private_unless_the_folder_is_shared(
        self, root: Path, shared: bool, file_mode: int, folder_mode: int
    ) -> None:
        """They were 0644 beside a pool of 0600."""
        tier = UrlObjects(f"file://{root}", Access(folder=Folder(shared=shared)))
        before = os.umask(0o027)
        try:
            await tier.write(NAME, image_of(10))
            await tier.quarantine(NAME)
        finally:
            os.umask(before)
        for path in (root, *root.rglob("*")):
            wanted = folder_mode if path.is_dir() else file_mode
            assert path.stat().st_mode & 0o777 == wanted, path

    @pytest.mark.promise("folder-unmounted")
    async def test_nothing_is_written_or_missing_below_an_unmounted_mount_point(
        self, tier: UrlObjects, root: Path
    ) -> None:
        """A folder that is not mounted any more was written to the disk below, and listed empty."""
        await tier.write(NAME, image_of(10))
        mounted = root.with_name("mounted")
        root.rename(mounted)
        root.mkdir()
        for call in (
            tier.write(NAME, image_of(10)),
            tier.read(NAME, slot()),
            tier.list(""),
            tier.delete([NAME]),
            tier.quarantine(NAME),
        ):
            with pytest.raises(TierUnavailable, match="is it still mounted") as info:
                await call
            assert info.value.retryable
        assert list(root.iterdir()) == []
        root.rmdir()
        mounted.rename(root)
        assert await tier.read(NAME, slot()) == 10
        await tier.write(NAME, image_of(20))

    async def test_a_folder_that_was_removed_is_made_again(
        self, tier: UrlObjects, root: Path
    ) -> None:
        await tier.write(NAME, image_of(10))
        shutil.rmtree(root)
        assert await tier.list("") == []
        await tier.write(NAME, image_of(10))
        assert await tier.read(NAME, slot()) == 10

    @pytest.mark.promise("folder-unmounted")
    async def test_a_folder_within_a_mount_that_is_gone_is_not_made_again(
        self, tier: UrlObjects, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await tier.write(NAME, image_of(10))
        shutil.rmtree(root)
        stat = os.stat

        def elsewhere(path: str | Path, *args: Any, **options: Any) -> os.stat_result:
            found = stat(path, *args, **options)
            if path != str(root.parent):
                return found
            # The device is the third number.
            return os.stat_result((*found[:2], found.st_dev + 1, *found[3:10]))

        monkeypatch.setattr(os, "stat", elsewhere)
        with pytest.raises(TierUnavailable, match="is it still mounted"):
            await tier.write(NAME, image_of(10))
        monkeypatch.undo()
        assert not root.exists()

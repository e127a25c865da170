"""A folder in which somebody put other things than files: pipes, links, sockets, folders."""

# ruff: noqa: ASYNC240 - test files are small

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final

import anyio
import pytest

from tests.tiers.tier_suite import NAME, image_of, sized, slot
from tiers.errors import ChunkMissing, ObjectDenied, ObjectOdd, TierUnavailable
from tiers.store.object_tier import UrlObjects

READERS: Final = 4
ODD: Final[dict[str, Callable[[Path], None]]] = {
    "pipe": os.mkfifo,
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to nowhere": lambda path: path.symlink_to("nowhere"),
    "link to a file": lambda path: path.symlink_to("/etc/hostname"),
    "socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
    "folder": Path.mkdir,
}

pytestmark = pytest.mark.promise("odd-entries")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def tier(root: Path) -> UrlObjects:
    return UrlObjects(f"file://{root}")


def put_odd(root: Path, kind: str, name: str = NAME) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    ODD[kind](path)
    return path


@pytest.mark.parametrize("kind", [kind for kind in ODD if kind != "folder"])
async def test_an_irregular_file_is_refused_and_can_be_quarantined(
    tier: UrlObjects, root: Path, kind: str
) -> None:
    path = put_odd(root, kind)
    with anyio.fail_after(20):
        # As many as there are threads, and again: none of them is left behind.
        for _ in range(2 * READERS):
            with pytest.raises(ObjectOdd, match="not of a regular file"):
                await tier.read(NAME, slot())
        await tier.quarantine(NAME)
        assert not os.path.lexists(path)
        assert os.path.lexists(root / "quarantine" / NAME)
        await tier.write(NAME, image_of(10))
        assert await tier.read(NAME, slot()) == 10


@pytest.mark.parametrize("kind", list(ODD))
async def test_a_listing_continues_after_an_irregular_entry(
    tier: UrlObjects, root: Path, kind: str
) -> None:
    await tier.write(NAME, image_of(10))
    put_odd(root, kind, f"{NAME}-odd")
    put_odd(root, kind, "odd")
    with anyio.fail_after(20):
        assert sized(await tier.list("")) == [(NAME, 10)]
    assert tier.entries_skipped == (0 if kind == "folder" else 2)


@pytest.mark.parametrize("code", [errno.ELOOP, errno.ENAMETOOLONG, errno.EACCES, errno.ENOTDIR])
async def test_a_listing_continues_after_a_folder_that_cannot_be_opened(
    tier: UrlObjects, root: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    await tier.write(NAME, image_of(10))
    (root / "locked").mkdir()
    scandir = os.scandir

    def refuse(path: str) -> object:
        if path.endswith("/locked"):
            raise OSError(code, os.strerror(code), path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert sized(await tier.list("")) == [(NAME, 10)]
    assert tier.entries_skipped == 1


class Unwell:
    """An entry that cannot be examined."""

    def __init__(self, entry: os.DirEntry[str], code: int, *, by_kind: bool) -> None:
        self.name, self.path, self._entry = entry.name, entry.path, entry
        self._code = code if entry.name.startswith("unwell") else 0
        self._by_kind = by_kind

    def is_dir(self, *, follow_symlinks: bool) -> bool:
        if self._by_kind and self._code:
            # A file system that does not say what an entry is has to be asked.
            raise OSError(self._code, os.strerror(self._code))
        return self._entry.is_dir(follow_symlinks=follow_symlinks)

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        if self._code:
            raise OSError(self._code, os.strerror(self._code))
        return self._entry.stat(follow_symlinks=follow_symlinks)


class Listed(list[Unwell]):
    def __enter__(self) -> Listed:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("by_kind", [False, True])
@pytest.mark.parametrize(
    ("code", "entries", "skipped"),
    [
        (errno.EIO, 1, 1),
        (errno.EIO, 2, None),
        (errno.EUCLEAN, 1, 1),
        (errno.EACCES, 3, 3),
        (errno.ENOENT, 3, 0),
        (errno.ESTALE, 3, 0),
        (errno.ETIMEDOUT, 1, None),
        (errno.ENOTCONN, 1, None),
    ],
)
async def test_listing_omits_a_damaged_entry_and_fails_where_the_store_does(
    tier: UrlObjects,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    entries: int,
    skipped: int | None,
    *,
    by_kind: bool,
) -> None:
    """Who lists takes an object for gone that the listing omits."""
    await tier.write(NAME, image_of(10))
    for number in range(entries):
        (root / f"unwell-{number}").touch()
    scandir = os.scandir
    monkeypatch.setattr(
        os,
        "scandir",
        lambda path: Listed(Unwell(entry, code, by_kind=by_kind) for entry in scandir(path)),
    )
    if skipped is None:
        with pytest.raises(TierUnavailable):
            await tier.list("")
    else:
        assert sized(await tier.list("")) == [(NAME, 10)]
        assert tier.entries_skipped == skipped


async def test_a_folder_in_an_objects_place_is_no_object(tier: UrlObjects, root: Path) -> None:
    put_odd(root, "folder")
    with pytest.raises(ChunkMissing):
        await tier.read(NAME, slot())


@pytest.mark.parametrize("kind", ["link to itself", "pipe"])
async def test_a_file_in_place_of_a_folder_has_no_objects_below(
    tier: UrlObjects, root: Path, kind: str
) -> None:
    put_odd(root, kind, str(Path(NAME).parent))
    with pytest.raises(ChunkMissing):
        await tier.read(NAME, slot())


async def test_an_object_of_another_user_is_denied_with_the_remedy(
    tier: UrlObjects, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The tests may run as root, for whom no mode forbids anything.
    await tier.write(NAME, image_of(10))
    opened = os.open

    def refuse(path: str, flags: int, *mode: int) -> int:
        if path.endswith(NAME):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return opened(path, flags, *mode)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ObjectDenied, match=r"store\.folder\.shared"):
        await tier.read(NAME, slot())

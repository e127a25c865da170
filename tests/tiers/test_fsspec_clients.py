"""What the clients add to fsspec: a slot as a body, listings that go on, times of moving."""

from __future__ import annotations

import datetime as dt
import os
import time
from typing import Any, ClassVar

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.tiers.tier_suite import image_of
from tiers.store.fsspec_client import _S3, SlotBody, _SyncFilesystem


class TestSlotBody:
    def test_it_reads_as_a_file_does(self) -> None:
        image = image_of(1000)
        body, whole = SlotBody(image), image.tobytes()
        assert len(body) == 1000
        assert body.read(10) == whole[:10]
        assert body.tell() == 10
        assert body.read() == whole[10:]
        assert body.read(10) == b""
        assert body.seek(-5, os.SEEK_END) == 995
        assert body.read(100) == whole[995:]
        assert body.seek(0) == 0
        assert body.read(None) == whole
        body.seek(7)
        assert body.seek(3, os.SEEK_CUR) == 10
        with body.getbuffer() as view:
            assert view.nbytes == 1000

    def test_once_detached_it_holds_nothing(self) -> None:
        body = SlotBody(image_of(1000))
        body.detach_slot()
        for touch in (body.read, body.getbuffer):
            with pytest.raises(ValueError, match="given back"):
                touch()


class Deaf:
    """A bucket of s3fs on a server that does not know StartAfter: two names a page."""

    keys = tuple(f"p/a/{number}" for number in range(6))

    def __init__(self) -> None:
        self.pages = 0

    async def _call_s3(self, verb: str, **asked: Any) -> dict[str, Any]:
        assert verb == "list_objects_v2"
        self.pages += 1
        first = int(asked.get("ContinuationToken", "0"))
        if "Delimiter" in asked:
            return {"CommonPrefixes": [{"Prefix": f"p/a/{letter}/"} for letter in "bcd"]}
        then = dt.datetime.now(dt.UTC)
        return {
            "Contents": [
                {"Key": key, "Size": 7, "LastModified": then}
                for key in self.keys[first : first + 2]
            ],
            "IsTruncated": first + 2 < len(self.keys),
            "NextContinuationToken": str(first + 2),
        }


class TestListing:
    @pytest.mark.parametrize(("names_max", "pages"), [(2, 3), (None, 3), (1, 2)])
    async def test_what_a_server_gives_of_before_the_name_is_left_out(
        self, names_max: int | None, pages: int
    ) -> None:
        fs = Deaf()
        found = await _S3(fs, "bucket/p").find(
            "a", start_after="a/2", deep=True, names_max=names_max
        )
        assert [one.name for one in found] == ["a/3", "a/4", "a/5"][: 1 if names_max == 1 else 3]
        assert fs.pages == pages

    async def test_folders_too(self) -> None:
        found = await _S3(Deaf(), "bucket/p").find(
            "a", start_after="a/b/", deep=False, names_max=None
        )
        assert [one.name for one in found] == ["a/c/", "a/d/"]


class Renames(MemoryFileSystem):  # type: ignore[misc] # fsspec has no types
    """As sftp is: a move is a rename, which keeps the times, and there is no copying."""

    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    cachable = False

    def mv(self, path1: str, path2: str, **_: Any) -> None:
        self.store[path2] = self.store.pop(path1)

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        raise NotImplementedError


class TestMoving:
    @pytest.mark.parametrize("kind", [MemoryFileSystem, Renames])
    async def test_what_is_moved_is_as_old_as_the_moving(
        self, kind: type[MemoryFileSystem]
    ) -> None:
        root = "/moved"
        fs = kind(skip_instance_cache=True)
        files = _SyncFilesystem(fs, root)
        await files.put("a/b", image_of(3_000_000), create=False)
        fs.store[f"{root}/a/b"].created = dt.datetime(2001, 1, 1, tzinfo=dt.UTC)
        began = time.time()
        await files.move("a/b", "quarantine/a/b")
        [found] = await files.find("", start_after="", deep=True, names_max=None)
        assert (found.name, found.size_bytes) == ("quarantine/a/b", 3_000_000)
        assert found.modified_seconds >= began
        assert fs.cat_file(f"{root}/quarantine/a/b") == image_of(3_000_000).tobytes()
        with pytest.raises(FileNotFoundError):
            await files.move("a/b", "quarantine/a/b")
        assert len(await files.find("", start_after="", deep=True, names_max=None)) == 1
        fs.rm(root, recursive=True)

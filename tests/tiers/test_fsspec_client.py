"""The fsspec adapter: times of moving, and drivers whose create is not atomic."""

from __future__ import annotations

import datetime as dt
import secrets
import time
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem

from tests.tiers.tier_suite import NAME, image_of
from tiers.errors import TierUnavailable
from tiers.store.fsspec_client import FsspecClient
from tiers.store.object_tier import UrlObjects


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
    async def test_a_move_sets_the_time(self, kind: type[MemoryFileSystem]) -> None:
        root = "/moved"
        fs = kind(skip_instance_cache=True)
        files = FsspecClient(fs, root, creates=True)
        await files.write("a/b", image_of(3_000_000))
        fs.store[f"{root}/a/b"].created = dt.datetime(2001, 1, 1, tzinfo=dt.UTC)
        began = time.time()
        await files.move("a/b", "quarantine/a/b")
        [found] = await files.list("")
        assert (found.name, found.size_bytes) == ("quarantine/a/b", 3_000_000)
        assert found.modified_seconds >= began
        assert fs.cat_file(f"{root}/quarantine/a/b") == image_of(3_000_000).tobytes()
        with pytest.raises(FileNotFoundError):
            await files.move("a/b", "quarantine/a/b")
        assert len(await files.list("")) == 1
        fs.rm(root, recursive=True)


class LooksFirst(MemoryFileSystem):  # type: ignore[misc] # fsspec has no types
    """As sftp is: fsspec's default looks whether the name is taken, and then writes."""

    protocol = "looksfirst"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    pipe_file = AbstractFileSystem.pipe_file


async def test_a_create_that_is_not_atomic_is_refused() -> None:
    fsspec.register_implementation("looksfirst", LooksFirst, clobber=True)
    tier = UrlObjects(f"looksfirst://{secrets.token_hex(6)}")
    abilities = await tier.probe()
    assert not abilities.creates
    with pytest.raises(TierUnavailable, match="no atomic create") as info:
        await tier.write(NAME, image_of(10), create=True)
    assert (info.value.retryable, info.value.cause) == (False, "unsupported")
    assert await tier.list("") == []

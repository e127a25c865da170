"""The fsspec adapter: times of moving, creates that are not atomic, calls that hang, tokens."""

from __future__ import annotations

import datetime as dt
import secrets
import threading
import time
from typing import TYPE_CHECKING, Any, ClassVar

import anyio
import fsspec
import google.auth.credentials
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem

from tests.faulty_proxy import faulty_proxy
from tests.object_servers import place
from tests.tiers.tier_suite import NAME, image_of, slot
from tests.tiers.wire import replaced, tier_of
from tiers.errors import TierExpired, TierUnavailable
from tiers.store.fsspec_client import FsspecClient
from tiers.store.middleware import Deadline
from tiers.store.object_tier import UrlObjects

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.object_servers import GcsServer


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


class Hangs(MemoryFileSystem):  # type: ignore[misc] # fsspec has no types
    """A double of sftp, which has no timeouts: while its server is silent no call ends."""

    protocol = "hangs"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    answering = threading.Event()
    using: ClassVar[list[str]] = []
    used_at_once: ClassVar[list[int]] = []

    def _ask(self, verb: str) -> None:
        self.using.append(verb)
        self.used_at_once.append(len(self.using))
        self.answering.wait(20)
        self.using.remove(verb)

    def cat_file(self, *args: Any, **options: Any) -> Any:
        self._ask("read")
        return super().cat_file(*args, **options)

    def pipe_file(self, *args: Any, **options: Any) -> None:
        self._ask("write")
        super().pipe_file(*args, **options)

    def find(self, *args: Any, **options: Any) -> Any:
        self._ask("list")
        return super().find(*args, **options)

    def rm_file(self, path: str) -> None:
        self._ask("delete")
        super().rm_file(path)

    def cp_file(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError

    def open(self, *args: Any, **options: Any) -> Any:
        self._ask("copy")
        return super().open(*args, **options)


@pytest.mark.parametrize("hanging", ["read", "write", "list", "delete", "copy"])
async def test_a_hanging_call_ends_at_its_deadline(hanging: str) -> None:
    fsspec.register_implementation("hangs", Hangs, clobber=True)
    Hangs.answering.set()
    tier = UrlObjects(f"hangs://{secrets.token_hex(6)}")
    await tier.write(NAME, image_of(10))
    hasty, into, image = Deadline(tier, seconds_max=0.1), slot(), image_of(20)
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "read": lambda: hasty.read(NAME, into),
        "write": lambda: hasty.write(NAME, image),
        "list": lambda: hasty.list(""),
        "delete": lambda: hasty.delete([NAME]),
        "copy": lambda: hasty.quarantine(NAME),
    }
    Hangs.used_at_once.clear()
    Hangs.answering.clear()
    before = into.copy()
    try:
        # On a busy machine the deadline may pass before the driver is called.
        while not Hangs.used_at_once:
            with pytest.raises(TierExpired, match="not done after"):
                await calls[hanging]()
        # The others wait for the driver, which one thread may use.
        for call in calls.values():
            with pytest.raises(TierExpired, match="not done after"):
                await call()
            assert Hangs.using == [hanging]
        # What the caller has next in its memory is neither written nor overwritten.
        image[:] = 0
    finally:
        Hangs.answering.set()
    with anyio.fail_after(30):
        await tier.write("a/b", image_of(30))
        assert await tier.read("a/b", slot()) == 30
    if hanging == "write":
        assert await tier.read(NAME, into) == 20
        assert (into[:20] == image_of(20)).all()
    else:
        assert (into == before).all()
    assert set(Hangs.used_at_once) == {1}
    await tier.close()


class Renewed(google.auth.credentials.Credentials):
    """A double of Google's credentials. Their token has expired, and to renew it blocks."""

    def __init__(self, lasts: dt.timedelta) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # google has few types
        self.lasts = lasts
        self.answering = threading.Event()
        self.begun: list[int] = []
        """The thread of each renewal."""
        self.ended = 0

    def refresh(self, _: object) -> None:
        self.begun.append(threading.get_ident())
        self.answering.wait(20)
        self.token = f"token-{len(self.begun)}"
        # Without a time zone, as google-auth has it.
        self.expiry = (dt.datetime.now(dt.UTC) + self.lasts).replace(tzinfo=None)
        self.ended += 1


class TestTokensOfGoogle:
    async def test_the_event_loop_goes_on_while_nothing_renews_them(self, gcs: GcsServer) -> None:
        credentials = Renewed(dt.timedelta(hours=1))
        access = gcs.access_at(backend="fsspec")
        access.storage_options["token"] = credentials
        tier = UrlObjects(place(gcs), access)
        hasty = Deadline(tier, seconds_max=0.1)

        async def expire() -> None:
            with pytest.raises(TierExpired, match="not done after"):
                await hasty.read(NAME, slot())

        try:
            while not credentials.begun:
                await expire()
            async with anyio.create_task_group() as tasks:
                for _ in range(5):
                    tasks.start_soon(expire)
            # Further requests do not fill the process with threads that wait.
            assert (len(credentials.begun), credentials.ended) == (1, 0)
        finally:
            credentials.answering.set()
        with anyio.fail_after(30):
            await tier.write(NAME, image_of(10))
            assert await tier.read(NAME, slot()) == 10
        assert credentials.ended == 1
        await tier.close()

    async def test_one_that_soon_expires_is_not_renewed_on_the_event_loop(
        self, gcs: GcsServer
    ) -> None:
        # gcsfs renews one in its last five minutes, and the metadata server may give the same.
        credentials = Renewed(dt.timedelta(minutes=4))
        credentials.answering.set()
        access = gcs.access_at(backend="fsspec")
        access.storage_options["token"] = credentials
        async with faulty_proxy(gcs.endpoint) as watch:
            access = replaced(access, endpoint=watch.endpoint)
            async with tier_of(place(gcs), access) as tier:
                await tier.write(NAME, image_of(10))
                assert await tier.read(NAME, slot()) == 10
            sent = [one.fields["authorization"] for one in watch.exchanges]
        assert sent == ["Bearer token-1", "Bearer token-2"]
        assert threading.get_ident() not in credentials.begun

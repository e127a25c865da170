"""The contract of an object tier, as tests that every backend and every wrapper passes.

A test module subclasses `TierSuite` and gives it a fixture `tier`: an empty `ObjectTier` that the
fixture closes. The suite asks for nothing but its verbs.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from typing import TYPE_CHECKING, Any, ClassVar

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from tiers.errors import ChunkMissing, ImageTruncated, ObjectExists
from tiers.store.client import PIECE_BYTES

if TYPE_CHECKING:
    from tiers.store.client import Bytes, Listing
    from tiers.store.object_tier import ObjectTier

NAME = "v1/0123456789abcdef/ab/abcd/0-8.0-4.arrow"
SLOT_BYTES = 3 * 65_536 + 4096


def image_of(size_bytes: int, seed: int = 0) -> Bytes:
    """Random bytes, the same for the same seed."""
    return np.random.default_rng(seed).integers(0, 256, size_bytes, dtype=np.uint8)


def sized(listing: Listing) -> list[tuple[str, int]]:
    """Names and sizes of a listing."""
    return [(name, size_bytes) for name, size_bytes, _ in listing]


def slot() -> Bytes:
    """A slot that holds a pattern, so that untouched bytes can be told."""
    return np.full(SLOT_BYTES, 0xA5, dtype=np.uint8)


class TierSuite:
    """Subclass it, and give it the fixture `tier`."""

    tells: ClassVar = True
    """Whether a read tells of what came; not where bytes are changed on their way, as tests do."""

    @pytest.fixture
    def tier(self) -> Any:
        raise NotImplementedError

    @pytest.mark.parametrize("size_bytes", [1, 4096, 100_001, SLOT_BYTES - 1, SLOT_BYTES])
    async def test_what_was_written_is_read(self, tier: ObjectTier, size_bytes: int) -> None:
        image, into = image_of(size_bytes), slot()
        await tier.write(NAME, image)
        assert await tier.read(NAME, into) == size_bytes
        assert np.array_equal(into[:size_bytes], image)
        assert np.array_equal(into[size_bytes:], slot()[size_bytes:])

    @pytest.mark.parametrize("size_bytes", [1, 100_001, 2 * PIECE_BYTES, 2 * PIECE_BYTES + 4097])
    async def test_seen_is_called_for_all_bytes_in_order(
        self, tier: ObjectTier, size_bytes: int
    ) -> None:
        image = image_of(size_bytes)
        await tier.write(NAME, image)
        # At a page's border, as slots are: then a folder reads directly.
        memory = np.zeros(size_bytes + 8192, dtype=np.uint8)
        into = memory[-memory.ctypes.data % 4096 :][: size_bytes + 4096]
        told: list[tuple[int, int, int]] = []
        wrong: list[tuple[int, int]] = []

        def seen(whole: int, first: int, last: int) -> None:
            if first == 0:
                told.clear()
            if not whole:
                return
            told.append((whole, first, last))
            if not np.array_equal(into[first:last], image[first:last]):
                wrong.append((first, last))

        assert await tier.read(NAME, into, seen=seen) == size_bytes
        assert not wrong, "a piece is there when it is told of"
        assert {whole for whole, _, _ in told} == ({size_bytes} if self.tells else set())
        edges = [first for _, first, _ in told] + [size_bytes] if told else []
        assert [last for _, _, last in told] == edges[1:]
        assert edges[:1] in ([], [0])
        assert np.array_equal(into[:size_bytes], image)

    async def test_writing_does_not_change_the_image(self, tier: ObjectTier) -> None:
        image = image_of(5000)
        image.flags.writeable = False
        await tier.write(NAME, image)
        assert np.array_equal(image, image_of(5000))

    async def test_slots_in_the_middle_of_a_pool(self, tier: ObjectTier) -> None:
        pool = np.zeros(3 * SLOT_BYTES, dtype=np.uint8)
        pool[SLOT_BYTES : SLOT_BYTES + 5000] = image_of(5000)
        await tier.write(NAME, pool[SLOT_BYTES : SLOT_BYTES + 5000])
        assert await tier.read(NAME, pool[2 * SLOT_BYTES :]) == 5000
        assert np.array_equal(pool[2 * SLOT_BYTES : 2 * SLOT_BYTES + 5000], image_of(5000))
        assert not pool[:SLOT_BYTES].any()

    async def test_a_second_write_replaces_the_first(self, tier: ObjectTier) -> None:
        await tier.write(NAME, image_of(9000, seed=1))
        await tier.write(NAME, image_of(5000, seed=2))
        into = slot()
        assert await tier.read(NAME, into) == 5000
        assert np.array_equal(into[:5000], image_of(5000, seed=2))

    async def test_a_missing_object_is_missing(self, tier: ObjectTier) -> None:
        into = slot()
        with pytest.raises(ChunkMissing, match=NAME):
            await tier.read(NAME, into)
        await tier.write(NAME, image_of(10))
        with pytest.raises(ChunkMissing):
            await tier.read("v1/0123456789abcdef/ab/abcd", into)
        assert np.array_equal(into, slot())

    async def test_an_object_longer_than_the_slot_is_refused(self, tier: ObjectTier) -> None:
        await tier.write(NAME, image_of(SLOT_BYTES + 1))
        with pytest.raises(ImageTruncated, match=NAME):
            await tier.read(NAME, slot())
        into = np.zeros(1, dtype=np.uint8)
        with pytest.raises(ImageTruncated):
            await tier.read(NAME, into)

    async def test_list_gives_names_and_sizes_below_a_folder(self, tier: ObjectTier) -> None:
        sizes = {"a/b/one": 1, "a/b/two": 2, "a/c/three": 3, "ab/four": 4, "five": 5}
        for name, size_bytes in sizes.items():
            await tier.write(name, image_of(size_bytes))
        assert dict(sized(await tier.list(""))) == sizes
        below_a = {name: size for name, size in sizes.items() if name.startswith("a/")}
        assert dict(sized(await tier.list("a"))) == below_a
        assert dict(sized(await tier.list("a/"))) == below_a
        assert sized(await tier.list("a/c")) == [("a/c/three", 3)]
        assert await tier.list("b") == []

    async def test_an_empty_tier_lists_nothing(self, tier: ObjectTier) -> None:
        assert await tier.list("") == []
        assert await tier.list("v1/0123456789abcdef") == []

    async def test_a_listing_has_times(self, tier: ObjectTier) -> None:
        before = time.time()
        await tier.write(NAME, image_of(10))
        [found] = await tier.list("")
        # Servers round to a second.
        assert before - 2 < found.modified_seconds < time.time() + 2

    async def test_list_begins_after_a_name(self, tier: ObjectTier) -> None:
        names = [f"log/{writer}/{number:04}" for writer in ("a", "a-b", "b") for number in range(4)]
        for name in names:
            await tier.write(name, image_of(1))

        async def after(prefix: str, name: str) -> list[str]:
            return sorted(one.name for one in await tier.list(prefix, start_after=name))

        assert await after("log/a", "log/a/0001") == ["log/a/0002", "log/a/0003"]
        assert await after("log/a", "log/a/0001.arrow") == ["log/a/0002", "log/a/0003"]
        assert await after("log/a", "log/a/0003") == []
        assert await after("log/b", "log/a/0003") == names[-4:]
        assert await after("log/c", "log/a/0001") == []

    async def test_list_in_parts(self, tier: ObjectTier) -> None:
        names = [f"v1/ab/ab{number:02x}/{rank}.arrow" for number in range(6) for rank in (0, 1)]
        for name in names:
            await tier.write(name, image_of(1))
        found: list[str] = []
        while part := sorted(
            one.name
            for one in await tier.list("v1/ab", start_after=found[-1] if found else "", names_max=5)
        ):
            assert part == names[len(found) :][: len(part)]
            found += part
        assert found == names
        # A name that is not there, right before one that is.
        rest = await tier.list("v1/ab", start_after=names[6][:-1], names_max=2)
        assert sorted(one.name for one in rest)[:2] == names[6:8]
        # A foreign one, as a listing may have had: what nobody could write here.
        for foreign, first in (("0.arrow~", 5), ("~x", 6)):
            rest = await tier.list("v1/ab", start_after=f"v1/ab/ab02/{foreign}", names_max=2)
            assert sorted(one.name for one in rest)[:2] == names[first : first + 2]
        assert await tier.list("v1/ab", start_after="v1/ab/~x", names_max=2) == []

    async def test_list_of_one_level_names_folders(self, tier: ObjectTier) -> None:
        for name in ("a/b/one", "a/b/c/two", "a/three", "ab/four"):
            await tier.write(name, image_of(7))
        assert sorted(sized(await tier.list("a", deep=False))) == [("a/b/", 0), ("a/three", 7)]
        assert sorted(sized(await tier.list("", deep=False))) == [("a/", 0), ("ab/", 0)]
        assert sized(await tier.list("a/b/c", deep=False)) == [("a/b/c/two", 7)]
        assert await tier.list("nowhere", deep=False) == []

    async def test_delete_takes_many_names_and_missing_ones(self, tier: ObjectTier) -> None:
        names = [f"many/{number:03}/x" for number in range(20)]
        async with anyio.create_task_group() as tasks:
            for name in (*names, "many/kept"):
                tasks.start_soon(tier.write, name, image_of(3))
        await tier.delete([*names[:15], "many/never-there", "nowhere/at-all"])
        await tier.delete(names)
        await tier.delete([])
        assert sized(await tier.list("")) == [("many/kept", 3)]
        await tier.write(names[0], image_of(3))
        assert len(await tier.list("many")) == 2

    async def test_writers_and_removers_of_a_folder_do_not_interfere(
        self, tier: ObjectTier
    ) -> None:
        async def churn(name: str) -> None:
            for _ in range(10):
                await tier.write(name, image_of(10))
                await tier.delete([name])

        async with anyio.create_task_group() as tasks:
            for number in range(4):
                tasks.start_soon(churn, f"deep/er/folder/{number}")
        assert await tier.list("") == []

    async def test_of_many_creators_one_wins(self, tier: ObjectTier) -> None:
        won: list[int] = []

        async def create(seed: int) -> None:
            with contextlib.suppress(ObjectExists):
                await tier.write(NAME, image_of(1000 + seed, seed), create=True)
                won.append(seed)

        async with anyio.create_task_group() as tasks:
            for seed in range(5):
                tasks.start_soon(create, seed)
        into = slot()
        size_bytes = await tier.read(NAME, into)
        # One at most: a wrapper that retries may have lost the winner's answer.
        assert won in ([], [size_bytes - 1000])
        assert np.array_equal(into[:size_bytes], image_of(size_bytes, size_bytes - 1000))
        with pytest.raises(ObjectExists, match=NAME):
            await tier.write(NAME, image_of(5), create=True)
        assert sized(await tier.list("")) == [(NAME, size_bytes)]
        await tier.write(NAME, image_of(5))
        assert await tier.read(NAME, into) == 5

    async def test_quarantine_moves_an_object(self, tier: ObjectTier) -> None:
        await tier.write(NAME, image_of(5000))
        [before] = await tier.list("v1")
        await tier.quarantine(NAME)
        with pytest.raises(ChunkMissing):
            await tier.read(NAME, slot())
        assert await tier.list("v1") == []
        assert sized(await tier.list("quarantine")) == [(f"quarantine/{NAME}", 5000)]
        # How long it is there is known: it is removed in the end.
        [moved] = await tier.list("quarantine")
        assert moved.modified_seconds >= before.modified_seconds > 0
        into = slot()
        assert await tier.read(f"quarantine/{NAME}", into) == 5000
        assert np.array_equal(into[:5000], image_of(5000))

    async def test_quarantine_of_a_missing_object_is_no_error(self, tier: ObjectTier) -> None:
        await tier.quarantine(NAME)
        for size_bytes in (100, 200):
            await tier.write(NAME, image_of(size_bytes))
            await tier.quarantine(NAME)
        await tier.quarantine(NAME)
        assert sized(await tier.list("")) == [(f"quarantine/{NAME}", 200)]

    @pytest.mark.parametrize(
        "name",
        [
            "",
            "/",
            "/etc/passwd",
            "../up",
            "a/../../up",
            "a//b",
            "a/",
            ".hidden",
            "a/.b",
            "a b",
            "a\nb",
            "a?versionId=1",
            "a\0b",
            "ä",
            "x" * 513,
        ],
    )
    async def test_a_name_outside_the_folder_is_refused(self, tier: ObjectTier, name: str) -> None:
        for attempt in (
            lambda: tier.write(name, image_of(10)),
            lambda: tier.read(name, slot()),
            lambda: tier.quarantine(name),
            lambda: tier.delete(["fine", name]),
        ):
            with pytest.raises(ValueError, match="name="):
                await attempt()
        if name.strip("/"):
            with pytest.raises(ValueError, match="name="):
                await tier.list(f"{name}/x")

    async def test_memory_of_the_wrong_kind_is_refused(self, tier: ObjectTier) -> None:
        wrong: list[Any] = [
            np.zeros(0, dtype=np.uint8),
            np.zeros((4, 4), dtype=np.uint8),
            np.zeros(16, dtype=np.uint8)[::2],
            np.zeros(16, dtype=np.int32),
        ]
        for memory in wrong:
            with pytest.raises(ValueError, match="image: must"):
                await tier.write(NAME, memory)
            with pytest.raises(ValueError, match="into: must"):
                await tier.read(NAME, memory)
        constant = slot()
        constant.flags.writeable = False
        with pytest.raises(ValueError, match="into: must be writeable"):
            await tier.read(NAME, constant)

    async def test_writers_of_one_name_do_not_mix(self, tier: ObjectTier) -> None:
        images = [image_of(100_000 + seed, seed) for seed in range(4)]
        async with anyio.create_task_group() as tasks:
            for image in images:
                tasks.start_soon(tier.write, NAME, image)
        into = slot()
        size_bytes = await tier.read(NAME, into)
        assert np.array_equal(into[:size_bytes], images[size_bytes - 100_000])
        assert sized(await tier.list("")) == [(NAME, size_bytes)]

    async def test_many_calls_side_by_side(self, tier: ObjectTier) -> None:
        async def round_trip(seed: int) -> None:
            image, into = image_of(20_000, seed), slot()
            await tier.write(f"many/{seed}", image)
            assert await tier.read(f"many/{seed}", into) == 20_000
            assert np.array_equal(into[:20_000], image)

        async with anyio.create_task_group() as tasks:
            for seed in range(16):
                tasks.start_soon(round_trip, seed)
        assert len(await tier.list("many")) == 16

    @pytest.mark.parametrize("checkpoints", [0, 1, 3, 10, 40])
    async def test_after_a_cancel_nobody_touches_the_memory(
        self, tier: ObjectTier, checkpoints: int
    ) -> None:
        original = image_of(SLOT_BYTES)
        image, into = original.copy(), slot()
        await tier.write(f"{NAME}.old", original)

        async def store() -> None:
            await tier.write(NAME, image)

        async def load() -> None:
            await tier.read(f"{NAME}.old", into)

        for work in (store, load):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(work)
                for _ in range(checkpoints):
                    await anyio.lowlevel.checkpoint()
                tasks.cancel_scope.cancel()
        # The slots are used for something else at once.
        image[:] = 0
        into[:] = 0x5A
        await anyio.sleep(0.02)
        assert np.all(into == 0x5A)
        # The write took place or it did not; SeaweedFS also keeps an empty object of a request
        # whose client went away, which reads as what it is.
        size_bytes = dict(sized(await tier.list("v1"))).get(NAME)
        assert size_bytes in {None, 0, SLOT_BYTES}
        if size_bytes == SLOT_BYTES:
            assert await tier.read(NAME, into) == SLOT_BYTES
            assert np.array_equal(into, original)
        elif size_bytes == 0:
            with pytest.raises(ImageTruncated, match="empty"):
                await tier.read(NAME, into)

    async def test_a_probe_passes_and_leaves_nothing(self, tier: ObjectTier) -> None:
        assert (await tier.probe()).creates
        assert (await tier.probe()).creates
        assert await tier.list("") == []

    async def test_names_of_real_length_fit(self, tier: ObjectTier) -> None:
        key = secrets.token_hex(32)
        name = f"v1/{key[:16]}/{key[:2]}/{key}/1000-1024.65000-65536.arrow"
        await tier.write(name, image_of(10))
        await tier.quarantine(name)
        assert sized(await tier.list("")) == [(f"quarantine/{name}", 10)]

    async def test_the_url_names_the_place(self, tier: ObjectTier) -> None:
        assert "://" in tier.url
        assert tier.url.endswith("://") or not tier.url.endswith("/")

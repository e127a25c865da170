"""Readers: what is new, what is broken, and what it costs."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, TypeVar

import pytest

from tests import places
from tests.faulty_tier import FaultRates, Faulty
from tests.tiers.catalog.kit import (
    FOLDER,
    encode_manifest,
    memory,
    new_rows,
    reader,
    row,
    write_many_files,
    writer,
)
from tests.tiers.tier_suite import image_of
from tiers.catalog.manifest import Counts, Manifest, Merged
from tiers.catalog.names import (
    LogName,
    log_name,
    manifest_name,
    parse_log,
    parse_manifest,
    snapshot_name,
)
from tiers.catalog.reader import CatalogReader
from tiers.catalog.rows import Row, digest_of, encode, rows_of
from tiers.errors import TierUnavailable
from tiers.store.middleware import Billed, Metered, Wrapper
from tiers.store.object_tier import ObjectTier, UrlObjects

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from tiers.store.middleware import Verb

T = TypeVar("T")


async def put_snapshot(tier: ObjectTier, manifest: Manifest, rows: list[Row]) -> Manifest:
    """A manifest that holds these rows, created with its snapshot."""
    body = encode(rows_of(rows))
    name = snapshot_name(FOLDER, manifest.generation, 0, digest_of(body))
    await tier.write(name, body)
    whole = Manifest(manifest.generation, (*manifest.snapshots, name), merged=manifest.merged)
    await tier.write(manifest_name(FOLDER, whole.generation), encode_manifest(whole), create=True)
    return whole


def lists(tier: Metered) -> int:
    return tier.counts["list"].calls


def reads(tier: Metered) -> int:
    return tier.counts["read"].calls


@pytest.mark.parametrize("page_names", [1000, 1])
async def test_what_is_new_comes_once_from_every_writer(
    monkeypatch: pytest.MonkeyPatch, page_names: int
) -> None:
    places.patch(monkeypatch, "CATALOG_PAGE_NAMES", page_names)
    tier = memory()
    first, second = writer(tier), writer(tier)
    one = reader(tier)
    assert await new_rows(one) == []
    first.append(row(1))
    second.append(row(2))
    await first.flush()
    await second.flush()
    assert sorted(await new_rows(one)) == [row(1), row(2)]
    for number in range(3, 9):
        first.append(row(number))
        await first.flush()
        assert await new_rows(one) == [row(number)]
    third = writer(tier)
    third.append(row(9))
    await third.flush()
    assert await new_rows(one) == [row(9)]
    assert await new_rows(one) == []
    assert len(await new_rows(reader(tier))) == 9


async def test_a_refresh_without_news_is_one_listing_and_no_read() -> None:
    tier = memory()
    for number in range(20):
        log = writer(tier)
        log.append(row(number))
        await log.flush()
    one = reader(tier)
    await new_rows(one)
    before = lists(tier), reads(tier)
    await new_rows(one)
    assert (lists(tier), reads(tier)) == (before[0] + 1, before[1])


async def test_many_files_are_listed_from_where_each_writer_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tier = memory()
    await write_many_files(tier)
    places.patch(monkeypatch, "CATALOG_PAGE_NAMES", 5)
    one = reader(tier)
    await new_rows(one)
    before = lists(tier), reads(tier)
    # The folder of manifests, that of logs, and one for each writer.
    assert await new_rows(one) == []
    assert (lists(tier), reads(tier)) == (before[0] + 5, before[1])


async def test_foreign_folders_beside_those_of_writers_are_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their names need not be such as a tier takes."""
    objects = UrlObjects(f"file://{tmp_path}")
    tier = Metered(objects, billed=Billed(objects))
    log = writer(tier)
    for number in range(6):
        log.append(row(number))
        await log.flush()
    for foreign in ("~x", ".snapshots", "README"):
        folder = tmp_path / FOLDER / "log" / foreign
        folder.mkdir()
        (folder / "file").write_bytes(b"not ours")
    places.patch(monkeypatch, "CATALOG_PAGE_NAMES", 2)
    one = reader(tier)
    assert len(await new_rows(one)) == 6
    log.append(row(6))
    await log.flush()
    before = lists(tier)
    assert await new_rows(one) == [row(6)]
    assert lists(tier) == before + 3


async def test_files_that_were_removed_are_not_counted_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tier = memory()
    log = writer(tier)
    places.patch(monkeypatch, "CATALOG_PAGE_NAMES", 2)
    one = reader(tier)
    for number in range(20):
        log.append(row(number))
        await log.flush()
    await new_rows(one)
    assert one.names_known == 20
    rows = [row(number) for number in range(20)]
    await put_snapshot(tier, Manifest(0, merged={log.writer: Merged(19, 0)}), rows)
    await tier.delete([found.name for found in await tier.list(f"{FOLDER}/log")])
    for _ in range(2):
        await new_rows(one)
    assert one.names_known == 2


async def test_broken_and_foreign_files_are_skipped_and_counted_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tier = memory()
    log = writer(tier)
    for number in range(3):
        log.append(row(number))
        await log.flush()
    names = sorted(found.name for found in await tier.list(FOLDER))
    body = image_of(5000)
    await tier.write(names[1], body)
    foreign = log_name(FOLDER, LogName("s" + "0" * 15, 0), digest_of(body))
    await tier.write(foreign, body)
    await tier.write(f"{FOLDER}/log/README.txt", body)
    await tier.write(f"{FOLDER}/manifest/000000000009", body)
    one = reader(tier)
    assert await new_rows(one) == [row(0), row(2)]
    assert one.counts.files_corrupt == 3
    assert await new_rows(one) == []
    assert "is ignored" in caplog.text
    # The manifest is looked at again: its name may be that of a whole one by then.
    assert one.counts.files_corrupt == 4


async def test_a_file_longer_than_any_is_not_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = memory()
    log = writer(tier)
    for number in range(100):
        log.append(row(number))
    await log.flush()
    # Written by somebody else, then: none is written that no reader accepts.
    places.patch(monkeypatch, "FILE_BYTES_MAX", 1000)
    one = reader(tier)
    assert await new_rows(one) == []
    assert one.counts.files_corrupt == 1


async def test_a_store_that_fails_costs_a_refresh_and_no_rows() -> None:
    inner = memory()
    log = writer(inner)
    for number in range(10):
        log.append(row(number))
        await log.flush()
    one = reader(Faulty(inner, seed=2, rates=FaultRates(unavailable=0.3)))
    found: list[Row] = []
    for _ in range(200):
        try:
            async for rows in one.changes():
                found += [rows.row(index) for index in range(len(rows))]
        except TierUnavailable:
            continue
    assert found == [row(number) for number in range(10)]


async def test_a_new_reader_takes_the_snapshot_and_an_old_one_goes_on() -> None:
    tier = memory()
    log = writer(tier)
    for number in range(3):
        log.append(row(number))
        await log.flush()
    old, behind = reader(tier), reader(tier)
    await new_rows(old)
    log.append(row(3))
    await log.flush()
    merged = {log.writer: Merged(3, 0)}
    await put_snapshot(tier, Manifest(0, merged=merged), [row(number) for number in range(4)])
    log.append(row(4))
    await log.flush()
    assert await new_rows(old) == [row(3), row(4)]
    assert (old.manifest.generation, old.counts.reloads) == (0, 0)
    for found in await tier.list(f"{FOLDER}/log"):
        parsed = parse_log(FOLDER, found.name)
        if parsed and parsed.number < 4:
            await tier.delete([found.name])
    assert await new_rows(old) == []
    assert await new_rows(behind) == [row(number) for number in range(5)]
    assert await new_rows(reader(tier)) == [row(number) for number in range(5)]
    assert await new_rows(behind) == []


async def test_a_reader_that_slept_through_a_deletion_reads_the_snapshot() -> None:
    tier = memory()
    log = writer(tier)
    slept = reader(tier)
    log.append(row(0))
    await log.flush()
    await put_snapshot(tier, Manifest(0, merged={log.writer: Merged(0, 0)}), [row(0)])
    assert await new_rows(slept) == [row(0)]
    for number in range(1, 4):
        log.append(row(number))
        await log.flush()
    rows = [row(number) for number in range(4)]
    await put_snapshot(tier, Manifest(1, merged={log.writer: Merged(3, 1)}), rows)
    await tier.delete([found.name for found in await tier.list(f"{FOLDER}/log")])
    assert await new_rows(slept) == rows
    assert slept.counts.reloads == 1
    assert await new_rows(slept) == []


async def test_a_snapshot_that_was_replaced_while_reading_is_tried_again() -> None:
    tier = memory()
    manifest = await put_snapshot(tier, Manifest(0), [row(0)])
    await tier.delete(list(manifest.snapshots))
    one = reader(tier)
    with pytest.raises(TierUnavailable, match="newer manifest") as info:
        await new_rows(one)
    assert info.value.retryable
    await put_snapshot(tier, Manifest(1), [row(0), row(1)])
    assert await new_rows(one) == [row(0), row(1)]


async def test_a_damaged_manifest_leaves_the_one_before() -> None:
    tier = memory()
    await put_snapshot(tier, Manifest(0), [row(0)])
    await put_snapshot(tier, Manifest(1), [row(0), row(1)])
    names = [found.name for found in await tier.list(FOLDER)]
    [newest] = [name for name in names if parse_manifest(FOLDER, name) == 1]
    await tier.write(newest, image_of(200))
    one = reader(tier)
    assert await new_rows(one) == [row(0)]
    assert one.manifest.generation == 0


async def test_an_absent_catalog_is_doubted_once() -> None:
    tier = memory()
    one = reader(tier)
    assert not one.take_suspect()
    for doubted in (True, False):
        assert await new_rows(one) == []
        assert one.take_suspect() is doubted
    log = writer(tier)
    log.append(row(1))
    await log.flush()
    assert await new_rows(one) == [row(1)]
    other = reader(tier)
    await new_rows(other)
    assert not one.take_suspect()
    assert not other.take_suspect()


async def test_a_file_that_was_lost_is_waited_for_once_and_doubted() -> None:
    tier = memory()
    log = writer(tier)
    one = reader(tier)
    log.append(row(0))
    await log.flush()
    await new_rows(one)
    one.take_suspect()
    for number in range(1, 4):
        log.append(row(number))
        await log.flush()
    names = sorted(found.name for found in await tier.list(FOLDER))
    await tier.delete([names[1]])
    assert await new_rows(one) == []
    assert not one.take_suspect()
    assert await new_rows(one) == [row(2), row(3)]
    assert one.take_suspect()
    assert await new_rows(one) == []
    assert not one.take_suspect()


async def test_a_file_that_a_listing_did_not_show_yet_is_read_before_the_next() -> None:
    tier = memory()
    log = writer(tier)
    for number in range(2):
        log.append(row(number))
        await log.flush()
    names = sorted(found.name for found in await tier.list(FOLDER))
    late = encode(rows_of([row(0)]))
    await tier.delete([names[0]])
    one = reader(tier)
    assert await new_rows(one) == []
    await tier.write(names[0], late)
    assert await new_rows(one) == [row(0), row(1)]
    assert not one.take_suspect()


async def test_a_snapshot_that_is_lost_is_given_up_the_second_time() -> None:
    tier = memory()
    whole = await put_snapshot(tier, Manifest(0), [row(0)])
    whole = await put_snapshot(tier, Manifest(1, whole.snapshots), [row(1)])
    await tier.delete([whole.snapshots[0]])
    one = reader(tier)
    with pytest.raises(TierUnavailable):
        await new_rows(one)
    assert await new_rows(one) == [row(1)]
    assert one.take_suspect()
    assert await new_rows(one) == []


async def test_a_broken_file_is_a_doubt() -> None:
    tier = memory()
    log = writer(tier)
    log.append(row(0))
    await log.flush()
    [name] = [found.name for found in await tier.list(FOLDER)]
    await tier.write(name, image_of(100))
    one = reader(tier)
    assert await new_rows(one) == []
    assert one.take_suspect()
    await new_rows(one)
    assert not one.take_suspect()


async def test_a_log_file_that_was_damaged_after_it_was_merged_is_read_from_the_snapshots() -> None:
    tier = memory()
    log = writer(tier)
    counts = Counts()
    one = CatalogReader(tier, FOLDER, counts)
    told = row(0), row(1), row(1, size_bytes=0), row(2, parent=1)
    for number, announced in enumerate(told):
        log.append(announced)
        await log.flush()
        if number == 1:
            assert await new_rows(one) == [row(0), row(1)]
            one.take_suspect()
    names = sorted(found.name for found in await tier.list(FOLDER))
    for name in names[2:]:
        await tier.write(name, image_of(100))
    merged = Manifest(0, merged={log.writer: Merged(3, 0)})
    held = [row(0), row(1, size_bytes=0), row(2, parent=1)]
    await put_snapshot(tier, merged, held)
    assert await new_rows(one) == held
    assert counts.reloads == 1
    assert one.take_suspect()
    log.append(row(4))
    await log.flush()
    assert await new_rows(one) == [row(4)]
    assert counts.reloads == 1
    assert not one.take_suspect()


async def test_snapshots_in_place_of_a_damaged_log_file_are_read_again_after_a_failure() -> None:
    tier = memory()
    log = writer(tier)
    one = reader(tier)
    for number in range(2):
        log.append(row(number))
        await log.flush()
        if not number:
            await new_rows(one)
    names = sorted(found.name for found in await tier.list(FOLDER))
    await tier.write(names[1], image_of(100))
    whole = await put_snapshot(
        tier, Manifest(0, merged={log.writer: Merged(1, 0)}), [row(0), row(1)]
    )
    [snapshot] = whole.snapshots
    body = encode(rows_of([row(0), row(1)]))
    await tier.delete([snapshot])
    with pytest.raises(TierUnavailable):
        await new_rows(one)
    await tier.write(snapshot, body)
    assert await new_rows(one) == [row(0), row(1)]


class Vanishing(Wrapper):
    """Where files are deleted between a listing and the read of them, which may fail as well."""

    def __init__(self, inner: ObjectTier) -> None:
        super().__init__(inner)
        self.doomed: list[str] = []
        self.fails = False

    async def _around(self, verb: Verb, name: str, call: Callable[[], Awaitable[T]]) -> T:
        if verb == "read" and name in self.doomed:
            await self._inner.delete([name])
            if self.fails:
                raise TierUnavailable("away", retryable=True)
        return await call()


@pytest.mark.parametrize("fails", [False, True])
async def test_merged_files_that_vanish_before_they_are_read_are_read_from_the_snapshots(
    *, fails: bool
) -> None:
    """No newer manifest comes that would tell that they were not read, but a newer file."""
    tier = Vanishing(memory())
    tier.fails = fails
    log, one = writer(tier), reader(tier)
    for number in range(2):
        log.append(row(number))
        await log.flush()
        if not number:
            assert await new_rows(one) == [row(0)]
    [*_, last] = sorted(found.name for found in await tier.list(FOLDER))
    both = [row(0), row(1)]
    await put_snapshot(tier, Manifest(0, merged={log.writer: Merged(1, 0)}), both)
    tier.doomed = [last]
    with contextlib.suppress(TierUnavailable):
        assert await new_rows(one) == []
    log.append(row(2))
    await log.flush()
    assert await new_rows(one) == [*both, row(2)]
    assert await new_rows(one) == []
    assert not one.take_suspect()


async def test_manifests_that_are_counted_anew_are_followed() -> None:
    tier = memory()
    log, one = writer(tier), reader(tier)
    await put_snapshot(tier, Manifest(5), [row(0)])
    assert await new_rows(one) == [row(0)]
    await tier.delete([found.name for found in await tier.list(FOLDER)])
    log.append(row(1))
    await log.flush()
    await put_snapshot(tier, Manifest(0, merged={log.writer: Merged(0, 0)}), [row(0), row(1)])
    await tier.delete([found.name for found in await tier.list(f"{FOLDER}/log")])
    assert await new_rows(one) == [row(0), row(1)]
    assert one.manifest.generation == 0
    assert one.take_suspect()
    assert await new_rows(one) == []
    assert not one.take_suspect()

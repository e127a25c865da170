"""What tenants hold in the store: rows add to what a manifest says, which nobody goes through."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, cast

import pytest
from msgspec.structs import replace

from sidecar.catalog.service import Catalogs
from sidecar.config.store import StoreSettings
from sidecar.protocol import Role
from sidecar.sessions.namespaces import Realms
from tests.sidecar.client import attach_message
from tests.tiers.catalog.kit import memory
from tiers.catalog.log import new_writer
from tiers.catalog.manifest import EMPTY_MANIFEST, TENANTS_MAX, Manifest, Merged
from tiers.catalog.names import LogName
from tiers.catalog.rows import Row
from tiers.catalog.usage import Usage

if TYPE_CHECKING:
    from sidecar.sessions.namespaces import RealmLayout

A, B = b"tenant-a", b"tenant-b"
ONE = Usage(10, 1, 500, 1)


class Counted(dict[str, Usage]):
    """Says which tenants were looked up, and may not be gone through."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __iter__(self) -> NoReturn:
        raise AssertionError("a manifest names as many as 65,536 tenants")

    keys = values = items = cast("Any", __iter__)


def realm_of() -> RealmLayout:
    [realm] = Realms().join(attach_message(Role.SCHEDULER).parts)
    return realm


def settings(**changes: Any) -> StoreSettings:
    return StoreSettings(url="memory://", catalog_rows_max=1000, **changes)


@pytest.fixture
def catalogs() -> Catalogs:
    return Catalogs(memory(), settings())


def follow(catalogs: Catalogs, realm: RealmLayout, manifest: Manifest) -> None:
    catalogs.reader(realm).manifest = manifest


def test_a_manifest_sets_right_what_rows_added(catalogs: Catalogs) -> None:
    realm = realm_of()
    catalogs.count(realm, {A: ONE, B: Usage(7, 1, 300, 1)})
    catalogs.count(realm, {A: ONE})
    assert catalogs.usage(A) == Usage(20, 2, 500, 2)
    assert catalogs.total_usage == Usage(27, 3, 300, 3)
    tenants = {A.hex(): Usage(100, 9, 50, 9)}
    follow(
        catalogs,
        realm,
        replace(EMPTY_MANIFEST, generation=4, held=Usage(110, 10, 50), tenants=tenants),
    )
    # It counts from the next rows on, of whatever tenant, or of none.
    assert catalogs.usage(A) == Usage(20, 2, 500, 2)
    catalogs.count(realm, {})
    assert (catalogs.usage(A), catalogs.usage(B)) == (Usage(100, 9, 50, 9), Usage())
    catalogs.count(realm, {A: ONE, b"\0" * 8: ONE})
    assert catalogs.usage(A, realm.namespace_digest) == Usage(110, 10, 50, 10)
    assert catalogs.usage(b"") == ONE
    assert catalogs.usage(A, b"another") == Usage()
    assert catalogs.total_usage == Usage(130, 12, 50, 2)


@pytest.mark.promise("bucket-bounds")
def test_what_others_wrote_during_a_round_counts_on(catalogs: Catalogs) -> None:
    """It is not in the manifest that the round made, and was forgotten when that was read."""
    realm = realm_of()
    other = new_writer()
    for number in range(3):
        catalogs.count(realm, {A: ONE}, LogName(other, number))
    tenants = {A.hex(): Usage(100, 9, 50, 9)}
    merged = {other: Merged(1, 4)}
    manifest = replace(EMPTY_MANIFEST, generation=4, held=Usage(100, 9, 50, 9), tenants=tenants)
    follow(catalogs, realm, replace(manifest, merged=merged))
    catalogs.count(realm, {})
    assert (
        catalogs.usage(A)
        == catalogs.namespace_usage(realm.namespace_digest)
        == Usage(110, 10, 50, 10)
    )
    # What the manifest has is not counted again when its file is read after it.
    catalogs.count(realm, {A: ONE}, LogName(other, 1))
    assert catalogs.usage(A).objects == 10
    catalogs.count(realm, {A: ONE}, LogName(other, 3))
    assert catalogs.usage(A).objects == 11
    follow(catalogs, realm, replace(manifest, generation=5, merged={other: Merged(3, 5)}))
    catalogs.count(realm, {})
    assert catalogs.usage(A) == Usage(100, 9, 50, 9)


async def test_what_was_written_here_counts_at_once_and_once() -> None:
    store = memory()
    catalogs = Catalogs(store, settings())
    realm = realm_of()
    written = Row(b"k" * 32, "0-2.0-4", 0, 100, tenant=A)
    catalogs.announce_written(realm, written, later_than=0)
    assert catalogs.usage(A).size_bytes == catalogs.total_usage.size_bytes == 100
    assert catalogs.usage(A, realm.namespace_digest).objects == 1
    await catalogs.flush()
    catalogs.announce_written(realm, written._replace(key=b"l" * 32), later_than=0)
    assert catalogs.usage(A).size_bytes == 200
    # A manifest counts the file that was sent, and whatever others did.
    tenants = {A.hex(): Usage(150, 2, 50, 2)}
    writer = catalogs.writer_of(realm)
    assert writer is not None
    merged = {writer: Merged(0, 4)}
    follow(catalogs, realm, replace(EMPTY_MANIFEST, generation=4, tenants=tenants, merged=merged))
    catalogs.count(realm, {})
    assert catalogs.usage(A).size_bytes == 250
    # One that goes on before the next file is merged changes nothing of that.
    follow(catalogs, realm, replace(EMPTY_MANIFEST, generation=5, tenants=tenants, merged=merged))
    catalogs.count(realm, {})
    assert catalogs.usage(A).size_bytes == 250


def test_who_does_not_read_the_catalog_counts_nothing_for_ever() -> None:
    """What was collected since would count, too: nobody tells."""
    catalogs = Catalogs(memory(), settings(read="off"))
    catalogs.announce_written(realm_of(), Row(b"k" * 32, "0-2.0-4", 0, 100, tenant=A), later_than=0)
    assert catalogs.usage(A) == catalogs.total_usage == Usage()


def test_another_realm_of_a_namespace_counts_nothing_twice(catalogs: Catalogs) -> None:
    realms = Realms()
    [first] = realms.join(attach_message(Role.SCHEDULER).parts)
    [second] = realms.join(attach_message(Role.SCHEDULER, topology="another").parts)
    assert first.namespace_digest == second.namespace_digest
    catalogs.count(first, {A: ONE})
    catalogs.count(second, {A: ONE})
    assert catalogs.usage(A) == ONE


def test_noting_costs_what_is_noted(catalogs: Catalogs) -> None:
    realm = realm_of()
    tenants = Counted({number.to_bytes(8, "big").hex(): ONE for number in range(TENANTS_MAX)})
    follow(catalogs, realm, replace(EMPTY_MANIFEST, generation=1, tenants=tenants))
    for _ in range(3):
        catalogs.count(realm, {A: ONE})
    assert catalogs.usage(A) == Usage(30, 3, 500, 3)
    assert tenants.asked == {A.hex()}


async def test_a_forgotten_namespace_is_counted_from_the_start_when_it_comes_back() -> None:
    catalogs = Catalogs(memory(), settings())
    realm, row = realm_of(), Row(b"k" * 32, "0-2.0-4", 0, 100, tenant=A)
    catalogs.announce_written(realm, row, later_than=0)
    await catalogs.flush()
    before = catalogs.writer_of(realm)
    catalogs.count(realm, {A: ONE})
    catalogs.forget(realm, last=True)
    assert catalogs.usage(A) == catalogs.total_usage == Usage()
    assert (catalogs.files_written, catalogs.writer_of(realm)) == (1, None)
    again = realm_of()
    # What was written before comes as what another sidecar wrote does.
    catalogs.count(again, {A: Usage(110, 2, 500, 2)})
    catalogs.announce_written(again, row._replace(key=b"l" * 32), later_than=0)
    assert catalogs.usage(A).size_bytes == 210
    assert catalogs.writer_of(again) not in (None, before)
    await catalogs.flush()
    assert catalogs.files_written == 2


async def test_what_waits_to_be_announced_outlives_its_realms() -> None:
    catalogs = Catalogs(memory(), settings())
    realm, row = realm_of(), Row(b"k" * 32, "0-2.0-4", 0, 100, tenant=A)
    catalogs.announce_written(realm, row, later_than=0)
    catalogs.count(realm, {A: ONE})
    catalogs.forget(realm, last=True)
    assert (catalogs.rows_waiting, catalogs.usage(A).size_bytes) == (1, 100)
    # The namespace is back before its rows are written: its log goes on.
    writer = catalogs.writer_of(realm)
    again = realm_of()
    catalogs.count(again, {A: ONE})
    await catalogs.flush()
    assert (catalogs.writer_of(again), catalogs.usage(A).size_bytes) == (writer, 110)
    catalogs.announce_written(again, row._replace(key=b"l" * 32), later_than=0)
    catalogs.forget(again, last=True)
    await catalogs.flush()
    assert (catalogs.rows_waiting, catalogs.files_written) == (0, 2)
    assert (catalogs.writer_of(again), catalogs.total_usage) == (None, Usage())


def test_another_realm_of_a_namespace_goes_on_counting(catalogs: Catalogs) -> None:
    realms = Realms()
    [first] = realms.join(attach_message(Role.SCHEDULER).parts)
    [second] = realms.join(attach_message(Role.SCHEDULER, topology="another").parts)
    catalogs.count(first, {A: ONE})
    catalogs.forget(first, last=False)
    catalogs.count(second, {A: ONE})
    assert catalogs.usage(A) == Usage(20, 2, 500, 2)

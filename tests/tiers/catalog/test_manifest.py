"""Manifests: what foreign bytes may not get past."""

from __future__ import annotations

import numpy as np
import pytest

from tests.tiers.catalog.bucket import Bucket, View
from tests.tiers.catalog.kit import (
    FOLDER,
    decode_manifest,
    encode_manifest,
    new_rows,
    others_turns,
)
from tiers.catalog import manifest as manifests
from tiers.catalog.manifest import (
    TENANTS_MAX,
    TENANTS_PER_SLICE,
    Counts,
    Manifest,
    Merged,
    run_in_slices,
)
from tiers.catalog.names import manifest_name
from tiers.catalog.reader import CatalogReader
from tiers.catalog.rows import CatalogCorrupt, digest_of
from tiers.catalog.usage import Usage

MANY = {
    f"{number:016x}": Usage(10**9, number, 1_700_000_000_000_000)
    for number in range(8 * TENANTS_PER_SLICE)
}


@pytest.mark.promise("hostile-bucket")
@pytest.mark.parametrize(
    "manifest",
    [
        Manifest(3),
        Manifest(2, format=2),
        Manifest(2, ("v1/elsewhere/snapshot/x",)),
        Manifest(2, merged={"../../up": Merged(1, 1)}),
        Manifest(2, tenants={"zz": Usage(1)}),
        Manifest(2, held=Usage(-(1 << 60), 1, 1, 1)),
        Manifest(2, tenants={"0" * 16: Usage(1, -1)}),
        Manifest(2, held=Usage(10**30, 1, 1, 1)),
        Manifest(2, tenants={**MANY, "zz": Usage(1)}),
    ],
)
def test_manifests_that_claim_what_cannot_be(manifest: Manifest) -> None:
    with pytest.raises(CatalogCorrupt):
        decode_manifest(encode_manifest(manifest), FOLDER, 2)


def test_every_flipped_byte_of_a_manifest_is_found() -> None:
    whole = Manifest(
        2, merged={"s" + "0" * 15: Merged(4, 1)}, tenants={"0" * 16: Usage(5, 2, 7, 1)}
    )
    body = encode_manifest(whole)
    assert decode_manifest(body, FOLDER, 2) == whole
    for position in range(len(body)):
        damaged = body.copy()
        damaged[position] ^= 4
        with pytest.raises(CatalogCorrupt):
            decode_manifest(damaged, FOLDER, 2)
    for length in (0, 5, 33, len(body) - 1):
        with pytest.raises(CatalogCorrupt):
            decode_manifest(body[:length], FOLDER, 2)


@pytest.mark.parametrize("tenants", [b"[]", b"null", b'{"0":[1,1,1]', b'{"zz":[1,1,1,1]]}'])
def test_tenants_that_are_no_object_of_lists(tenants: bytes) -> None:
    text = b'{"generation":2,"tenants":%b}' % tenants
    body = digest_of(np.frombuffer(text, dtype=np.uint8)).encode() + b"\n" + text
    with pytest.raises(CatalogCorrupt):
        decode_manifest(np.frombuffer(body, dtype=np.uint8), FOLDER, 2)


def test_a_manifest_names_no_more_tenants_than_it_may() -> None:
    tenants = {f"{number:016x}": Usage(1) for number in range(TENANTS_MAX + 1)}
    with pytest.raises(CatalogCorrupt, match="more than"):
        decode_manifest(encode_manifest(Manifest(2, tenants=tenants)), FOLDER, 2)


async def test_many_tenants_are_read_and_written_in_turns_with_other_tasks() -> None:
    bucket, whole = Bucket(), Manifest(2, tenants=MANY)
    async with others_turns() as turns:
        before = turns()
        body = await run_in_slices(manifests.encode(whole))
        assert turns() - before >= 8
        await View(bucket).write(manifest_name(FOLDER, 2), body)
        one = CatalogReader(View(bucket), FOLDER, Counts())
        before = turns()
        assert await new_rows(one) == []
        assert turns() - before >= 8
    assert one.manifest == whole

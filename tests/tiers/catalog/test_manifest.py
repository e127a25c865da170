"""Manifests: what foreign bytes may not get past."""

from __future__ import annotations

import pytest

from tests.tiers.catalog.kit import FOLDER
from tiers.catalog import manifest as manifests
from tiers.catalog.census import Holding
from tiers.catalog.manifest import Manifest, Merged
from tiers.catalog.rows import CatalogCorrupt


@pytest.mark.parametrize(
    "manifest",
    [
        Manifest(3),
        Manifest(2, format=2),
        Manifest(2, ("v1/elsewhere/snapshot/x",)),
        Manifest(2, merged={"../../up": Merged(1, 1)}),
        Manifest(2, tenants={"zz": Holding(1)}),
    ],
)
def test_manifests_that_claim_what_cannot_be(manifest: Manifest) -> None:
    with pytest.raises(CatalogCorrupt):
        manifests.decode(manifests.encode(manifest), FOLDER, 2)


def test_every_flipped_byte_of_a_manifest_is_found() -> None:
    whole = Manifest(
        2, merged={"s" + "0" * 15: Merged(4, 1)}, tenants={"0" * 16: Holding(5, 2, 7, 1)}
    )
    body = manifests.encode(whole)
    assert manifests.decode(body, FOLDER, 2) == whole
    assert whole.after(tenants={}) == Manifest(3, merged=whole.merged)
    for position in range(len(body)):
        damaged = body.copy()
        damaged[position] ^= 4
        with pytest.raises(CatalogCorrupt):
            manifests.decode(damaged, FOLDER, 2)
    for length in (0, 5, 33, len(body) - 1):
        with pytest.raises(CatalogCorrupt):
            manifests.decode(body[:length], FOLDER, 2)

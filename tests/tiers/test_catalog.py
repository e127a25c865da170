"""Names of objects, and a catalog that lists them."""

from __future__ import annotations

import logging
import secrets

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiers.tier_suite import image_of
from tiers.catalog.listing import ListingCatalog
from tiers.catalog.names import namespace_prefix, object_name, parse_name
from tiers.filesystems import Found, Listing
from tiers.layout import HEADS_MAX, LAYERS_MAX, Segment
from tiers.objects import UrlObjects

NAMESPACE = bytes(range(32))
KEY = bytes(range(100, 132))
SEGMENT = Segment(first_layer=0, num_layers=8, first_head=4, num_heads=4)
WHOLE = object_name(NAMESPACE, KEY, SEGMENT)

segments = st.builds(
    Segment,
    first_layer=st.integers(0, LAYERS_MAX - 1),
    num_layers=st.integers(1, LAYERS_MAX),
    first_head=st.integers(0, HEADS_MAX - 1),
    num_heads=st.integers(1, HEADS_MAX),
)


def memory() -> UrlObjects:
    return UrlObjects(f"memory://{secrets.token_hex(6)}")


def test_the_name_is_this_one() -> None:
    # The format is shared with every other cluster on the bucket: a change here is a new format.
    assert f"v1/0001020304050607/64/{KEY.hex()}/0-8.4-8.arrow" == WHOLE
    assert WHOLE.startswith(f"{namespace_prefix(NAMESPACE)}/")


@given(namespace=st.binary(min_size=32, max_size=32), key=st.binary(min_size=32, max_size=32))
def test_every_key_comes_back(namespace: bytes, key: bytes) -> None:
    parts = parse_name(object_name(namespace, key, SEGMENT))
    assert parts == (namespace.hex()[:16], key, SEGMENT)


@given(segment=segments)
def test_every_segment_comes_back(segment: Segment) -> None:
    parts = parse_name(object_name(NAMESPACE, KEY, segment))
    assert parts is not None
    assert parts.segment == segment


@given(name=st.text(max_size=200))
def test_any_other_text_is_foreign_or_canonical(name: str) -> None:
    parts = parse_name(name)
    assert parts is None or name.startswith(f"v1/{parts.namespace}/")


@pytest.mark.parametrize(
    "name",
    [
        "",
        "README.md",
        f"quarantine/{WHOLE}",
        WHOLE.replace("v1/", "v2/"),
        WHOLE.upper(),
        WHOLE + "\n",
        WHOLE + ".tmp",
        WHOLE.removesuffix(".arrow"),
        WHOLE.replace("/64/", "/65/"),
        WHOLE.replace("/64/", "/"),
        WHOLE.replace("0-8.4-8", "8-0.4-8"),
        WHOLE.replace("0-8.4-8", "0-8"),
        WHOLE.replace("0-8.4-8", "00-8.4-8"),
        WHOLE.replace("0-8.4-8", "0-8.4-99999999"),
        WHOLE.replace("0-8.4-8", "../0-8.4-8"),
        WHOLE.replace(KEY.hex(), KEY.hex()[:-2]),
        WHOLE.replace("0001020304050607", "000102030405060"),
        "v1/" + "x" * 100_000,
    ],
)
def test_what_nobody_here_wrote_is_foreign(name: str) -> None:
    assert parse_name(name) is None


def test_wrong_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="key: must have 32 bytes, got 31"):
        object_name(NAMESPACE, KEY[:-1], SEGMENT)
    with pytest.raises(ValueError, match="namespace_digest: must have 32 bytes, got 33"):
        object_name(NAMESPACE + b"x", KEY, SEGMENT)
    with pytest.raises(ValueError, match="keys_max=0"):
        ListingCatalog(memory(), keys_max=0)


async def test_a_refresh_finds_the_segments_of_each_key() -> None:
    tier = memory()
    other_half = Segment(first_layer=8, num_layers=8, first_head=4, num_heads=4)
    other_key = secrets.token_bytes(32)
    for key, segment in ((KEY, SEGMENT), (KEY, other_half), (other_key, SEGMENT)):
        await tier.write(object_name(NAMESPACE, key, segment), image_of(10))
    catalog = ListingCatalog(tier)
    assert await catalog.refresh(NAMESPACE) == {
        KEY: frozenset({"0-8.4-8", "8-16.4-8"}),
        other_key: frozenset({"0-8.4-8"}),
    }
    await tier.quarantine(object_name(NAMESPACE, KEY, SEGMENT))
    await tier.quarantine(object_name(NAMESPACE, other_key, SEGMENT))
    assert await catalog.refresh(NAMESPACE) == {KEY: frozenset({"8-16.4-8"})}


async def test_foreign_objects_and_other_namespaces_are_ignored() -> None:
    tier = memory()
    prefix = namespace_prefix(NAMESPACE)
    await tier.write(WHOLE, image_of(10))
    await tier.write(object_name(bytes(32), KEY, SEGMENT), image_of(10))
    for name in ("README.md", f"{prefix}/notes.txt", f"{prefix}/64/{KEY.hex()}/0-8.arrow"):
        await tier.write(name, image_of(10))
    assert await ListingCatalog(tier).refresh(NAMESPACE) == {KEY: frozenset({"0-8.4-8"})}
    assert await ListingCatalog(tier).refresh(secrets.token_bytes(32)) == {}


async def test_an_empty_object_is_a_write_that_never_was(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = memory()

    async def listing(prefix: str) -> Listing:
        # And a tier that answers more than it was asked for.
        return [Found(WHOLE, 0, 0.0), Found(object_name(bytes(32), KEY, SEGMENT), 10, 0.0)]

    monkeypatch.setattr(tier, "list", listing)
    assert await ListingCatalog(tier).refresh(NAMESPACE) == {}


async def test_keys_over_the_limit_are_misses_and_said_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tier = memory()
    for key in range(5):
        await tier.write(object_name(NAMESPACE, bytes([key] * 32), SEGMENT), image_of(10))
    with caplog.at_level(logging.WARNING):
        found = await ListingCatalog(tier, keys_max=3).refresh(NAMESPACE)
    assert len(found) == 3
    assert "keys_max=3 keys: 2 objects are not used" in caplog.text
    caplog.clear()
    assert len(await ListingCatalog(tier, keys_max=5).refresh(NAMESPACE)) == 5
    assert caplog.text == ""
    assert np.all([len(segment_names) == 1 for segment_names in found.values()])

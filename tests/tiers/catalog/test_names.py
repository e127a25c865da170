"""Names of objects and of the catalog's files."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiers.catalog.names import (
    LogName,
    catalog_folder,
    digest_in,
    lease_name,
    log_name,
    manifest_name,
    namespace_prefix,
    object_name,
    parse_lease,
    parse_log,
    parse_log_folder,
    parse_manifest,
    parse_name,
    parse_namespace,
    parse_snapshot,
    snapshot_name,
)
from tiers.kv.layout import HEADS_MAX, LAYERS_MAX, Segment

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
    with pytest.raises(ValueError, match="number=-1"):
        lease_name(-1)


FOLDER = catalog_folder(namespace_prefix(NAMESPACE))
DIGEST = "0123456789abcdef" * 2
numbers = st.integers(0, 10**12 - 1)


@given(number=numbers, other=numbers)
def test_catalog_files_come_back_and_sort_as_their_numbers(number: int, other: int) -> None:
    log = LogName("s0123456789abcde", number)
    assert parse_log_folder(FOLDER, f"{FOLDER}/log/{log.writer}/") == log.writer
    assert parse_log(FOLDER, log_name(FOLDER, log, DIGEST)) == log
    assert parse_snapshot(FOLDER, snapshot_name(FOLDER, number, 7, DIGEST)) == number
    assert parse_manifest(FOLDER, manifest_name(FOLDER, number)) == number
    assert parse_lease(lease_name(number)) == number
    assert digest_in(log_name(FOLDER, log, DIGEST)) == DIGEST
    names = [log_name(FOLDER, LogName("s0123456789abcde", n), DIGEST) for n in (number, other)]
    assert (names[0] < names[1]) == (number < other)


@pytest.mark.parametrize(
    "name",
    [
        "",
        WHOLE,
        f"{FOLDER}/log/s0123456789abcde",
        f"{FOLDER}/log/s0123456789abcdef/",
        f"{FOLDER}/log/~x/",
        f"{FOLDER}/log/s0123456789abcde/1-{DIGEST}.arrow",
        f"{FOLDER}/log/x0123456789abcde/000000000001-{DIGEST}.arrow",
        f"{FOLDER}/log/s0123456789abcde/000000000001-{DIGEST}.arrow.tmp",
        f"{FOLDER}/log/s0123456789abcde/000000000001-{DIGEST[:-1]}.arrow",
        f"{FOLDER}/snapshot/000000000001-1-{DIGEST}.arrow",
        f"{FOLDER}/manifest/1",
        f"other/log/s0123456789abcde/000000000001-{DIGEST}.arrow",
    ],
)
def test_other_names_in_the_catalog_are_foreign(name: str) -> None:
    assert parse_log(FOLDER, name) is None
    assert parse_log_folder(FOLDER, name) is None
    assert parse_snapshot(FOLDER, name) is None
    assert parse_manifest(FOLDER, name) is None
    assert parse_lease(name) is None
    assert parse_name(name) is None or name == WHOLE


def test_namespaces_are_told_from_other_folders() -> None:
    assert parse_namespace("v1/0001020304050607/") == "v1/0001020304050607"
    for folder in ("v1/lease/", "v1/0001020304050607/64/", "v2/0001020304050607/", "probe/"):
        assert parse_namespace(folder) is None

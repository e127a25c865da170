"""What a namespace is, in a file beside its objects: written, read back, and checked."""

from __future__ import annotations

import hashlib
import json

import anyio
import numpy as np
import pytest

from tiers.catalog.names import namespace_info_name, namespace_prefix, parse_name, parse_namespace
from tiers.catalog.namespace_info import (
    INFO_BYTES_MAX,
    NamespaceInfo,
    decode,
    encode,
    read_info,
    write_info,
)
from tiers.catalog.rows import CatalogCorrupt
from tiers.store.object_tier import UrlObjects

NAMESPACE = b'{"model": {"name": "org/m\xc3\xb6del"},  "dtype":"float16"}'
"""Not canonical: its digest is over these very bytes."""


def prefix_of(namespace: bytes) -> str:
    return namespace_prefix(hashlib.sha256(namespace).digest())


def image(text: str) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(text.encode(), dtype=np.uint8)


def test_it_is_json_that_gives_back_what_went_in() -> None:
    info = NamespaceInfo(NAMESPACE, "/models/llama")
    body = encode(info)
    assert json.loads(body.tobytes()) == {
        "format": 1,
        "namespace": {"model": {"name": "org/mödel"}, "dtype": "float16"},
        "served_as": "/models/llama",
    }
    assert decode(body, prefix_of(NAMESPACE)) == info
    more = image(body.tobytes().decode().replace('"format":1', '"format":1,"later":[2]'))
    assert decode(more, prefix_of(NAMESPACE)) == info


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        '{"format":1,"namespace":{}}',
        '{"format":1,"namespace":7}',
        '{"format":2,"namespace":NAMESPACE}',
        '{"format":1,"namespace":NAMESPACE,"served_as":7}',
        '{"format":1,"namespace":NAMESPACE',
        '{"format":1,"namespace":' + "[" * 100_000,
    ],
)
def test_nothing_else_is_one(text: str) -> None:
    with pytest.raises(CatalogCorrupt):
        decode(image(text.replace("NAMESPACE", NAMESPACE.decode())), prefix_of(NAMESPACE))


@pytest.mark.parametrize("namespace", [b'{"a":' * 17 + b"1" + b"}" * 17, b"[1]", b'"model"'])
def test_its_own_digest_makes_nothing_a_namespace(namespace: bytes) -> None:
    with pytest.raises(CatalogCorrupt):
        decode(encode(NamespaceInfo(namespace)), prefix_of(namespace))


def test_other_names_in_the_folder_do_not_parse() -> None:
    """So that sidecars of before, and readers of the folder's listing, pass it over."""
    name = namespace_info_name(prefix_of(NAMESPACE))
    assert parse_name(name) is None
    assert parse_namespace(name) is None


@pytest.mark.parametrize("size_bytes", [None, 0, INFO_BYTES_MAX + 1])
def test_a_store_without_a_good_one_has_none(size_bytes: int | None) -> None:
    async def main() -> None:
        tier, prefix = UrlObjects(f"memory://info-{size_bytes}"), prefix_of(NAMESPACE)
        if size_bytes == 0:
            await write_info(tier, prefix, NamespaceInfo(NAMESPACE))
            assert await read_info(tier, prefix) == NamespaceInfo(NAMESPACE)
            await tier.write(namespace_info_name(prefix), image("x"))
        elif size_bytes:
            await tier.write(namespace_info_name(prefix), np.zeros(size_bytes, dtype=np.uint8))
        assert await read_info(tier, prefix) is None
        await tier.close()

    anyio.run(main)

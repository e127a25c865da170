"""What a namespace is, written beside its objects: their names have only a digest of it.

Owns the record `namespace.json`: its bytes, reading and writing it. Does not own the namespace's
JSON, which is the engine's, nor when it is written (`sidecar/catalog/service.py`).

Invariants: a record that is accepted is bounded and is of that folder, because the digest of its
namespace is the folder's name. The digest does not cover the model's served name, which is only
for people. Nothing here decides which bytes are loaded: a store without the record works.
"""

import hashlib
import itertools
from typing import Any, Final, NamedTuple, cast

import msgspec
import numpy as np

from tiers.catalog.names import NAMESPACE_CHARACTERS, namespace_info_name
from tiers.catalog.rows import Bytes, CatalogCorrupt
from tiers.errors import ChunkCorrupt, ChunkMissing
from tiers.store.object_tier import ObjectTier

INFO_FORMAT: Final = 1
INFO_BYTES_MAX: Final = 128 << 10
NAMESPACE_DEPTH_MAX: Final = 16


class NamespaceInfo(NamedTuple):
    """A namespace and the name that its model is served as."""

    namespace: bytes
    """JSON, as its engines give it."""
    served_as: str = ""
    """The name of a model that is given by path; empty where the namespace has a name."""

    def fields(self) -> dict[str, Any]:
        """The namespace's JSON as values."""
        return cast("dict[str, Any]", msgspec.json.decode(self.namespace, type=dict))


class _Image(msgspec.Struct, frozen=True):
    """As it is in the bytes. Unknown fields are ignored."""

    format: int
    namespace: msgspec.Raw
    served_as: str = ""


def encode(info: NamespaceInfo) -> Bytes:
    """The bytes of a record."""
    image = _Image(INFO_FORMAT, msgspec.Raw(info.namespace), info.served_as)
    return np.frombuffer(msgspec.json.encode(image), dtype=np.uint8)


def decode(body: Bytes, prefix: str) -> NamespaceInfo:
    """The record in foreign bytes, of the namespace in folder `prefix`. Raises `CatalogCorrupt`."""
    try:
        image = msgspec.json.decode(body.tobytes(), type=_Image)
        info = NamespaceInfo(bytes(image.namespace), image.served_as)
        deep = deeper_than(info.fields(), NAMESPACE_DEPTH_MAX)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CatalogCorrupt(f"not a namespace: {error}") from error
    if deep:
        raise CatalogCorrupt(f"nested more than {NAMESPACE_DEPTH_MAX} deep")
    digest = hashlib.sha256(info.namespace).hexdigest()[:NAMESPACE_CHARACTERS]
    if image.format != INFO_FORMAT or digest != prefix.rpartition("/")[2]:
        raise CatalogCorrupt(f"format={image.format}, namespace {digest}: expected {prefix}")
    return info


def deeper_than(value: object, layers: int) -> bool:
    """Whether JSON is nested more than `layers` deep."""
    layer = [value]
    for _ in range(layers):
        dicts = [cast("dict[str, object]", one) for one in layer if isinstance(one, dict)]
        lists = [cast("list[object]", one) for one in layer if isinstance(one, list)]
        layer = list(itertools.chain(*(one.values() for one in dicts), *lists))
    return bool(layer)


async def write_info(tier: ObjectTier, prefix: str, info: NamespaceInfo) -> None:
    """Write the record, replacing what is there. Raises the tier's errors."""
    await tier.write(namespace_info_name(prefix), encode(info))


async def read_info(tier: ObjectTier, prefix: str) -> NamespaceInfo | None:
    """The record of the namespace in folder `prefix`; None where there is no valid one.

    Early releases wrote none. Raises `TierUnavailable`.
    """
    into = np.empty(INFO_BYTES_MAX, dtype=np.uint8)
    try:
        return decode(into[: await tier.read(namespace_info_name(prefix), into)], prefix)
    except (ChunkMissing, ChunkCorrupt, CatalogCorrupt):
        return None

"""What a namespace is, written beside its objects: names of objects have a digest of it alone.

Owns the record, its bytes, reading and writing it. Does not own the namespace's JSON, which is the
engine's, nor when it is written (`sidecar/catalog/service.py`).

Invariants: what is read is the namespace of that folder, because its digest is the folder's name,
and is bounded; the name that people gave the model is not covered by it, and is for people alone.
Nothing of it decides which bytes are loaded: a store without it works.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import msgspec
import numpy as np

from tiers.catalog.names import NAMESPACE_CHARACTERS, about_name
from tiers.catalog.rows import CatalogCorrupt
from tiers.errors import ChunkCorrupt, ChunkMissing

if TYPE_CHECKING:
    from tiers.catalog.rows import Bytes
    from tiers.store.object_tier import ObjectTier

ABOUT_FORMAT: Final = 1
ABOUT_BYTES_MAX: Final = 128 << 10
NAMESPACE_DEPTH_MAX: Final = 16


class About(NamedTuple):
    """A namespace and what people call its model."""

    namespace: bytes
    """JSON, as its engines give it."""
    served_as: str = ""
    """The name of a model that is files; empty where the namespace has one."""

    def fields(self) -> dict[str, Any]:
        """The namespace's JSON as values."""
        return cast("dict[str, Any]", msgspec.json.decode(self.namespace, type=dict))


class _Image(msgspec.Struct, frozen=True):
    """As it is in the bytes. Fields that are not known here are passed over."""

    format: int
    namespace: msgspec.Raw
    served_as: str = ""


def encode(about: About) -> Bytes:
    """The bytes of a record."""
    image = _Image(ABOUT_FORMAT, msgspec.Raw(about.namespace), about.served_as)
    return np.frombuffer(msgspec.json.encode(image), dtype=np.uint8)


def decode(body: Bytes, prefix: str) -> About:
    """The record in foreign bytes, of the namespace in folder `prefix`. Raises `CatalogCorrupt`."""
    try:
        image = msgspec.json.decode(body.tobytes(), type=_Image)
        about = About(bytes(image.namespace), image.served_as)
        deep = deeper_than(about.fields(), NAMESPACE_DEPTH_MAX)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CatalogCorrupt(f"not a namespace: {error}") from error
    if deep:
        raise CatalogCorrupt(f"nested more than {NAMESPACE_DEPTH_MAX} deep")
    digest = hashlib.sha256(about.namespace).hexdigest()[:NAMESPACE_CHARACTERS]
    if image.format != ABOUT_FORMAT or digest != prefix.rpartition("/")[2]:
        raise CatalogCorrupt(f"format={image.format}, of namespace {digest}: not of {prefix}")
    return about


def deeper_than(value: object, layers: int) -> bool:
    """Whether JSON is nested more than so deep."""
    layer = [value]
    for _ in range(layers):
        layer = [inner for one in layer for inner in _inside(one)]
    return bool(layer)


def _inside(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(cast("dict[str, object]", value).values())
    return cast("list[object]", value) if isinstance(value, list) else []


async def write_about(tier: ObjectTier, prefix: str, about: About) -> None:
    """Write the record, replacing what is there. Raises the tier's errors."""
    await tier.write(about_name(prefix), encode(about))


async def read_about(tier: ObjectTier, prefix: str) -> About | None:
    """The record of the namespace in folder `prefix`; None where there is no good one.

    Sidecars of before wrote none. Raises `TierUnavailable`.
    """
    into = np.empty(ABOUT_BYTES_MAX, dtype=np.uint8)
    try:
        return decode(into[: await tier.read(about_name(prefix), into)], prefix)
    except (ChunkMissing, ChunkCorrupt, CatalogCorrupt):
        return None

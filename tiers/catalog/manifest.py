"""Manifests: which snapshots hold the catalog, and which logs are merged into them.

Owns the record and its bytes: a line with the xxh3_128 of the rest, then JSON. Does not own when
one is written (`compaction.py`) or I/O.

A manifest's name is its generation and it is only ever created, never replaced: of two compactions
that began from one generation, one succeeds. That is the fence; the lease only spares the other
its work.

Invariants: a manifest is accepted whole or not at all; every name in it parses; its size is
bounded. A writer stays in `merged` for `HISTORY` generations after its last file was merged, so a
reader that is at most so far behind finds out what it has missed.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from tiers.catalog.census import Holding
from tiers.catalog.names import parse_log, parse_snapshot
from tiers.catalog.rows import CatalogCorrupt, digest_of

if TYPE_CHECKING:
    from tiers.catalog.rows import Bytes

MANIFEST_FORMAT: Final = 1
MANIFEST_BYTES_MAX: Final = 8 << 20
SNAPSHOTS_MAX: Final = 4096
WRITERS_MAX: Final = 65_536
TENANTS_MAX: Final = 65_536
_TENANT = re.compile(r"[0-9a-f]{16}")
HISTORY: Final = 8
_DIGEST_CHARACTERS: Final = 32


class Merged(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far one writer's log is in the snapshots."""

    number: int
    """The last file that is."""
    generation: int
    """The manifest that merged it."""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One state of a catalog: its snapshots, and all log files that are not merged."""

    generation: int
    snapshots: tuple[str, ...] = ()
    """Names of files, whole. The first `base` are one merge's, sorted by key and disjoint."""
    base: int = 0
    base_seconds: float = 0.0
    """Since when they withdraw what they withdraw, by the store's clock."""
    base_withdrawn: int = 0
    """Rows in them that withdraw, whose objects may still be there."""
    rows: int = 0
    """Rows in all snapshots."""
    held: Holding = Holding()
    """What is offered. Since the last whole merge, an estimate: duplicates count."""
    merged: dict[str, Merged] = {}
    tenants: dict[str, Holding] = {}
    """The same by tenant (16 hexadecimal digits, zeros for none), of the largest `TENANTS_MAX`."""
    reconciled_seconds: float = 0.0
    """When rows and objects were last compared, by the store's clock; 0 for never."""
    format: int = MANIFEST_FORMAT

    def after(self, **changes: Any) -> Manifest:
        """A manifest of the next generation."""
        return msgspec.structs.replace(self, **{"generation": self.generation + 1, **changes})


NOTHING: Final = Manifest(generation=-1)
"""What holds before the first manifest: every log file counts."""


def encode(manifest: Manifest) -> Bytes:
    """The bytes of a manifest."""
    text = msgspec.json.encode(manifest)
    digest = digest_of(np.frombuffer(text, dtype=np.uint8))
    return np.frombuffer(digest.encode() + b"\n" + text, dtype=np.uint8)


def decode(body: Bytes, folder: str, generation: int) -> Manifest:
    """The manifest in foreign bytes, named `generation`. Raises `CatalogCorrupt`."""
    digest, line, text = body[: _DIGEST_CHARACTERS + 1], body[-1:], body[_DIGEST_CHARACTERS + 1 :]
    if not line.size or digest.tobytes() != digest_of(text).encode() + b"\n":
        raise CatalogCorrupt("its first line is not the digest of the rest")
    try:
        manifest = msgspec.json.decode(text.tobytes(), type=Manifest, strict=True)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CatalogCorrupt(f"not a manifest: {error}") from error
    if manifest.format != MANIFEST_FORMAT or manifest.generation != generation:
        raise CatalogCorrupt(
            f"format={manifest.format}, generation={manifest.generation}: expected "
            f"{MANIFEST_FORMAT} and {generation}"
        )
    if len(manifest.snapshots) > SNAPSHOTS_MAX or len(manifest.merged) > WRITERS_MAX:
        raise CatalogCorrupt(f"more than {SNAPSHOTS_MAX} snapshots or {WRITERS_MAX} writers")
    if not 0 <= manifest.base <= len(manifest.snapshots):
        raise CatalogCorrupt(f"base={manifest.base}: it has {len(manifest.snapshots)} snapshots")
    if len(manifest.tenants) > TENANTS_MAX or not all(map(_TENANT.fullmatch, manifest.tenants)):
        raise CatalogCorrupt(f"tenants: at most {TENANTS_MAX}, of 16 hexadecimal digits")
    if any(parse_snapshot(folder, name) is None for name in manifest.snapshots):
        raise CatalogCorrupt("a snapshot has another name than snapshots have")
    probe = "0" * _DIGEST_CHARACTERS
    for writer, merged in manifest.merged.items():
        number = max(merged.number, 0)
        if parse_log(folder, f"{folder}/log/{writer}/{number:012d}-{probe}.arrow") is None:
            raise CatalogCorrupt(f"writer {writer[:64]!r}: not a writer's name and number")
    return manifest


@dataclasses.dataclass(slots=True)
class Counts:
    """What reading catalogs came to. Never decreases."""

    files_read: int = 0
    bytes_read: int = 0
    rows_read: int = 0
    files_corrupt: int = 0
    """Ignored: damaged, or foreign."""
    reloads: int = 0
    """Snapshots taken in because log files that are merged had gone or were damaged."""

"""Manifests: which snapshots hold the catalog, and which logs are merged into them.

Owns the record and its bytes: a line with the xxh3_128 of the rest, then JSON. Does not own when
one is written (`compaction.py`), or I/O. `encode` and `decode` are generators, because a manifest
may name 65,536 tenants: `run_in_slices` gives other tasks a turn at each `yield`. A thread, which
needs the GIL all the time for many small objects, would hold up the event loop.

A manifest's name is its generation. It is only ever created, never replaced: of two compactions
that began from one generation, one succeeds. That is the fence; the lease only saves the other one
its work.

Invariants: a manifest is accepted whole or not at all; every name in it parses; its size is
bounded. A writer stays in `merged` for `HISTORY` generations after its last file was merged, so a
reader that is no further behind finds out what it has missed.
"""

import dataclasses
import itertools
from collections.abc import Generator
from typing import Annotated, Final, TypeVar

import anyio.lowlevel
import msgspec
import numpy as np

from tiers.catalog.names import parse_log, parse_snapshot
from tiers.catalog.rows import Bytes, CatalogCorrupt, digest_of
from tiers.catalog.usage import Usage

T = TypeVar("T")

MANIFEST_FORMAT: Final = 1
MANIFEST_BYTES_MAX: Final = 8 << 20
SNAPSHOTS_MAX: Final = 4096
WRITERS_MAX: Final = 65_536
TENANTS_MAX: Final = 65_536
TENANTS_PER_SLICE: Final = 512
NAMES_PER_SLICE: Final = 256
HISTORY: Final = 8
_SLICE_BYTES: Final = 60 * TENANTS_PER_SLICE
_TenantName = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
_TENANTS: Final = msgspec.json.Decoder(dict[_TenantName, Usage])
_DIGEST_CHARACTERS: Final = 32


class Merged(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far one writer's log is in the snapshots."""

    number: int
    """The last merged file."""
    generation: int
    """The manifest that merged it."""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One state of a catalog: its snapshots, and all log files that are not merged."""

    generation: int
    snapshots: Annotated[tuple[str, ...], msgspec.Meta(max_length=SNAPSHOTS_MAX)] = ()
    """Names of files, whole. The first `base` are one major compaction's, sorted and disjoint."""
    base: int = 0
    base_seconds: float = 0.0
    """Since when they withdraw what they withdraw, by the store's clock."""
    base_withdrawn: int = 0
    """Rows in them that withdraw, whose objects may still be there."""
    rows: int = 0
    """Rows in all snapshots."""
    held: Usage = Usage()
    """What is offered. Since the last major compaction, an estimate: duplicates count."""
    merged: Annotated[dict[str, Merged], msgspec.Meta(max_length=WRITERS_MAX)] = {}
    reconciled_seconds: float = 0.0
    """When rows and objects were last compared, by the store's clock; 0 for never."""
    format: int = MANIFEST_FORMAT
    tenants: dict[str, Usage] = {}
    """`held` by tenant (16 hexadecimal digits, zeros for none), of the largest `TENANTS_MAX`."""


EMPTY_MANIFEST: Final = Manifest(generation=-1)
"""What holds before the first manifest: every log file counts."""


_Image: Final = msgspec.defstruct(
    "_Image",
    [("tenants", msgspec.Raw, msgspec.Raw(b"{}"))],
    bases=(Manifest,),
    frozen=True,
    forbid_unknown_fields=True,
)
"""A manifest as it is in the bytes, with the tenants not parsed."""


async def run_in_slices(work: Generator[None, None, T]) -> T:
    """The result of `work`. Other tasks get a turn at each `yield`."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result
        await anyio.lowlevel.checkpoint()


def encode(manifest: Manifest) -> Generator[None, None, Bytes]:
    """The bytes of a manifest."""
    names = iter(manifest.tenants.items())
    pieces: list[bytes] = []
    while some := dict(itertools.islice(names, TENANTS_PER_SLICE)):
        pieces.append(msgspec.json.encode(some)[1:-1])
        yield
    tenants = msgspec.Raw(b"{%b}" % b",".join(pieces))
    text = msgspec.json.encode({**msgspec.structs.asdict(manifest), "tenants": tenants})
    yield
    digest = digest_of(np.frombuffer(text, dtype=np.uint8))
    return np.frombuffer(digest.encode() + b"\n" + text, dtype=np.uint8)


def decode(body: Bytes, folder: str, generation: int) -> Generator[None, None, Manifest]:
    """The manifest in foreign bytes, named `generation`. Raises `CatalogCorrupt`."""
    digest, line, text = body[: _DIGEST_CHARACTERS + 1], body[-1:], body[_DIGEST_CHARACTERS + 1 :]
    if not line.size or digest.tobytes() != digest_of(text).encode() + b"\n":
        raise CatalogCorrupt("its first line is not the digest of the rest")
    yield
    try:
        fields = msgspec.structs.asdict(msgspec.json.decode(text.tobytes(), type=_Image))
        yield
        fields["tenants"] = yield from _tenants_in(bytes(fields["tenants"]))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CatalogCorrupt(f"not a manifest: {error}") from error
    manifest = Manifest(**fields)
    yield from _check(manifest, folder, generation)
    return manifest


def _tenants_in(text: bytes) -> Generator[None, None, dict[str, Usage]]:
    """The tenants in a JSON object of lists of numbers, as `encode` makes it."""
    if not text.startswith(b"{"):
        raise CatalogCorrupt("tenants: not an object")
    found: dict[str, Usage] = {}
    first, last = 1, len(text) - 1
    while first < last:
        # To the end of some tenant's list.
        end = text.find(b"]", min(first + _SLICE_BYTES, last - 1)) + 1 or last
        found.update(_TENANTS.decode(b"{%b}" % text[first:end]))
        if len(found) > TENANTS_MAX:
            raise CatalogCorrupt(f"tenants: more than {TENANTS_MAX}")
        first = end + 1
        yield
    return found


def _check(manifest: Manifest, folder: str, generation: int) -> Generator[None]:
    if manifest.format != MANIFEST_FORMAT or manifest.generation != generation:
        raise CatalogCorrupt(
            f"format={manifest.format}, generation={manifest.generation}: expected "
            f"{MANIFEST_FORMAT} and {generation}"
        )
    if not 0 <= manifest.base <= len(manifest.snapshots):
        raise CatalogCorrupt(f"base={manifest.base}: it has {len(manifest.snapshots)} snapshots")
    for number, name in enumerate(manifest.snapshots):
        if parse_snapshot(folder, name) is None:
            raise CatalogCorrupt("a name in snapshots is not a snapshot's")
        if number % NAMES_PER_SLICE == 0:
            yield
    probe = "0" * _DIGEST_CHARACTERS
    for number, (writer, merged) in enumerate(manifest.merged.items()):
        last = max(merged.number, 0)
        if parse_log(folder, f"{folder}/log/{writer}/{last:012d}-{probe}.arrow") is None:
            raise CatalogCorrupt(f"writer {writer[:64]!r}: not a writer's name and number")
        if number % NAMES_PER_SLICE == 0:
            yield


@dataclasses.dataclass(slots=True)
class Counts:
    """What was read of catalogs. Never decreases."""

    files_read: int = 0
    bytes_read: int = 0
    rows_read: int = 0
    files_corrupt: int = 0
    """Ignored: damaged, or foreign."""
    reloads: int = 0
    """Reads of all snapshots because merged log files were gone or damaged."""

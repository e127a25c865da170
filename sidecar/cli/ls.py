"""`kvlake ls`, and what `kvlake gc --dry-run --list` names: chunks, a batch at a time.

Owns which chunks of a namespace are listed, and writing them as a table or as JSON while the
catalog is being read. Does not own reading it (`tiers/catalog/scan.py`), nor who has to go.

Invariants: however many chunks there are, some files of the catalog are in memory, as columns, and
a batch of chunks as text; of a listing that the store cut off, the JSON is not closed. What is told
of an object's place is its name in the store, as `tiers/catalog/names.py` makes it.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import anyio.to_thread
import numpy as np

from sidecar.core.tenants import UNSALTED
from tiers.catalog.manifest import Counts
from tiers.catalog.names import KEY_BYTES, catalog_folder
from tiers.catalog.reader import Files
from tiers.catalog.retention import Why
from tiers.catalog.rows import NO_TENANT
from tiers.catalog.scan import all_rows
from tiers.catalog.usage import Chunks, tenant_of, word_of
from tiers.sizes import approximate_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from sidecar.config.model import Config
    from tiers.catalog.retention import Whys
    from tiers.catalog.rows import Rows
    from tiers.store.object_tier import ObjectTier

BATCH_CHUNKS: Final = 1000
_ID: Final = re.compile(r"^[0-9a-f]{16}$")

Document = dict[str, Any]


class TenantNames:
    """What tenants are called in a configuration."""

    def __init__(self, config: Config) -> None:
        named = config.tenants.rules().named
        self._names = {word_of(NO_TENANT): UNSALTED}
        self._names |= {word_of(tenant): name for tenant, (name, _) in named.items()}

    def name(self, tenant: bytes) -> str:
        """Of a tenant as rows name it."""
        return self._names.get(word_of(tenant)) or tenant.hex()

    @property
    def known(self) -> str:
        """The names, for a message."""
        return ", ".join(sorted(self._names.values()))

    def word(self, name: str) -> int | None:
        """The tenant of this name or id, as a number; None for no possible one."""
        for word, known in self._names.items():
            if known == name:
                return word
        return int(name, 16) if _ID.match(name) else None


@dataclass(frozen=True, slots=True)
class ListingFilter:
    """What `ls` is to list."""

    namespace: str | None = None
    key: str = ""
    tenant: str = ""
    limit: int = 1000


class Listing:
    """Writes chunks as they come.

    Args:
        say: takes text, in whole lines.
        names: of tenants.
        as_json: one JSON object instead of a table.
        bounds: whether it is told what each chunk falls to.
        place: URL of the namespace's folder: then each object is told as `kvlake inspect` takes it.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        names: TenantNames,
        *,
        as_json: bool,
        bounds: bool = False,
        place: str = "",
    ) -> None:
        self._say = say
        self._names = names
        self._as_json = as_json
        self._bounds = bounds
        self._place = place
        self._told = 0

    def open(self, head: Document, name: str) -> None:
        """Begin, with these fields before the list called `name`."""
        if self._as_json:
            fields = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
            self._say("{" + ", ".join([*fields, f"{json.dumps(name)}: ["]))
        else:
            cells = ("KEY", "SIZE", "OBJECTS", "BLOCKS", "AGE", "TENANT")
            self._say(_line(*cells, "BOUND" if self._bounds else ""))

    def chunks(self, rows: Rows, whys: Whys | None = None) -> None:
        """Some more: rows that are offered, sorted by key, all of a chunk together."""
        written = self._as_documents(rows, whys) if self._as_json else self._as_lines(rows, whys)
        batch: list[str] = []
        for line in written:
            batch.append(line)
            if len(batch) == BATCH_CHUNKS:
                self._say("\n".join(batch))
                batch = []
        if batch:
            self._say("\n".join(batch))

    def close(self, tail: Document) -> None:
        """End, with these fields after the list."""
        if self._as_json:
            fields = [f", {json.dumps(key)}: {json.dumps(value)}" for key, value in tail.items()]
            self._say("]" + "".join(fields) + "}")

    def _as_lines(self, rows: Rows, whys: Whys | None) -> Iterator[str]:
        chunks, now = Chunks(rows), time.time()
        columns = zip(
            _keys(rows, chunks),
            chunks.starts.tolist(),
            chunks.sizes.tolist(),
            chunks.counts.tolist(),
            rows.num_blocks[chunks.starts].tolist(),
            chunks.times.tolist(),
            chunks.tenants.tolist(),
            self._settings(chunks, whys),
            strict=True,
        )
        for key, first, size_bytes, objects, num_blocks, written_at, word, setting in columns:
            yield _line(
                key,
                approximate_size(size_bytes),
                objects,
                num_blocks,
                age(written_at / 1e6, now),
                self._names.name(tenant_of(word)),
                setting,
            )
            for url in self._urls(rows, key, first, objects):
                yield f"  {url}"

    def _urls(self, rows: Rows, key: str, first: int, objects: int) -> list[str]:
        if not self._place:
            return []
        return [
            f"{self._place}/{key[:2]}/{key}/{rows.segments[one]}.arrow"
            for one in rows.segment_ids[first : first + objects].tolist()
        ]

    def _as_documents(self, rows: Rows, whys: Whys | None) -> Iterator[str]:
        chunks, ids = Chunks(rows), rows.segment_ids.tolist()
        parents = rows.parents[chunks.starts].tobytes().hex()
        columns = zip(
            _keys(rows, chunks),
            chunks.starts.tolist(),
            chunks.sizes.tolist(),
            chunks.counts.tolist(),
            rows.num_blocks[chunks.starts].tolist(),
            chunks.times.tolist(),
            chunks.tenants.tolist(),
            self._settings(chunks, whys),
            strict=True,
        )
        for at, (
            key,
            first,
            size_bytes,
            objects,
            num_blocks,
            written_at,
            word,
            setting,
        ) in enumerate(columns):
            document = {
                "key": key,
                "parent": parents[at * 2 * KEY_BYTES : (at + 1) * 2 * KEY_BYTES],
                "size_bytes": size_bytes,
                "num_blocks": num_blocks,
                "written_seconds": written_at / 1e6,
                "tenant": self._names.name(tenant_of(word)),
                "objects": objects,
                "segments": [rows.segments[one] for one in ids[first : first + objects]],
            }
            if self._place:
                document["urls"] = self._urls(rows, key, first, objects)
            if self._bounds:
                document["bound"] = setting
            yield f"{',' if self._told else ' '} {json.dumps(document)}"
            self._told += 1

    def _settings(self, chunks: Chunks, whys: Whys | None) -> list[str]:
        if whys is None:
            return [""] * len(chunks)
        return [Why(why).setting for why in whys[chunks.starts].tolist()]


def _keys(rows: Rows, chunks: Chunks) -> list[str]:
    digits = rows.keys[chunks.starts].tobytes().hex()
    return [digits[at : at + 2 * KEY_BYTES] for at in range(0, len(digits), 2 * KEY_BYTES)]


def _line(*cells: object) -> str:
    """As wide as cells are as a rule: how wide the widest will be is known at the end only."""
    key, size, objects, num_blocks, old, tenant, bound = map(str, cells)
    line = f"{key:<64}  {size:<10}  {objects:<7}  {num_blocks:<6}  {old:<5}  {tenant:<16}  {bound}"
    return line.rstrip()


async def list_chunks(
    store: ObjectTier, prefix: str, wanted: ListingFilter, names: TenantNames, listing: Listing
) -> bool:
    """Write the chunks of a namespace, sorted by key; whether there are more than its limit.

    Raises the tier's errors.
    """
    files = Files(store, catalog_folder(prefix), Counts())
    left = max(0, wanted.limit)
    async for found in all_rows(files, time.time(), _shards(wanted.key)):
        rows = await anyio.to_thread.run_sync(_matching, found, wanted, names)
        if rows is None:
            continue
        starts = Chunks(rows).starts
        if left < len(starts):
            if left:
                listing.chunks(rows.take(np.arange(starts[left])))
            return True
        left -= len(starts)
        listing.chunks(rows)
    return False


def _shards(key: str) -> range:
    """Where keys are that begin with these digits."""
    first = int(f"{key[:2]:0<2}", 16)
    return range(first, int(f"{key[:2]:f<2}", 16) + 1)


def _matching(rows: Rows, wanted: ListingFilter, names: TenantNames) -> Rows | None:
    """Those that are wanted and offered; None if there are none."""
    keep: npt.NDArray[np.bool_] = rows.size_bytes > 0
    for at, digit in enumerate(wanted.key):
        byte = rows.keys[:, at // 2]
        keep &= (byte & 15 if at % 2 else byte >> 4) == int(digit, 16)
    if not keep.any():
        return None
    rows = rows.take(keep)
    if not wanted.tenant:
        return rows
    word, chunks = names.word(wanted.tenant), Chunks(rows)
    if word is None:
        return None
    rows = rows.take(np.repeat(chunks.tenants == word, chunks.counts))
    return rows if len(rows) else None


def age(seconds: float, now_seconds: float) -> str:
    """How long ago a time is; "-" for none."""
    if not seconds:
        return "-"
    old = int(max(0.0, now_seconds - seconds))
    for name, factor in (("d", 86_400), ("h", 3600), ("m", 60)):
        if old >= factor:
            return f"{old // factor}{name}"
    return f"{old}s"


def table(rows: list[Any]) -> str:
    """Columns as wide as their widest cell."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in texts) for column in range(len(texts[0]))]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in texts
    )

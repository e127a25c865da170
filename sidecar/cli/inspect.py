"""`kvlake inspect`: what a chunk file holds and whether it is intact.

Owns reading a file (a path or a URL) and wording the result. The checks are
`tiers.kv.slot_image.inspect_image`.

Invariants: a file that cannot be read, or is no chunk file, is a result with a reason, never an
exception; Arrow's parser sees a file only after all of its bytes were checked.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import anyio
import numpy as np

from sidecar.cli.console import Document, load_config, say, say_json
from sidecar.config.masking import mask_url
from sidecar.exits import Exit
from tiers.kv.slot_image import inspect_image
from tiers.sizes import approximate_size
from tiers.store.access import Access, provider_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from tiers.kv.slot_image import SegmentReport

IMAGE_BYTES_MAX: Final = 4 << 30
"""More than the largest image: a slot's payload is below 2 GiB."""
_TOKENS_SHOWN: Final = 8
_DESCRIBED: Final = (
    *("format", "namespace", "segment", "dtype", "encoding"),
    *("blocks", "block_tokens", "content_bytes", "entry_tokens"),
)
"""Fields of a file's descriptor that are shown."""


def main(options: argparse.Namespace) -> int:
    """Inspect each file; the answer is a no if any of them is not intact."""
    store = None if options.config is None else load_config(options.config).store
    access, storage_options = (store.access, store.storage_options) if store else (None, None)
    reports = [inspect_file(place, access, storage_options) for place in options.places]
    if options.json:
        say_json([report.document() for report in reports])
    else:
        say("\n".join(report.text() for report in reports))
    return Exit.OK if all(report.intact for report in reports) else Exit.NO


@dataclass(frozen=True, slots=True)
class ChunkFileReport:
    """The result for a file. `reason` is None for an intact one."""

    place: str
    reason: str | None
    report: SegmentReport | None = None
    columns: tuple[tuple[str, str], ...] = ()

    @property
    def intact(self) -> bool:
        """Whether it is a chunk file and all of its bytes are right."""
        return self.reason is None

    def facts(self) -> Document:
        """What is known of the content, in the order in which it is shown."""
        report = self.report
        if report is None:
            return {}
        facts: Document = {"size_bytes": report.image_bytes}
        about, meta = report.descriptor, report.meta
        if about is not None:
            facts |= {name: getattr(about, name) for name in _DESCRIBED}
        if meta is not None:
            facts |= {
                "key": meta.key.hex(),
                "parent": meta.parent.hex() if any(meta.parent) else None,
                "checksum_xxh3_128": meta.checksum.hex(),
                "token_ids": np.frombuffer(meta.token_ids, dtype="<i4").tolist(),
            }
        return facts

    def document(self) -> Document:
        """The report for JSON."""
        head = {"place": self.place, "intact": self.intact, "reason": self.reason}
        return head | self.facts() | {"columns": dict(self.columns)}

    def text(self) -> str:
        """The report for people."""
        lines = [f"{self.place}: {'intact' if self.reason is None else f'BAD: {self.reason}'}"]
        for name, value in self.facts().items():
            lines.append(f"  {name.replace('_', ' '):<18}{_shown(name, value)}")
        for index, (name, kind) in enumerate(self.columns):
            lines.append(f"  {'columns' if index == 0 else '':<18}{name}: {kind}")
        return "\n".join(lines)


def _shown(name: str, value: Any) -> str:
    if name == "size_bytes":
        return f"{value} ({approximate_size(value)})"
    if name == "token_ids":
        first = ", ".join(str(token) for token in value[:_TOKENS_SHOWN])
        return f"{len(value)} tokens: {first}{', ...' if len(value) > _TOKENS_SHOWN else ''}"
    return "none (starts a prompt)" if value is None else str(value)


def inspect_file(
    place: str,
    access: Access | None = None,
    storage_options: Mapping[str, object] | None = None,
) -> ChunkFileReport:
    """Read and examine one file. `access` and `storage_options` are for URLs."""
    shown, options = mask_url(place), storage_options or {}
    try:
        if provider_of(place) == "folder":
            image = _read_path(Path(place.split("://", 1)[-1]).expanduser())
        elif provider_of(place) in ("s3", "gcs", "azure"):
            image = anyio.run(_read_object, place, access or Access(), options)
        else:
            image = _read_url(place, options)
    except ModuleNotFoundError:
        raise
    except Exception as error:
        # File systems raise errors of any class.
        return ChunkFileReport(shown, f"cannot be read: {_one_line(error)}")
    if not image:
        return ChunkFileReport(shown, "the file is empty")
    report = inspect_image(image)
    if report.error is not None:
        return ChunkFileReport(shown, f"{report.verdict}: {_one_line(report.error)}", report)
    return ChunkFileReport(shown, None, report, _columns(image))


def _read_path(path: Path) -> bytes:
    about = path.stat()
    if not stat.S_ISREG(about.st_mode):
        raise ValueError("not a regular file; name the .arrow files in it")
    _check_size(about.st_size)
    return path.read_bytes()


async def _read_object(url: str, access: Access, options: Mapping[str, object]) -> bytes:
    from tiers.store.object_tier import UrlObjects

    root, _, name = url.rpartition("/")
    tier = UrlObjects(root, access, storage_options=options)
    try:
        sizes = {one.name: one.size_bytes for one in await tier.list("", deep=False)}
        if name not in sizes:
            raise FileNotFoundError("no such object")
        _check_size(sizes[name])
        # One byte more: an object that has grown meanwhile is refused rather than cut.
        image = np.zeros(sizes[name] + 1, dtype=np.uint8)
        size_bytes = await tier.read(name, image)
    finally:
        await tier.close()
    return image[:size_bytes].tobytes()


def _read_url(url: str, storage_options: Mapping[str, object]) -> bytes:
    import fsspec

    filesystem, path = cast("tuple[Any, str]", fsspec.core.url_to_fs(url, **storage_options))
    _check_size(int(filesystem.size(path) or 0))
    return cast("bytes", filesystem.cat_file(path))


def _check_size(size_bytes: int) -> None:
    if size_bytes > IMAGE_BYTES_MAX:
        raise ValueError(f"{size_bytes} bytes; a chunk file has at most {IMAGE_BYTES_MAX}")


def _columns(image: bytes) -> tuple[tuple[str, str], ...]:
    import pyarrow as pa

    schema: Any = pa.ipc.open_file(pa.BufferReader(image)).schema
    return tuple((str(column.name), str(column.type)) for column in schema)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__

"""`kvlake inspect`: what a chunk file holds and whether it is intact.

Owns reading a file (a path or a URL) and wording the result. The checks are
`tiers.kv.slot_image.inspect_image`.

Invariants: a file that cannot be read, or is no chunk file, is a result with a reason, never an
exception; Arrow's parser sees a file only after all of its bytes were checked.
"""

import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import anyio
import numpy as np
import pyarrow as pa

from sidecar.cli.console import Document, Options, load_config, show
from sidecar.exits import Exit
from sidecar.sessions.model_names import printable
from tiers.kv.slot_image import inspect_image
from tiers.redaction import mask_url
from tiers.sizes import approximate_size
from tiers.store.access import Access, provider_of

IMAGE_BYTES_MAX: Final = 4 << 30
"""More than the largest image: a slot's payload is below 2 GiB."""
_TOKENS_SHOWN: Final = 8
_DESCRIBED: Final = (
    *("format", "namespace", "segment", "dtype", "encoding"),
    *("blocks", "block_tokens", "content_bytes", "entry_tokens"),
)
"""Fields of a file's descriptor that are shown."""


def main(options: Options) -> Exit:
    """Inspect each file; the answer is a no if any of them is not intact."""
    access = (None if options.config is None else load_config(options.config).store) or Access()
    found = [inspect_file(place, access) for place in options.places]
    show(found, lambda documents: "\n".join(map(_text, documents)), as_json=options.json)
    return Exit.OK if all(document["intact"] for document in found) else Exit.NO


def inspect_file(place: str, access: Access) -> Document:
    """What is known of one file; `reason` is None for an intact one. `access` is for URLs."""
    document: Document = {"place": mask_url(place), "intact": False, "reason": None}
    columns: dict[str, str] = {}
    try:
        if provider_of(place) == "folder":
            image = _read_path(Path(place.split("://", 1)[-1]).expanduser())
        elif provider_of(place) in ("s3", "gcs", "azure"):
            image = anyio.run(_read_object, place, access)
        else:
            image = _read_url(place, access.storage_options)
    except ModuleNotFoundError:
        raise
    except Exception as error:
        # File systems raise errors of any class.
        return document | {"reason": f"cannot be read: {_one_line(error)}", "columns": columns}
    if not image:
        return document | {"reason": "the file is empty", "columns": columns}
    report = inspect_image(image)
    if report.error is None:
        document["intact"] = True
        schema: Any = pa.ipc.open_file(pa.BufferReader(image)).schema
        columns = {str(column.name): str(column.type) for column in schema}
    else:
        document["reason"] = f"{type(report.error).__name__}: {_one_line(report.error)}"
    document["size_bytes"] = report.image_bytes
    about, meta = report.descriptor, report.meta
    if about is not None:
        document |= {name: getattr(about, name) for name in _DESCRIBED}
    if meta is not None:
        document |= {
            "key": meta.key.hex(),
            "parent": meta.parent.hex() if any(meta.parent) else None,
            "checksum_xxh3_128": meta.checksum.hex(),
            "token_ids": np.frombuffer(meta.token_ids, dtype="<i4").tolist(),
        }
    return document | {"columns": columns}


def _text(document: Document) -> str:
    verdict = "intact" if document["intact"] else f"BAD: {document['reason']}"
    lines = [f"{document['place']}: {verdict}"]
    for name, value in document.items():
        if name not in ("place", "intact", "reason", "columns"):
            lines.append(f"  {name.replace('_', ' '):<18}{_shown(name, value)}")
    for index, (name, kind) in enumerate(document["columns"].items()):
        lines.append(f"  {'' if index else 'columns':<18}{name}: {kind}")
    # Anybody may have written the file, and these are for a terminal.
    return "\n".join(printable(line, len(line)) for line in lines)


def _shown(name: str, value: Any) -> str:
    if name == "size_bytes":
        return f"{value} ({approximate_size(value)})"
    if name == "token_ids":
        first = ", ".join(str(token) for token in value[:_TOKENS_SHOWN])
        return f"{len(value)} tokens: {first}{', ...' if len(value) > _TOKENS_SHOWN else ''}"
    return "none (starts a prompt)" if value is None else str(value)


def _read_path(path: Path) -> bytes:
    about = path.stat()
    if not stat.S_ISREG(about.st_mode):
        raise ValueError("not a regular file; name the .arrow files in it")
    _check_size(about.st_size)
    return path.read_bytes()


async def _read_object(url: str, access: Access) -> bytes:
    from tiers.store.object_tier import UrlObjects

    root, _, name = url.rpartition("/")
    tier = UrlObjects(root, access)
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


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__

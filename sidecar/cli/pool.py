"""`kvlake pool`: the memory that a stopped sidecar kept, or a running one has.

The files are `tiers/pool/file.py`'s.

Invariant: showing changes nothing, also beside a running sidecar; a pool in use is not removed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidecar.cli.console import CommandError, Document, complain, load_config, say, say_json
from sidecar.exits import Exit
from tiers.errors import PoolError
from tiers.pool.file import PoolReport, inspect_pool, remove_pool
from tiers.sizes import approximate_size

if TYPE_CHECKING:
    import argparse
    from pathlib import Path


def main(options: argparse.Namespace) -> int:
    """`show` or `remove`."""
    path = load_config(options.config).pool_path
    if options.action == "show":
        try:
            document = _describe(path)
        except OSError as error:
            raise CommandError(f"the pool cannot be read: {error}") from error
        if options.json:
            say_json(document)
        else:
            say(_text(document))
        return Exit.OK
    try:
        freed_bytes = remove_pool(path)
    except (PoolError, OSError) as error:
        complain(str(error))
        return Exit.NO
    say(f"{path}: {approximate_size(freed_bytes)} given back" if freed_bytes else f"{path}: none")
    return Exit.OK


def _describe(path: Path) -> Document:
    report = inspect_pool(path)
    owner, slots = report.owner, report.slots or {}
    return {
        "path": str(path),
        "state": _state(report),
        "owner_pid": owner.pid if owner is not None and owner.pid else None,
        "reason": report.unusable,
        "file_bytes": report.file_bytes,
        "size_bytes": report.size_bytes,
        "sealed_slots": sum(slots.values()),
        "sealed_bytes": sum(slot_bytes * count for slot_bytes, count in slots.items()),
        "classes": [{"slot_bytes": size, "slots": count} for size, count in slots.items()],
    }


def _state(report: PoolReport) -> str:
    if not report.file_bytes:
        return "none"
    if report.owner is None:
        return "foreign"
    if report.owner.alive:
        return "used"
    return "unusable" if report.unusable else "kept"


def _text(document: Document) -> str:
    path, pid = document["path"], document["owner_pid"]
    memory = approximate_size(document["file_bytes"])
    held = (
        f"{approximate_size(document['sealed_bytes'])} in {document['sealed_slots']} sealed slots"
    )
    texts = {
        "none": f"{path}: there is none",
        "foreign": f"{path}: {memory}, not made by kvlake (no owner's record beside it)",
        "used": f"{path}: {memory}, in use by process {pid}; it holds {held}",
        "unusable": f"{path}: {memory}, and the next start will empty it: {document['reason']}",
        "kept": f"{path}: {memory}, kept for the next start; it holds {held}",
    }
    lines = [texts[document["state"]]]
    if document["state"] == "kept" and pid is not None:
        lines.append(
            f"  its owner, process {pid}, was killed, or is in another container and uses it"
        )
    lines += [
        f"  {one['slots']} slots of {approximate_size(one['slot_bytes'])}"
        for one in document["classes"]
    ]
    return "\n".join(lines)

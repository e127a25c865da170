"""`kvlake pool`: the memory that a sidecar left behind, or has, shown and given back.

Owns what is said about it. Does not own the files (`tiers/pool/file.py`).

Invariant: showing changes nothing, also beside a running sidecar; what is in use is not removed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tiers.pool.file import PoolReport, inspect_pool
from tiers.sizes import approximate_size

if TYPE_CHECKING:
    from pathlib import Path

Document = dict[str, Any]


def describe(path: Path) -> Document:
    """What is known of the pool at `path`."""
    report = inspect_pool(path)
    owner = report.owner
    slots = report.slots or {}
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
    """One word: none, foreign, used, unusable or kept."""
    if not report.file_bytes:
        return "none"
    if report.owner is None:
        return "foreign"
    if report.owner.alive:
        return "used"
    return "unusable" if report.unusable else "kept"


def render(document: Document) -> str:
    """The document as lines of text."""
    path, pid = document["path"], document["owner_pid"]
    memory = approximate_size(document["file_bytes"])
    slots, used = document["sealed_slots"], approximate_size(document["sealed_bytes"])
    held = f"{used} in {slots} sealed slots"
    told = {
        "none": f"{path}: there is none",
        "foreign": f"{path}: {memory}, not made by kvlake (no owner's record beside it)",
        "used": f"{path}: {memory}, in use by process {pid}; it holds {held}",
        "unusable": f"{path}: {memory}, and the next start will empty it: {document['reason']}",
        "kept": f"{path}: {memory}, kept for the next start; it holds {held}",
    }
    lines = [told[document["state"]]]
    if document["state"] == "kept" and pid is not None:
        lines.append(
            f"  its owner, process {pid}, was killed, or is in another container and uses it"
        )
    lines += [
        f"  {one['slots']} slots of {approximate_size(one['slot_bytes'])}"
        for one in document["classes"]
    ]
    return "\n".join(lines)

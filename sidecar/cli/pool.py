"""`kvlake pool`: the memory that a stopped sidecar kept, or a running one has.

The files are `tiers/pool/file.py`'s.

Invariant: showing changes nothing, also beside a running sidecar; a pool in use is not removed.
"""

from pathlib import Path

from sidecar.cli.console import CommandError, Document, NoAnswer, Options, load_config, say, show
from tiers.errors import PoolError
from tiers.pool.file import PoolReport, inspect_pool, remove_pool
from tiers.sizes import approximate_size


def main(options: Options) -> None:
    """`show` or `remove`."""
    path = load_config(options.config).pool_path
    if options.action == "show":
        try:
            document = _describe(path, inspect_pool(path))
        except OSError as error:
            raise CommandError(f"the pool cannot be read: {error}") from error
        show(document, _text, as_json=options.json)
        return
    try:
        freed_bytes = remove_pool(path)
    except (PoolError, OSError) as error:
        raise NoAnswer(str(error)) from error
    say(f"{path}: {approximate_size(freed_bytes)} given back" if freed_bytes else f"{path}: none")


def _describe(path: Path, report: PoolReport) -> Document:
    owner, slots = report.owner, report.slots or {}
    if not report.file_bytes:
        state = "none"
    elif owner is None:
        state = "foreign"
    elif owner.alive:
        state = "used"
    else:
        state = "unusable" if report.unusable else "kept"
    return {
        "path": str(path),
        "state": state,
        "owner_pid": owner.pid if owner is not None and owner.pid else None,
        "reason": report.unusable,
        "file_bytes": report.file_bytes,
        "size_bytes": report.size_bytes,
        "sealed_slots": sum(slots.values()),
        "sealed_bytes": sum(slot_bytes * count for slot_bytes, count in slots.items()),
        "classes": [{"slot_bytes": size, "slots": count} for size, count in slots.items()],
    }


def _text(document: Document) -> str:
    pid, size = document["owner_pid"], approximate_size(document["file_bytes"])
    sealed = approximate_size(document["sealed_bytes"])
    held = f"it holds {sealed} in {document['sealed_slots']} sealed slots"
    about = {
        "none": "there is none",
        "foreign": f"{size}, not made by kvlake (no owner's record beside it)",
        "used": f"{size}, in use by process {pid}; {held}",
        "unusable": f"{size}, and the next start will empty it: {document['reason']}",
        "kept": f"{size}, kept for the next start; {held}",
    }
    lines = [f"{document['path']}: {about[document['state']]}"]
    if document["state"] == "kept" and pid is not None:
        lines.append(
            f"  its owner, process {pid}, was killed, or is in another container and uses it"
        )
    lines += [
        f"  {one['slots']} slots of {approximate_size(one['slot_bytes'])}"
        for one in document["classes"]
    ]
    return "\n".join(lines)

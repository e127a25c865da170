"""Events, commands and messages as the trace tells them."""

from __future__ import annotations

import enum

from sidecar.core.commands import Listed, Reply
from sidecar.protocol import LoadChunk, StoreChunk


def brief(record: object) -> str:
    """An event or a command on one line, with keys cut short."""
    match record:
        case Reply():
            return f"reply to {record.session_id}: {brief(record.message)}"
        case bytes():
            return record.hex()[:8] if record else "-"
        case list() | tuple():
            return f"[{' '.join(map(brief, record))}]"
        case Listed():
            return f"Listed({len(record.rows)} rows)"
        case StoreChunk():
            return f"{brief(record.key)}<-{record.block_ids}"
        case LoadChunk():
            return f"{brief(record.key)}+{record.first_block}->{record.block_ids}"
    names = getattr(record, "__slots__", None) or getattr(record, "__struct_fields__", None)
    if names is None or isinstance(record, enum.Enum):
        return str(getattr(record, "name", record))
    shown = [name for name in names if name not in ("token_ids", "epoch", "layout", "tenant")]
    values = " ".join(f"{name}={brief(getattr(record, name))}" for name in shown)
    return f"{type(record).__name__}({values})"

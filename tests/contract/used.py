"""How a symbol of vLLM that kvlake uses is written down, in the words of `reading.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

ATTRIBUTE: Final = "attribute"
PROPERTY: Final = "property"
CONNECTOR: Final = "vllm.distributed.kv_transfer.kv_connector"
OFFLOAD: Final = "vllm.v1.kv_offload"
"""vLLM's own offloading."""


@dataclass(frozen=True)
class Used:
    """One symbol. `members` as in `reading.py`; `since` is the first release that has it.

    `late` are the members that came after it, and the first release that has each. For a
    base class of one of kvlake's, `members` are its methods as ours take them, and `left` says of
    each other one why it is left alone; None for a class that is no base class.
    """

    members: dict[str, str] = field(default_factory=dict[str, str])
    since: str = "0"
    late: dict[str, str] = field(default_factory=dict[str, str])
    left: dict[str, str] | None = None


def attributes(names: str) -> dict[str, str]:
    """Members, named in one line, that are read and not called."""
    return dict.fromkeys(names.split(), ATTRIBUTE)

"""Images whose bytes are part of the format: other releases and other languages must read them.

Run as a program to write `golden/` again. That is right only together with a new format number:
a file that changed under an unchanged number would make every stored chunk unreadable.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tiers.kv.layout import ChunkLayout, Segment
from tiers.kv.slot_image import SlotTemplate

if TYPE_CHECKING:
    import numpy.typing as npt

GOLDEN = Path(__file__).parent / "golden"
NAMESPACE = bytes(range(32))
KEY = bytes(range(32, 64))
PARENT = bytes(range(64, 96))

CASES: dict[str, tuple[ChunkLayout, int]] = {
    "bfloat16": (ChunkLayout(Segment(0, 2, 0, 2), 4, 4, 16, "bfloat16", "raw"), 2),
    "float8": (ChunkLayout(Segment(2, 1, 4, 2), 1, 3, 5, "float8_e4m3fn", "raw"), 1),
    "float16": (ChunkLayout(Segment(0, 1, 0, 1), 8, 16, 8, "float16", "cpu.amx-1"), 8),
    "state": (ChunkLayout(Segment(0, 2, 1, 1), 1, 16, 41, "int8", "state-mamba2-cpu-x86", 16), 1),
}


def payload(template: SlotTemplate) -> npt.NDArray[np.uint8]:
    """Bytes that tell every position from its neighbours."""
    return (np.arange(template.payload_bytes) * 7 % 251).astype(np.uint8)


def token_ids(template: SlotTemplate) -> npt.NDArray[np.int32]:
    return np.arange(1000, 1000 + template.token_bytes // 4, dtype="<i4")


def image(name: str) -> npt.NDArray[np.uint8]:
    """The image of a case, as this release makes it."""
    layout, num_blocks = CASES[name]
    template = SlotTemplate(layout, num_blocks, NAMESPACE)
    slot = np.full(template.image_bytes, 0xEE, dtype=np.uint8)
    template.prepare(slot)
    template.payload(slot)[:] = payload(template)
    template.seal(slot, KEY, PARENT, token_ids(template).tobytes())
    return slot


def write_all() -> None:
    GOLDEN.mkdir(exist_ok=True)
    for name in CASES:
        (GOLDEN / f"{name}.arrow").write_bytes(image(name).tobytes())


if __name__ == "__main__":
    write_all()

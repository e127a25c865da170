"""After a restart: the images in the slots that an earlier process sealed.

Owns the check of slots as foreign bytes: header and footer must equal, byte for byte, what the
slot's own descriptor makes of them, and the row must match its hash. Payloads are verified before
their first use: here that would read all of the memory.

Invariants: no claim of a slot costs more than the slot is large; the number of templates is
bounded, whatever the slots claim, and the claims of many slots go first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from tiers.errors import ChunkCorrupt
from tiers.kv.arrow_file import PAGE_BYTES, Descriptor, find_descriptor
from tiers.kv.slot_image import claimed_template

if TYPE_CHECKING:
    import numpy.typing as npt

    from tiers.kv.layout import ChunkLayout
    from tiers.kv.slot_image import SlotTemplate
    from tiers.pool.table import SealedSlots

    Bytes = npt.NDArray[np.uint8]

TEMPLATES_MAX: Final = 4096
"""A realm of 16 blocks per chunk and 8 ranks has 128."""
_SLOTS_PER_BATCH: Final = 1024


@dataclass(frozen=True, slots=True)
class FoundImage:
    """An image in a slot. `sealed`, `used` and `tag` come from the pool's table."""

    offset: int
    namespace_digest: bytes
    geometry: ChunkLayout
    """Layout of one block: an image does not contain its chunk size."""
    num_blocks: int
    key: bytes
    parent: bytes
    sealed: int
    used: int
    tag: bytes


def rescan(memory: Bytes, slots: SealedSlots) -> tuple[list[FoundImage], list[int]]:
    """The images in sealed slots in order of their last use, and the slots without one."""
    claims: dict[tuple[Descriptor | None, int], list[int]] = {}
    offsets: list[int] = slots.offsets.tolist()
    sizes: list[int] = slots.slot_bytes.tolist()
    for row, (offset, slot_bytes) in enumerate(zip(offsets, sizes, strict=True)):
        claimed = find_descriptor(memory[offset : offset + PAGE_BYTES].tobytes())
        claims.setdefault((claimed, slot_bytes), []).append(row)
    images: list[FoundImage] = []
    in_order = sorted(claims.items(), key=lambda claim: -len(claim[1]))
    for (claimed, slot_bytes), rows in in_order[:TEMPLATES_MAX]:
        if claimed is None:
            continue
        try:
            template = claimed_template(claimed, slot_bytes)
        except ChunkCorrupt:
            continue
        if template.image_bytes <= slot_bytes:
            for first in range(0, len(rows), _SLOTS_PER_BATCH):
                batch = rows[first : first + _SLOTS_PER_BATCH]
                images += _images(memory, slots, template, np.array(batch))
    images.sort(key=lambda image: image.used)
    good = {image.offset for image in images}
    return images, [offset for offset in offsets if offset not in good]


def _images(
    memory: Bytes, slots: SealedSlots, template: SlotTemplate, rows: npt.NDArray[np.int64]
) -> list[FoundImage]:
    geometry = template.layout.geometry
    found = template.examine(memory, slots.offsets[rows])
    return [
        FoundImage(
            offset=int(slots.offsets[row]),
            namespace_digest=template.namespace_digest,
            geometry=geometry,
            num_blocks=template.num_blocks,
            key=names[0],
            parent=names[1],
            sealed=int(slots.sealed[row]),
            used=int(slots.used[row]),
            tag=slots.tags[row].tobytes(),
        )
        for row, names in zip(rows.tolist(), found, strict=True)
        if names is not None
    ]

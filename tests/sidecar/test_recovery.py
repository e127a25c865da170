"""Slots as foreign bytes: every damage outside of the payload is found, and nothing is trusted."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest

from sidecar.core.commands import RestoredSlot
from sidecar.core.retention import Retention, slot_tag
from sidecar.data.host_pool import rescan
from tests import places
from tiers.kv.layout import ChunkLayout, Segment
from tiers.kv.slot_image import SlotTemplate, SlotTemplates
from tiers.pool.host_pool import HostPool

SEED = int(os.environ.get("KVLAKE_TEST_SEED", "20"))
DIGEST = hashlib.sha256(b"namespace").digest()
LAYOUT = ChunkLayout(Segment(0, 2, 0, 3), 4, 16, 64, "bfloat16", "plain")
WIDE = msgspec.structs.replace(LAYOUT, block_tokens=512, content_bytes=8)
"""Its token ids need more than one page."""


class Filled:
    """A pool with images, as a sidecar leaves it."""

    def __init__(self, path: Path, size_bytes: int = 4 << 20) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self.pool = HostPool.open(path, size_bytes, prefault=False)

    def store(self, name: str, *, layout: ChunkLayout = LAYOUT, blocks: int = 4) -> int:
        templates = SlotTemplates(layout, DIGEST)
        template = templates[blocks]
        offset = self.pool.allocate(self.pool.register_class(templates.slot_bytes))
        assert offset is not None
        self.pool.set_tag(offset, slot_tag(tenant_of(name), Retention(1000.0, stays=True)))
        slot = self.pool.memory[offset : offset + template.image_bytes]
        template.prepare(slot)
        template.payload(slot)[:] = len(name)
        tokens = bytes(template.token_bytes)
        template.seal(slot, key_of(name), key_of(f"before {name}"), tokens)
        self.pool.seal(offset)
        return offset

    def reopened(self) -> tuple[list[RestoredSlot], list[int]]:
        self.pool.close(keep=True)
        self.pool = HostPool.open(self.path, self.size_bytes, prefault=False)
        return rescan(self.pool.memory, self.pool.recovered)


def key_of(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def tenant_of(name: str) -> bytes:
    return name.encode()[:8].ljust(8, b"\0")


@pytest.fixture
def filled(tmp_path: Path) -> Filled:
    return Filled(tmp_path / "pool")


def test_images_come_back_with_all_that_they_say(filled: Filled) -> None:
    whole = filled.store("whole")
    tail = filled.store("tail", blocks=1)
    wide = filled.store("wide", layout=WIDE, blocks=3)
    filled.pool.touch(whole)
    images, damaged = filled.reopened()
    assert damaged == []
    assert images == [
        image(tail, "tail", LAYOUT, 1, 3, 3),
        image(wide, "wide", WIDE, 3, 4, 4),
        image(whole, "whole", LAYOUT, 4, 2, 5),
    ]


def image(
    offset: int, name: str, layout: ChunkLayout, blocks: int, sealed: int, used: int
) -> RestoredSlot:
    return RestoredSlot(
        offset,
        DIGEST,
        layout.geometry,
        blocks,
        key_of(name),
        key_of(f"before {name}"),
        tenant_of(name),
        sealed,
        used,
        Retention(1000.0, stays=True),
    )


def test_every_flip_outside_of_the_payload_is_found(filled: Filled) -> None:
    rng = np.random.default_rng(SEED)
    good, bad = filled.store("good"), filled.store("bad")
    template = SlotTemplate(LAYOUT, 4, DIGEST)
    end = template.payload_offset + template.payload_bytes
    memory = filled.pool.memory
    before = memory[bad : bad + template.image_bytes].copy()
    outside = [*range(template.payload_offset), *range(end, template.image_bytes)]
    images, _ = filled.reopened()
    assert len(images) == 2
    memory = filled.pool.memory
    for place in rng.choice(outside, 400, replace=False).tolist():
        memory[bad + place] ^= 1 << int(rng.integers(8))
        images, damaged = rescan(memory, filled.pool.recovered)
        assert (damaged, [one.slot for one in images]) == ([bad], [good]), place
        memory[bad : bad + template.image_bytes] = before


def test_payload_is_not_looked_at(filled: Filled) -> None:
    offset = filled.store("chunk")
    filled.pool.memory[offset + 5000] ^= 1
    assert len(filled.reopened()[0]) == 1


def test_claims_that_cannot_be_are_refused(filled: Filled) -> None:
    """A descriptor with another length, size or format, and no descriptor at all."""
    offsets = [filled.store(str(number)) for number in range(5)]
    memory = filled.pool.memory
    for offset, (was, becomes) in zip(
        offsets,
        [
            (b'"format":1', b'"format":7'),
            (b'"content_bytes":64', b'"content_bytes":98'),
            (b'"blocks":4', b'"blocks":9'),
            (b'"dtype":"bfloat16"', b'"dtype":"bfloat99"'),
            (b'{"format":1', b"{'format':1"),
        ],
        strict=True,
    ):
        header = memory[offset : offset + 4096].tobytes()
        assert was in header
        memory[offset : offset + 4096] = np.frombuffer(header.replace(was, becomes), dtype=np.uint8)
    assert filled.reopened() == ([], sorted(offsets))


def test_number_of_claims_is_bounded(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    places.patch(monkeypatch, "TEMPLATES_MAX", 2)
    common = [filled.store(f"whole {number}") for number in range(3)]
    twice = [filled.store(f"half {number}", blocks=2) for number in range(2)]
    once = filled.store("tail", blocks=1)
    images, damaged = filled.reopened()
    assert {one.slot for one in images} == {*common, *twice}
    assert damaged == [once]


def test_nothing_was_sealed(filled: Filled) -> None:
    assert filled.reopened() == ([], [])

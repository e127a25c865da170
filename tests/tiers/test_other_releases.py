"""Images of other releases or of another pyarrow: the same columns with other bytes around them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.tiers.golden_images import CASES, KEY, NAMESPACE, PARENT, image
from tiers.errors import ChunkCorrupt, ImageFormatMismatch
from tiers.kv.slot_image import SlotTemplate, SlotTemplates

LAYOUT, BLOCKS = CASES["bfloat16"]
TEMPLATES = SlotTemplates(LAYOUT, NAMESPACE)
TEMPLATE = TEMPLATES[BLOCKS]
IMAGE = image("bfloat16")
PAYLOAD = TEMPLATE.payload(IMAGE).tobytes()
LONGER = (3, 100, 3000)
"""Bytes that the other release's schema has more: within the page, and beyond it."""


def of_another_release(monkeypatch: pytest.MonkeyPatch, more_bytes: int) -> Any:
    """The image as a release writes it whose schema has another entry."""
    schema = pa.schema

    def with_entry(fields: Any, metadata: dict[bytes, bytes]) -> Any:
        return schema(fields, metadata={**metadata, b"writer": b"x" * more_bytes})

    with monkeypatch.context() as patched:
        patched.setattr(pa, "schema", with_entry)
        template = SlotTemplate(LAYOUT, BLOCKS, NAMESPACE)
    found = np.zeros(template.image_bytes, dtype=np.uint8)
    template.prepare(found)
    template.payload(found)[:] = np.frombuffer(PAYLOAD, dtype=np.uint8)
    template.seal(found, KEY, PARENT, TEMPLATE.verify(IMAGE).token_ids)
    return found


def is_read(stored: Any) -> bool:
    """Whether these bytes are accepted: then what is read of them is right."""
    try:
        meta, payload = TEMPLATES.read(np.frombuffer(bytes(stored), dtype=np.uint8), KEY)
    except ChunkCorrupt:
        return False
    assert (meta, payload.tobytes()) == (TEMPLATE.verify(IMAGE), PAYLOAD)
    return True


@pytest.mark.parametrize("more_bytes", LONGER)
def test_an_image_of_another_release_is_read(
    monkeypatch: pytest.MonkeyPatch, more_bytes: int
) -> None:
    other = of_another_release(monkeypatch, more_bytes)
    with pytest.raises(ChunkCorrupt):
        TEMPLATE.verify(other, KEY)
    assert is_read(other)


@pytest.mark.parametrize("more_bytes", [0, *LONGER])
def test_no_damage_of_row_or_payload_is_accepted(
    monkeypatch: pytest.MonkeyPatch, more_bytes: int
) -> None:
    other = of_another_release(monkeypatch, more_bytes) if more_bytes else IMAGE
    stored = bytearray(other.tobytes())
    row, payload = stored.index(KEY), stored.index(PAYLOAD)
    row_bytes = TEMPLATE.row_checksum.stop - TEMPLATE.row.start
    for at in range(len(stored)):
        stored[at] ^= 1 << at % 8
        inside = row <= at < row + row_bytes or payload <= at < payload + len(PAYLOAD)
        assert not (is_read(stored) and inside)
        stored[at] ^= 1 << at % 8
    for size in range(len(stored)):
        assert not (is_read(stored[:size]) and size < payload + len(PAYLOAD))


@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        (b'"segment":"0-2.0-2"', b'"segment":"0-2.1-2"'),
        (b'"dtype":"bfloat16"', b'"dtype":"blfoat16"'),
        (b'"encoding":"raw"', b'"encoding":"war"'),
        (b'"blocks":2', b'"blocks":0'),
        (b'"blocks":2', b'"blocks":3'),
        (b'"blocks":2', b'"blocks":9'),
        (b'"namespace":"00', b'"namespace":"01'),
    ],
)
def test_what_means_something_else_is_refused(was: bytes, becomes: bytes) -> None:
    stored = IMAGE.tobytes()
    assert was in stored
    assert not is_read(stored.replace(was, becomes))


@pytest.mark.parametrize(
    ("was", "becomes"), [(b'{"format":1', b'{"format":2'), (b'"encoding"', b'"encodina"')]
)
def test_another_format_is_named(was: bytes, becomes: bytes) -> None:
    stored = np.frombuffer(IMAGE.tobytes().replace(was, becomes), dtype=np.uint8)
    with pytest.raises(ImageFormatMismatch, match="later release"):
        TEMPLATES.read(stored, KEY)


def test_another_chunk_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    other = of_another_release(monkeypatch, LONGER[0])
    with pytest.raises(ChunkCorrupt):
        TEMPLATES.read(other, PARENT)

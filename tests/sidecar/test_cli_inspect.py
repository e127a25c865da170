"""`kvlake inspect`: what is in a chunk's file, and why another one is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import yaml

from tests.harness.servers import S3Server
from tests.sidecar.commands import kvlake
from tiers.kv.layout import ChunkLayout, Segment
from tiers.kv.slot_image import SlotTemplate
from tiers.store.object_tier import UrlObjects

KEY = bytes(range(32))


@pytest.fixture
def image() -> bytes:
    layout = ChunkLayout(
        segment=Segment(first_layer=0, num_layers=2, first_head=0, num_heads=2),
        blocks_per_chunk=4,
        block_tokens=4,
        content_bytes=16,
        dtype="bfloat16",
        encoding="cuda",
    )
    template = SlotTemplate(layout, 4, bytes(32))
    slot = np.zeros(template.image_bytes, dtype=np.uint8)
    template.prepare(slot)
    template.payload(slot)[:] = 7
    template.seal(slot, KEY, bytes(32), np.arange(16, dtype="<i4").tobytes())
    return slot.tobytes()


def test_an_intact_file_is_shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, image: bytes
) -> None:
    file = tmp_path / "chunk.arrow"
    file.write_bytes(image)
    code, out, _ = kvlake(capsys, "inspect", str(file))
    assert code == 0
    assert f"{file}: intact" in out
    for text in (KEY.hex(), "none (starts a prompt)", "0-2.0-2", "bfloat16", "16 tokens: 0, 1, 2"):
        assert text in out, out
    assert "kv: extension<arrow.fixed_shape_tensor" in out

    code, out, _ = kvlake(capsys, "inspect", "--json", file.as_uri())
    (finding,) = json.loads(out)
    assert code == 0
    assert finding["intact"] is True
    assert finding["key"] == KEY.hex()
    assert finding["token_ids"] == list(range(16))


def test_a_file_in_a_bucket_is_read_with_the_access_settings(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, image: bytes, seaweed: S3Server
) -> None:
    async def put() -> None:
        tier = UrlObjects(f"{seaweed.url}/inspected", seaweed.access_at())
        await tier.write("chunk.arrow", np.frombuffer(image, dtype=np.uint8))
        await tier.close()

    anyio.run(put)
    config = tmp_path / "c.yaml"
    for backend in ("obstore", "fsspec"):
        config.write_text(
            yaml.safe_dump({"store": {"url": seaweed.url, "backend": backend, **seaweed.settings}})
        )
        there, gone = f"{seaweed.url}/inspected/chunk.arrow", f"{seaweed.url}/inspected/none.arrow"
        code, out, _ = kvlake(capsys, "inspect", "--config", str(config), there)
        assert (code, f"{there}: intact" in out) == (0, True), out
        code, out, _ = kvlake(capsys, "inspect", "--config", str(config), gone)
        assert (code, "no such object" in out) == (1, True), out


def test_a_damaged_file_is_reported_with_exit_code_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, image: bytes
) -> None:
    good, bad = tmp_path / "good.arrow", tmp_path / "bad.arrow"
    good.write_bytes(image)
    flipped = bytearray(image)
    flipped[4096] ^= 1
    bad.write_bytes(flipped)
    code, out, _ = kvlake(capsys, "inspect", str(good), str(bad))
    assert code == 1
    assert f"{good}: intact" in out
    assert f"{bad}: BAD: ImageChecksumMismatch" in out


def inspected(capsys: pytest.CaptureFixture[str], place: str) -> dict[str, Any]:
    (document,) = json.loads(kvlake(capsys, "inspect", "--json", place)[1])
    assert (document["intact"], document["columns"]) == (False, {})
    return dict(document)


def test_a_file_that_is_no_chunk_is_reported_with_its_reason(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, image: bytes
) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("not arrow")
    (tmp_path / "cut").write_bytes(image[:5000])
    reasons = {
        name: inspected(capsys, str(tmp_path / name))["reason"]
        for name in ("empty", "text", "cut", "none", "")
    }
    assert reasons["empty"] == "the file is empty"
    assert "ImageHeaderMismatch" in reasons["text"]
    assert "ImageTruncated" in reasons["cut"]
    assert "No such file" in reasons["none"]
    assert "not a regular file" in reasons[""]
    assert "cannot be read" in inspected(capsys, "nosuch://x/y")["reason"]


def test_a_url_is_shown_without_its_password(capsys: pytest.CaptureFixture[str]) -> None:
    finding = inspected(capsys, "memory://user:hunter2@x/none.arrow")
    assert "hunter2" not in finding["place"]

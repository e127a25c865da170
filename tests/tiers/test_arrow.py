from __future__ import annotations

import json
import threading
from typing import Any

import msgspec
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.dataset
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import places
from tests.tiers.golden_images import (
    CASES,
    GOLDEN,
    KEY,
    NAMESPACE,
    PARENT,
    image,
    payload,
    token_ids,
)
from tiers.errors import (
    ChunkCorrupt,
    ImageChecksumMismatch,
    ImageHeaderMismatch,
    ImageKeyMismatch,
    ImageNamespaceMismatch,
    ImageTruncated,
    LayoutError,
)
from tiers.kv.arrow_file import PAGE_BYTES
from tiers.kv.layout import ITEM_BYTES, ChunkLayout, Segment
from tiers.kv.slot_image import SegmentReport, SlotTemplate, SlotTemplates, inspect_image

LAYOUT, BLOCKS = CASES["bfloat16"]
TEMPLATE = SlotTemplate(LAYOUT, BLOCKS, NAMESPACE)
IMAGE = image("bfloat16")


def verdict_of(report: SegmentReport) -> str:
    """`intact`, or the name of the error."""
    return "intact" if report.error is None else type(report.error).__name__


def flipped(source: np.ndarray[Any, np.dtype[np.uint8]], byte: int, bit: int) -> Any:
    changed = source.copy()
    changed[byte] ^= 1 << bit
    return changed


# --- other readers -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_this_release_writes_the_golden_bytes(name: str) -> None:
    assert image(name).tobytes() == (GOLDEN / f"{name}.arrow").read_bytes()


@pytest.mark.parametrize("name", CASES)
def test_golden_files_verify_and_inspect(name: str) -> None:
    layout, num_blocks = CASES[name]
    template = SlotTemplate(layout, num_blocks, NAMESPACE)
    stored = (GOLDEN / f"{name}.arrow").read_bytes()
    meta = template.verify(stored, KEY)
    assert (meta.key, meta.parent, meta.num_blocks) == (KEY, PARENT, num_blocks)
    assert meta.token_ids == token_ids(template).tobytes()
    assert meta.checksum == xxhash.xxh3_128_digest(payload(template).tobytes())
    report = inspect_image(memoryview(stored))
    assert verdict_of(report) == "intact"
    assert report.meta == meta
    assert report.descriptor is not None
    assert report.descriptor.segment == layout.segment.name


def check_row(name: str, row: dict[str, Any]) -> None:
    layout, num_blocks = CASES[name]
    template = SlotTemplate(layout, num_blocks, NAMESPACE)
    assert row["block_hash"] == KEY
    assert row["parent_hash"] == PARENT
    assert row["kv_xxh3"] == xxhash.xxh3_128_digest(payload(template).tobytes())
    assert list(row["token_ids"]) == token_ids(template).tolist()


def check_metadata(name: str, metadata: dict[bytes, bytes]) -> None:
    layout, num_blocks = CASES[name]
    state = {"entry_tokens": layout.entry_tokens} if name == "state" else {}
    assert json.loads(metadata[b"kvlake"]) == state | {
        "format": 1,
        "namespace": NAMESPACE.hex(),
        "segment": layout.segment.name,
        "dtype": layout.dtype,
        "encoding": layout.encoding,
        "block_tokens": layout.block_tokens,
        "content_bytes": layout.content_bytes,
        "blocks": num_blocks,
    }


def check_tensor(name: str, column: Any) -> None:
    layout, num_blocks = CASES[name]
    tensor = column.to_numpy_ndarray()
    assert tensor.shape == (1, *layout.shape(num_blocks))
    assert tensor.dtype.itemsize == layout.itemsize
    template = SlotTemplate(layout, num_blocks, NAMESPACE)
    assert tensor.tobytes() == payload(template).tobytes()
    assert column.type.dim_names == ["blocks", "layers", "heads", "tokens", "content"]


@pytest.mark.parametrize("name", CASES)
def test_pyarrow_reads_an_image_without_copying_it(name: str) -> None:
    path = str(GOLDEN / f"{name}.arrow")
    with pa.memory_map(path) as mapping, pa.ipc.open_file(mapping) as reader:
        reader.get_batch(0).validate(full=True)
    buffer = pa.py_buffer(image(name))
    with pa.ipc.open_file(buffer) as reader:
        assert reader.num_record_batches == 1
        batch = reader.get_batch(0)
        check_metadata(name, reader.schema.metadata)
    check_row(name, batch.to_pylist()[0])
    check_tensor(name, batch.column("kv"))
    assert batch.column("kv").storage.values.buffers()[1].address - buffer.address == PAGE_BYTES


@pytest.mark.parametrize("name", CASES)
def test_pyarrow_dataset_reads_an_image(name: str) -> None:
    dataset = pyarrow.dataset.dataset(str(GOLDEN / f"{name}.arrow"), format="ipc")
    check_metadata(name, dataset.schema.metadata)
    table = dataset.to_table(columns=["block_hash", "parent_hash", "kv_xxh3", "token_ids", "kv"])
    check_row(name, table.to_pylist()[0])
    check_tensor(name, table.column("kv").chunk(0))


@pytest.mark.parametrize("name", CASES)
def test_polars_reads_an_image(name: str) -> None:
    layout, num_blocks = CASES[name]
    frame = pl.read_ipc(GOLDEN / f"{name}.arrow")
    assert frame.height == 1
    check_row(name, frame.row(0, named=True))
    template = SlotTemplate(layout, num_blocks, NAMESPACE)
    assert frame["kv"].to_numpy().tobytes() == payload(template).tobytes()


# --- making images -----------------------------------------------------------------------------

layouts = st.builds(
    ChunkLayout,
    segment=st.builds(
        Segment, st.integers(0, 999), st.integers(1, 5), st.integers(0, 99), st.integers(1, 5)
    ),
    blocks_per_chunk=st.integers(1, 12),
    block_tokens=st.sampled_from([1, 3, 16, 32, 64, 128]),
    content_bytes=st.sampled_from([4, 20, 64]),
    dtype=st.sampled_from(sorted(ITEM_BYTES)),
    encoding=st.sampled_from(["raw", "cpu.avx512", "x" * 128]),
)


@settings(max_examples=60)
@given(layout=layouts, data=st.data())
def test_any_image_is_a_valid_arrow_file_and_verifies(
    layout: ChunkLayout, data: st.DataObject
) -> None:
    num_blocks = data.draw(st.integers(1, layout.blocks_per_chunk))
    template = SlotTemplate(layout, num_blocks, NAMESPACE)
    assert template.payload_offset % 4096 == 0
    random = np.random.default_rng(num_blocks)
    slot = random.integers(0, 256, template.image_bytes + 100, dtype=np.uint8)
    beyond = slot[template.image_bytes :].copy()
    tokens = random.integers(0, 1 << 31, template.token_bytes // 4, dtype=np.int32).tobytes()
    template.prepare(slot)
    content = template.payload(slot).copy()
    checksum = template.seal(slot, KEY, PARENT, tokens)
    made = slot[: template.image_bytes]
    meta = template.verify(made, KEY)
    assert (meta.token_ids, meta.checksum) == (tokens, checksum)
    template.verify_payload(slot)
    assert np.array_equal(slot[template.image_bytes :], beyond)
    with pa.ipc.open_file(pa.py_buffer(made)) as reader:
        batch = reader.get_batch(0)
    batch.validate(full=True)
    assert batch.column("kv").to_numpy_ndarray().tobytes() == content.tobytes()
    row = batch.to_pylist()[0]
    assert np.array(row["token_ids"], dtype="<i4").tobytes() == tokens
    report = inspect_image(made)
    assert (verdict_of(report), report.meta) == ("intact", meta)


def test_a_chunk_of_many_tokens_moves_the_payload_to_a_later_page() -> None:
    layout = ChunkLayout(Segment(0, 1, 0, 1), 64, 64, 4, "bfloat16", "raw")
    template = SlotTemplate(layout, 64, NAMESPACE)
    assert template.payload_offset == 5 * 4096
    assert SlotTemplate(layout, 8, NAMESPACE).payload_offset == PAGE_BYTES


def test_the_size_of_a_full_chunk_does_not_show_in_a_partial_one() -> None:
    other = msgspec.structs.replace(LAYOUT, blocks_per_chunk=LAYOUT.blocks_per_chunk * 2)
    slot = np.zeros_like(IMAGE)
    template = SlotTemplate(other, BLOCKS, NAMESPACE)
    template.prepare(slot)
    template.payload(slot)[:] = payload(template)
    template.seal(slot, KEY, PARENT, token_ids(template).tobytes())
    assert np.array_equal(slot, IMAGE)


def test_a_slot_that_is_used_again_keeps_nothing_of_its_past() -> None:
    slot = IMAGE.copy()
    template = TEMPLATE
    template.prepare(slot)
    template.payload(slot)[:] = 7
    template.seal(slot, PARENT, KEY, bytes(template.token_bytes))
    fresh = np.zeros_like(slot)
    template.prepare(fresh)
    template.payload(fresh)[:] = 7
    template.seal(fresh, PARENT, KEY, bytes(template.token_bytes))
    assert np.array_equal(slot, fresh)


@pytest.mark.parametrize(
    ("key", "parent", "tokens", "said"),
    [
        (KEY[:31], PARENT, bytes(TEMPLATE.token_bytes), "key has 31 bytes"),
        (KEY, b"", bytes(TEMPLATE.token_bytes), "parent has 0 bytes"),
        (KEY, PARENT, bytes(TEMPLATE.token_bytes - 4), "token_ids has 28 bytes"),
    ],
)
def test_a_row_that_does_not_fit_is_refused_and_nothing_is_written(
    key: bytes, parent: bytes, tokens: bytes, said: str
) -> None:
    slot = IMAGE.copy()
    with pytest.raises(LayoutError, match=said):
        TEMPLATE.seal(slot, key, parent, tokens)
    assert np.array_equal(slot, IMAGE)


def test_a_slot_or_namespace_of_the_wrong_size_is_refused() -> None:
    short = IMAGE[:-1].copy()
    with pytest.raises(LayoutError, match="slot has"):
        TEMPLATE.prepare(short)
    with pytest.raises(LayoutError, match="slot has"):
        TEMPLATE.payload(short)
    with pytest.raises(LayoutError, match="namespace_digest has 3 bytes"):
        SlotTemplate(LAYOUT, BLOCKS, b"abc")
    with pytest.raises(LayoutError, match="num_blocks=5"):
        SlotTemplate(LAYOUT, 5, NAMESPACE)


# --- sets of templates -------------------------------------------------------------------------


@settings(max_examples=25)
@given(layout=layouts.filter(lambda layout: layout.block_payload_bytes >= 8))
def test_an_image_s_length_says_how_many_blocks_it_has(layout: ChunkLayout) -> None:
    templates = SlotTemplates(layout, NAMESPACE)
    sizes = [templates[blocks].image_bytes for blocks in range(1, layout.blocks_per_chunk + 1)]
    assert sizes == sorted(set(sizes))
    assert templates.slot_bytes % 4096 == 0
    assert 0 <= templates.slot_bytes - sizes[-1] < 4096
    for blocks, size in enumerate(sizes, start=1):
        assert templates.for_image_bytes(size) is templates[blocks]
    for size in {0, 1, 4096, *(size - 1 for size in sizes), *(size + 1 for size in sizes)}:
        if size not in sizes:
            with pytest.raises(ImageTruncated, match=f"image has {size} bytes"):
                templates.for_image_bytes(size)


def test_blocks_too_small_to_show_in_the_length_are_refused() -> None:
    layout = ChunkLayout(Segment(0, 1, 0, 1), 2, 1, 4, "bfloat16", "raw")
    with pytest.raises(LayoutError, match="block_payload_bytes=4"):
        SlotTemplates(layout, NAMESPACE)


def test_a_full_chunk_is_found_without_making_other_templates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first reads made three of them in each thread, which took 12 ms."""
    templates = SlotTemplates(LAYOUT, NAMESPACE)
    full = templates[LAYOUT.blocks_per_chunk]
    places.patch(monkeypatch, "SlotTemplate", None)
    assert templates.for_image_bytes(full.image_bytes) is full


def test_threads_may_ask_for_the_same_template() -> None:
    templates = SlotTemplates(LAYOUT, NAMESPACE)
    made: list[SlotTemplate] = []
    threads = [threading.Thread(target=lambda: made.append(templates[BLOCKS])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 8
    for template in made:
        assert template.verify(IMAGE, KEY).key == KEY


# --- foreign bytes -----------------------------------------------------------------------------


def test_truncation_at_every_length_is_named() -> None:
    stored = IMAGE.tobytes()
    for size in range(len(stored)):
        with pytest.raises(ImageTruncated):
            TEMPLATE.verify(stored[:size])
    for tail in (b"\0", stored):
        with pytest.raises(ImageTruncated):
            TEMPLATE.verify(stored + tail)


def test_no_flipped_bit_of_any_byte_is_accepted() -> None:
    """Every byte of the file, one bit each: with and without the key, each a named error."""
    seen: set[str] = set()
    for byte in range(IMAGE.size):
        bad = flipped(IMAGE, byte, byte % 8)
        with pytest.raises(ChunkCorrupt) as error:
            TEMPLATE.verify(bad)
        seen.add(type(error.value).__name__)
        inside = TEMPLATE.payload_offset <= byte < TEMPLATE.payload_offset + TEMPLATE.payload_bytes
        assert isinstance(error.value, ImageChecksumMismatch) == inside
    assert seen == {"ImageHeaderMismatch", "ImageNamespaceMismatch", "ImageChecksumMismatch"}


@settings(max_examples=300)
@given(
    flips=st.sets(
        st.tuples(st.integers(0, IMAGE.size - 1), st.integers(0, 7)), min_size=1, max_size=4
    ),
    key=st.sampled_from([None, KEY]),
)
def test_sampled_flips_are_refused_by_verify_and_by_inspect(
    flips: set[tuple[int, int]], key: bytes | None
) -> None:
    bad = IMAGE.copy()
    for byte, bit in flips:
        bad[byte] ^= 1 << bit
    with pytest.raises(ChunkCorrupt):
        TEMPLATE.verify(bad, key)
    report = inspect_image(bad)
    assert report.error is not None
    assert report.meta is None


@settings(max_examples=200)
@given(
    byte=st.integers(0, TEMPLATE.payload_bytes - 1),
    value=st.integers(1, 255),
    beside=st.integers(0, 64),
)
def test_a_changed_payload_fails_its_checksum(byte: int, value: int, beside: int) -> None:
    slot = np.concatenate((IMAGE, np.zeros(beside, dtype=np.uint8)))
    TEMPLATE.payload(slot)[byte] ^= value
    with pytest.raises(ImageChecksumMismatch, match="payload hashes to"):
        TEMPLATE.verify_payload(slot)
    with pytest.raises(ImageChecksumMismatch):
        TEMPLATE.verify(slot[: TEMPLATE.image_bytes], KEY)


def test_another_chunk_under_this_name_is_a_key_mismatch() -> None:
    with pytest.raises(ImageKeyMismatch, match="stored under a wrong name"):
        TEMPLATE.verify(IMAGE, PARENT)
    # Known before the payload is read: the key is compared first.
    bad = IMAGE.copy()
    TEMPLATE.payload(bad)[0] ^= 1
    with pytest.raises(ImageKeyMismatch):
        TEMPLATE.verify(bad, PARENT)


def test_an_image_of_another_namespace_is_named() -> None:
    other = SlotTemplate(LAYOUT, BLOCKS, bytes(32))
    with pytest.raises(ImageNamespaceMismatch, match="another model"):
        other.verify(IMAGE, KEY)


@pytest.mark.parametrize(
    "fields",
    [{"segment": Segment(2, 2, 0, 2)}, {"dtype": "float16"}, {"encoding": "war"}],
)
def test_an_image_of_another_layout_is_refused(fields: dict[str, Any]) -> None:
    other = SlotTemplate(msgspec.structs.replace(LAYOUT, **fields), BLOCKS, NAMESPACE)
    with pytest.raises((ImageHeaderMismatch, ImageTruncated)):
        other.verify(IMAGE, KEY)


def test_an_image_with_the_number_of_blocks_of_another_is_truncated() -> None:
    with pytest.raises(ImageTruncated, match="3 blocks"):
        SlotTemplate(LAYOUT, 3, NAMESPACE).verify(IMAGE, KEY)


# --- inspect -----------------------------------------------------------------------------------


@settings(max_examples=200)
@given(blob=st.binary(max_size=300))
def test_inspect_says_so_of_anything_else(blob: bytes) -> None:
    report = inspect_image(blob)
    assert verdict_of(report) == "ImageHeaderMismatch"
    assert report.image_bytes == len(blob)
    assert report.descriptor is None


def test_inspect_of_every_truncation_is_no_crash() -> None:
    stored = IMAGE.tobytes()
    for size in range(0, len(stored), 61):
        assert inspect_image(stored[:size]).error is not None
    assert verdict_of(inspect_image(stored[:-1])) == "ImageTruncated"


def with_descriptor(**fields: Any) -> bytes:
    """A page that carries a descriptor, changed, as an attacker could write it."""
    about = {
        "format": 1,
        "namespace": NAMESPACE.hex(),
        "segment": "0-2.0-2",
        "dtype": "bfloat16",
        "encoding": "raw",
        "block_tokens": 4,
        "content_bytes": 16,
        "blocks": 2,
    }
    raw = msgspec.json.encode({**about, **fields})
    return (b"ARROW1\0\0" + len(raw).to_bytes(4, "little") + raw).ljust(IMAGE.size, b"\0")


@pytest.mark.parametrize(
    ("fields", "verdict", "said"),
    [
        ({}, "ImageHeaderMismatch", "header differs"),
        ({"format": 2}, "ImageHeaderMismatch", "format=2"),
        ({"segment": "2-0.0-1"}, "ImageHeaderMismatch", "num_layers=-2"),
        ({"segment": "x" * 500}, "ImageHeaderMismatch", "segment="),
        ({"namespace": "zz"}, "ImageHeaderMismatch", "non-hexadecimal"),
        ({"namespace": "00"}, "ImageHeaderMismatch", "namespace_digest has 1 bytes"),
        ({"blocks": 0}, "ImageHeaderMismatch", "blocks_per_chunk=0"),
        ({"blocks": -1}, "ImageHeaderMismatch", "blocks_per_chunk=-1"),
        ({"blocks": 1 << 60}, "ImageHeaderMismatch", "blocks_per_chunk="),
        ({"blocks": 16_384}, "ImageTruncated", "claims more than"),
        ({"block_tokens": 32_768}, "ImageTruncated", "claims more than"),
        ({"blocks": 65_536}, "ImageHeaderMismatch", "blocks_per_chunk * block_tokens=262144"),
        ({"content_bytes": 1 << 20}, "ImageTruncated", "claims more than"),
        ({"encoding": "../.."}, "ImageHeaderMismatch", "encoding="),
        ({"dtype": "object"}, "ImageHeaderMismatch", "dtype='object'"),
        ({"extra": 1}, "ImageHeaderMismatch", "no kvlake descriptor"),
        ({"blocks": "2"}, "ImageHeaderMismatch", "no kvlake descriptor"),
        ({"encoding": "x" * 2000}, "ImageHeaderMismatch", "no kvlake descriptor"),
    ],
)
def test_inspect_believes_no_descriptor(fields: dict[str, Any], verdict: str, said: str) -> None:
    report = inspect_image(with_descriptor(**fields))
    assert verdict_of(report) == verdict
    assert said in str(report.error)

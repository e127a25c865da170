"""What is fuzzed: each place where bytes that somebody else chose are first read.

Owns the targets: how to feed one input, what may come of it, and valid inputs to start from. Does
not own mutations (`mutation.py`), the committed corpus, or how many inputs are tried.

Invariants: `Target.feed` returns for whatever the code under test may do with an input (refusing
it included) and raises for a finding; it keeps nothing between two inputs; seeds are made by the
code of today, so they follow the formats.
"""

# ruff: noqa: PT017 (a refusal is one of the outcomes, and is checked where it is one)

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import xxhash

from sidecar import protocol
from sidecar.protocol import (
    Attach,
    Attached,
    Declined,
    Done,
    Error,
    Events,
    IndexMoved,
    JobOutcome,
    Lease,
    Limits,
    LoadChunk,
    LoadJob,
    Lookup,
    LookupDone,
    Memory,
    Outcome,
    Refused,
    Release,
    RemovedEvent,
    Role,
    StoreChunk,
    StoredEvent,
    StoreJob,
    Submit,
    codec,
)
from sidecar.protocol.codec import ProtocolError
from sidecar.sessions.session import check_shape
from tests.fuzz import catalog_targets
from tests.fuzz.mutation import damage, damage_message
from tests.tiers.golden_images import CASES, NAMESPACE, image
from tests.tiers.golden_images import KEY as IMAGE_KEY
from tiers.catalog.names import NAMESPACE_CHARACTERS, object_name, parse_name
from tiers.errors import ChunkCorrupt, LayoutError
from tiers.kv.arrow_file import find_descriptor
from tiers.kv.copy import CopyPlan
from tiers.kv.fence import SidecarFence
from tiers.kv.index import IndexReader, IndexWriter, tag_of, tags_of
from tiers.kv.layout import KVLayout, Segment
from tiers.kv.slot_image import SlotTemplate, SlotTemplates, inspect_image

CORPUS: Final = Path(__file__).parent / "corpus"
CODES: Final = {"version", "frame_too_large", "unknown_tag", "field", "malformed"}
KEY: Final = bytes(range(32))

Damage = Callable[[bytes, random.Random, Sequence[bytes]], bytes]


@dataclass(frozen=True)
class Target:
    """One entry point. `feed` raises for a finding, whatever the exception."""

    name: str
    feed: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    damage: Damage = damage

    def corpus(self) -> list[bytes]:
        """Seeds, then the committed inputs, in a fixed order."""
        return self.seeds() + [path.read_bytes() for path in self.files()]

    def files(self) -> list[Path]:
        """The committed inputs: what coverage-guided runs found, and every past finding."""
        return sorted((CORPUS / self.name).glob("*"))


# --- protocol --------------------------------------------------------------------------------

SEGMENT: Final = Segment(0, 2, 0, 1)
LAYOUT: Final = KVLayout(SEGMENT, 4, 16, 8, "bfloat16", "plain", 4096, (0, 2048), 128, 128, 8)
WORKER: Final = Attach(
    version=protocol.PROTOCOL_VERSION,
    role=Role.WORKER,
    engine_id="engine",
    rank=0,
    world_size=1,
    topology="tp1",
    namespace=b'{"model":"m"}',
    block_tokens=16,
    blocks_per_chunk=4,
    pid=1,
    segment=SEGMENT,
    layout=LAYOUT,
    memory=Memory("memfd", 4096),
)
SCHEDULER: Final = msgspec.structs.replace(
    WORKER, role=Role.SCHEDULER, want_events=True, segment=None, layout=None, memory=None
)
DECLINED: Final = Declined(
    protocol.PROTOCOL_VERSION, Role.WORKER, "engine", "memory", "it is in pieces"
)


def client_frames(epoch: int = 1) -> list[bytes]:
    """One frame of each kind that a connector sends over ZMQ."""
    load = LoadJob(7, [LoadChunk(KEY, 1, [3, 2])])
    store = StoreJob(8, [StoreChunk(KEY, bytes(32), bytes(16 * 4 * 2), [0, 1])])
    messages: list[protocol.ClientMessage] = [
        Submit(epoch, 5, [load], [store]),
        Submit(epoch, 0, [], [store, store]),
        Lookup(epoch, 1, [KEY, KEY[::-1]], 100),
        Lease(epoch, 7, [KEY]),
        protocol.Pin(epoch, [KEY, KEY[::-1]], 1000),
        Release(epoch, [7], [1]),
        protocol.Use(epoch, [KEY, KEY[::-1]], 128),
        protocol.Use(epoch, [KEY, KEY[::-1]], 128, [0, 1]),
        protocol.Use(epoch, [KEY, KEY], 128),
    ]
    return [codec.encode(message) for message in messages]


def server_frames() -> list[bytes]:
    """One frame of each kind that a sidecar sends over ZMQ."""
    events = Events(1, [StoredEvent(KEY, bytes(32), 64, "host")], [RemovedEvent(KEY, "store")])
    messages: list[protocol.ServerMessage] = [
        Done(1, [JobOutcome(7, Outcome.OK), JobOutcome(8, Outcome.FULL)]),
        LookupDone(1, 1, 2, Outcome.OK),
        events,
        Error(1, "field", "no"),
    ]
    return [codec.encode(message) for message in messages]


def reply_frames() -> list[bytes]:
    """One frame of each kind that a sidecar sends over its Unix socket."""
    limits = Limits(500, 5000, 10_000, 256, 10_000)
    messages: list[protocol.AttachReply] = [
        Attached(1, 2, bytes(range(16)), "ipc:///tmp/x", limits, bytes(16), 4096),
        Refused("layout", "no"),
        IndexMoved(1, 8192),
    ]
    return [codec.encode(message) for message in messages]


def attach_frames() -> list[bytes]:
    """The first frames of workers, large ones too, of a scheduler, and of one without the cache."""
    wide = _worker(Segment(0, 4, 0, 1000), 4_000, (0, 2**25, 2**26, 2**27), 3, 12_000)
    deep = _worker(Segment(0, 1, 0, 1), 16, (0,), 1 << 20, 1 << 30)
    tiny = _worker(Segment(0, 1, 0, 1), 1, (0,), 8, 8)
    return [codec.encode(message) for message in (WORKER, SCHEDULER, DECLINED, wide, deep, tiny)]


def _worker(
    segment: Segment, block_tokens: int, offsets: tuple[int, ...], content: int, head_stride: int
) -> Attach:
    size_bytes = 1 << 32
    layout = KVLayout(
        *(segment, 1, block_tokens, content, "uint8", "plain", size_bytes, offsets),
        *(0, head_stride, content),
    )
    return msgspec.structs.replace(
        WORKER,
        segment=segment,
        layout=layout,
        memory=Memory("memfd", size_bytes),
        block_tokens=block_tokens,
    )


def _decoding(decode: Callable[[bytes], object]) -> Callable[[bytes], None]:
    """A frame is a message that means what it says, or a `ProtocolError` with a known code."""

    def feed(data: bytes) -> None:
        try:
            message = decode(data)
        except ProtocolError as error:
            assert error.code in CODES, error.code
            assert str(error), "an error says what is wrong"
            return
        again = decode(msgspec.msgpack.encode(message))
        assert again == message or "nan" in repr(message), "a message must survive its own codec"

    return feed


def _feed_attach(data: bytes) -> None:
    """Everything that admission computes of an `Attach` before it asks who else is here."""
    _decoding(codec.decode_first)(data)
    try:
        attach = codec.decode_first(data)
        if isinstance(attach, protocol.Declined):
            return
        check_shape(attach)
    except ProtocolError:
        return
    for part in attach.parts:
        if part.layout is None:
            return
        # Both are made for a client that was not refused: they may not be large.
        CopyPlan(part.layout)
        with contextlib.suppress(LayoutError):
            SlotTemplates(part.layout.chunk(part.blocks_per_chunk), bytes(32))


# --- images ----------------------------------------------------------------------------------


def _rebuilt(template: SlotTemplate, data: bytes) -> bytes:
    """The one image that holds what `data` was accepted as holding."""
    meta = template.verify(data)
    slot = np.zeros(template.image_bytes, dtype=np.uint8)
    template.prepare(slot)
    given = np.frombuffer(data, dtype=np.uint8)
    template.payload(slot)[:] = template.payload(given)
    template.seal(slot, meta.key, meta.parent, meta.token_ids)
    return slot.tobytes()


def _feed_image(data: bytes) -> None:
    """An intact image is, byte for byte, what this release makes of its content."""
    report = inspect_image(data)
    if report.error is not None:
        assert str(report.error), "a verdict has a reason"
        return
    assert report.descriptor is not None
    about = report.descriptor
    assert about.namespace == about.namespace.lower()
    for layout, num_blocks in CASES.values():
        template = SlotTemplate(layout, num_blocks, bytes.fromhex(about.namespace))
        if template.image_bytes == len(data) and layout.segment.name == about.segment:
            assert _rebuilt(template, data) == data, "accepted bytes that nobody wrote"


TEMPLATES: Final = {name: SlotTemplates(layout, NAMESPACE) for name, (layout, _) in CASES.items()}


def _feed_slot(data: bytes) -> None:
    """As a sidecar reads an object: by its length, then against the template."""
    for templates in TEMPLATES.values():
        with contextlib.suppress(ChunkCorrupt):
            templates.read(np.frombuffer(data, dtype=np.uint8), IMAGE_KEY)
        try:
            template = templates.for_image_bytes(len(data))
            template.verify(data)
        except ChunkCorrupt as error:
            assert str(error), "a verdict has a reason"
            continue
        assert _rebuilt(template, data) == data, "accepted bytes that nobody wrote"


def _damage_image(data: bytes, chooser: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """As `damage`; at times with other claims, or with checksums made right again."""
    match chooser.randrange(4):
        case 0:
            data = _other_claims(data, chooser)
        case 1:
            data = _checksums_right(damage(data, chooser))
        case _:
            data = damage(data, chooser, others)
    return data


def _other_claims(data: bytes, chooser: random.Random) -> bytes:
    """The descriptor says something else, in as many bytes or with its length corrected."""
    descriptor = find_descriptor(data)
    if descriptor is None:
        return damage(data, chooser)
    start = data.find(b'{"format":')
    length = int.from_bytes(data[start - 4 : start], "little")
    claims = msgspec.to_builtins(descriptor)
    name = chooser.choice(list(claims))
    value = claims[name]
    if isinstance(value, int):
        near = (value + 1, value - 1, value * 2, value * 2**20, 0, -1, 2**31, 2**63, 65_536)
        claims[name] = chooser.choice(near)
    else:
        claims[name] = chooser.choice((value.upper(), value + " ", value[:-1], value * 9, "", "é"))
    spelt = msgspec.json.encode(claims)
    return data[: start - 4] + struct.pack("<I", len(spelt)) + spelt + data[start + length :]


def _checksums_right(data: bytes) -> bytes:
    """What an attacker would do: hash the damaged content again."""
    for templates in TEMPLATES.values():
        try:
            template = templates.for_image_bytes(len(data))
        except ChunkCorrupt:
            continue
        slot = np.frombuffer(data, dtype=np.uint8).copy()
        slot[template.checksum] = np.frombuffer(
            xxhash.xxh3_128_digest(template.payload(slot).tobytes()), dtype=np.uint8
        )
        slot[template.row_checksum] = np.frombuffer(
            xxhash.xxh3_128_digest(slot[template.row].tobytes()), dtype=np.uint8
        )
        return slot.tobytes()
    return data


def _image_seeds() -> list[bytes]:
    return [image(name).tobytes() for name in CASES]


# --- names, and memory that others write ----------------------------------------------------------


def _feed_name(data: bytes) -> None:
    """A name parses only if it is the name of what it parses as."""
    name = data.decode("utf-8", "replace")
    parts = parse_name(name)
    if parts is not None:
        digest = bytes.fromhex(parts.namespace) + bytes(32 - NAMESPACE_CHARACTERS // 2)
        assert object_name(digest, parts.key, parts.segment) == name
    try:
        assert Segment.parse(name).name == name
    except LayoutError as error:
        assert len(str(error)) < 1000


def _feed_index(data: bytes) -> None:
    """An index of any content answers or is refused; a tag that is not in it is not found."""
    fd = os.memfd_create("fuzz-index", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.write(fd, data)
        if data[-1:] != b"\xff":
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        try:
            reader = IndexReader(os.dup(fd), len(data))
        except LayoutError:
            return
        try:
            flags = reader.lookup(tags_of([KEY, bytes(32), KEY[::-1]], bytes(16)))
        finally:
            reader.close()
    finally:
        os.close(fd)
    for key, flag in zip((KEY, bytes(32), KEY[::-1]), flags.tolist(), strict=True):
        assert not flag or tag_of(key, bytes(16)) in data


def _index_seeds() -> list[bytes]:
    writer = IndexWriter(8)
    try:
        writer.set(tag_of(KEY, bytes(16)), 3)
        with mmap.mmap(writer.fd, writer.size_bytes, prot=mmap.PROT_READ) as mapping:
            return [mapping[:]]
    finally:
        writer.close()


def _feed_fence(data: bytes) -> None:
    """A fence page of any content: a worker can hold back its own jobs, and nothing else."""
    fd = os.memfd_create("fuzz-fence", os.MFD_CLOEXEC)
    try:
        os.write(fd, data)
        try:
            fence = SidecarFence(os.dup(fd))
        except ValueError:
            assert len(data) < 4096
            return
        try:
            done, revoked = struct.unpack_from("<QQ", data)
            for number in (0, 1, 2**63, 2**64 - 1, done, revoked):
                assert fence.reached(number) == (done >= number)
                try:
                    with fence.copying(number) as valid:
                        assert valid == (number >= revoked)
                except BlockingIOError:
                    assert fence.revoking, "only a worker that revokes holds its own copies off"
        finally:
            fence.close()
    finally:
        os.close(fd)


def _fence_seeds() -> list[bytes]:
    return [struct.pack("<QQ", 5, 3).ljust(4096, b"\0"), bytes(4096), b"\xff" * 4096]


TARGETS: Final = {
    target.name: target
    for target in (
        Target("client", _decoding(codec.decode_client), client_frames, damage_message),
        Target("server", _decoding(codec.decode_server), server_frames, damage_message),
        Target("reply", _decoding(codec.decode_attach_reply), reply_frames, damage_message),
        Target("attach", _feed_attach, attach_frames, damage_message),
        Target("image", _feed_image, _image_seeds, _damage_image),
        Target("slot", _feed_slot, _image_seeds, _damage_image),
        Target("name", _feed_name, lambda: [object_name(KEY, KEY, SEGMENT).encode()]),
        Target("index", _feed_index, _index_seeds),
        Target("fence", _feed_fence, _fence_seeds),
        Target(
            "catalog-rows",
            catalog_targets.feed_rows,
            catalog_targets.row_seeds,
            catalog_targets.damage_rows,
        ),
        Target(
            "catalog-manifest",
            catalog_targets.feed_manifest,
            catalog_targets.manifest_seeds,
            catalog_targets.damage_manifest,
        ),
        Target(
            "catalog-about",
            catalog_targets.feed_about,
            catalog_targets.about_seeds,
            catalog_targets.damage_about,
        ),
        Target("catalog-name", catalog_targets.feed_name, catalog_targets.name_seeds),
        Target(
            "catalog-folder",
            catalog_targets.feed_folder,
            catalog_targets.folder_seeds,
            catalog_targets.damage_folder,
        ),
    )
}

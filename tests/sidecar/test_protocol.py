"""The codec: what is sent comes back, and only `ProtocolError` ever comes out of a bad frame."""

from __future__ import annotations

import tracemalloc
from typing import TYPE_CHECKING, Any, get_args

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import example, given, settings

from sidecar.protocol import (
    DECLINED_CHARS_MAX,
    FRAME_BYTES_MAX,
    JOBS_PER_MESSAGE_MAX,
    KEY_BYTES,
    KEYS_PER_MESSAGE_MAX,
    NAMESPACE_BYTES_MAX,
    PIN_MS_MAX,
    PROTOCOL_VERSION,
    TTL_MS_MAX,
    Attach,
    Attached,
    ClientMessage,
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
    Pin,
    Refused,
    Release,
    RemovedEvent,
    Role,
    ServerMessage,
    StoreChunk,
    StoredEvent,
    StoreJob,
    Submit,
)
from sidecar.protocol.codec import (
    ProtocolError,
    decode_attach_reply,
    decode_client,
    decode_first,
    decode_server,
    encode,
    frame_stream,
    stream_length,
)
from tiers.kv.layout import KVLayout, Segment

if TYPE_CHECKING:
    from collections.abc import Callable

KEY = bytes(range(KEY_BYTES))
DECODERS: tuple[Callable[[bytes | memoryview], object], ...] = (
    decode_client,
    decode_server,
    decode_first,
    decode_attach_reply,
)

SEGMENT = Segment(0, 2, 0, 1)
LAYOUT = KVLayout(SEGMENT, 4, 16, 8, "bfloat16", "plain", 4096, (0, 2048), 128, 128, 8)
WORKER = Attach(
    version=PROTOCOL_VERSION,
    role=Role.WORKER,
    engine_id="engine",
    rank=0,
    world_size=1,
    topology="tp1",
    namespace=b"{}",
    block_tokens=16,
    blocks_per_chunk=16,
    pid=1,
    segment=SEGMENT,
    layout=LAYOUT,
    memory=Memory("memfd", 4096),
)
SCHEDULER = msgspec.structs.replace(
    WORKER, role=Role.SCHEDULER, want_events=True, segment=None, layout=None, memory=None
)

# --- strategies -----------------------------------------------------------------------------------

INT = st.integers(-(2**63), 2**63 - 1)
SIZE = st.integers(0, 2**63 - 1)
KEYS = st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES)
BLOCKS = st.lists(SIZE, min_size=1, max_size=4)
TOKENS = st.integers(0, 4).map(lambda tokens: bytes(4 * tokens))
TEXT = st.text(max_size=20)


def some(elements: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(elements, max_size=3)


CLIENT_MESSAGES = st.one_of(
    st.builds(
        Submit,
        INT,
        INT,
        some(st.builds(LoadJob, INT, some(st.builds(LoadChunk, KEYS, SIZE, BLOCKS)))),
        some(st.builds(StoreJob, INT, some(st.builds(StoreChunk, KEYS, KEYS, TOKENS, BLOCKS)))),
    ),
    st.builds(Lookup, INT, INT, some(KEYS), SIZE),
    st.builds(Lease, INT, INT, some(KEYS)),
    st.builds(Pin, INT, some(KEYS), st.integers(1, PIN_MS_MAX)),
    st.builds(Release, INT, some(INT), some(INT), st.booleans(), st.integers(-1, 9)),
)
SERVER_MESSAGES = st.one_of(
    st.builds(Done, INT, some(st.builds(JobOutcome, INT, st.sampled_from(Outcome)))),
    st.builds(LookupDone, INT, INT, INT, st.sampled_from(Outcome)),
    st.builds(
        Events,
        INT,
        some(st.builds(StoredEvent, KEYS, KEYS, INT, TEXT)),
        some(st.builds(RemovedEvent, KEYS, TEXT)),
    ),
    st.builds(Error, INT, TEXT, TEXT),
)
REPLIES = st.one_of(
    st.builds(
        Attached,
        version=INT,
        epoch=INT,
        token=st.binary(max_size=16),
        endpoint=TEXT,
        limits=st.builds(Limits, INT, INT, INT, INT, INT),
        index_salt=st.binary(max_size=16),
        index_bytes=INT,
    ),
    st.builds(Refused, TEXT, TEXT),
    st.builds(IndexMoved, INT, INT),
)
ATTACHES = st.builds(
    msgspec.structs.replace,
    st.sampled_from([WORKER, SCHEDULER]),
    engine_id=st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=256),
    topology=st.text(min_size=1, max_size=256),
    namespace=st.binary(min_size=1, max_size=100),
    world_size=st.integers(5, 4096),
    rank=st.integers(0, 4),
    pid=INT,
)
PRINTABLE = st.characters(categories=["L", "N", "P"], include_characters=" ")
DECLINED = st.builds(
    Declined,
    version=st.just(PROTOCOL_VERSION),
    role=st.sampled_from(Role),
    engine_id=st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=256),
    reason=st.from_regex(r"\A[a-z_]{1,32}\Z"),
    message=st.text(PRINTABLE, min_size=1, max_size=DECLINED_CHARS_MAX),
)
FRAMES = st.one_of(CLIENT_MESSAGES, SERVER_MESSAGES, REPLIES, ATTACHES, DECLINED).map(encode)

VALUES = st.recursive(
    st.none() | st.booleans() | INT | st.floats() | st.binary(max_size=40) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)
TAGS = st.sampled_from(
    ["submit", "lookup", "lease", "pin", "release", "done", "events", "attach", "no"]
)
NAMES = st.sampled_from(
    [
        field
        for kind in (Submit, Lookup, Pin, Release, Done, Events, Attach)
        for field in kind.__struct_fields__
    ]
)


def tagged(tag: str, fields: dict[str, object]) -> bytes:
    return msgspec.msgpack.encode({"type": tag} | fields)


OBJECTS = st.builds(tagged, TAGS, st.dictionaries(NAMES, VALUES, max_size=8))


# --- round trips ----------------------------------------------------------------------------------


@given(CLIENT_MESSAGES)
def test_client_messages_come_back(message: Submit | Lookup | Lease | Pin | Release) -> None:
    assert decode_client(encode(message)) == message
    assert decode_client(memoryview(encode(message))) == message


@given(SERVER_MESSAGES)
def test_server_messages_come_back(message: Done | LookupDone | Events | Error) -> None:
    assert decode_server(encode(message)) == message


@given(REPLIES)
def test_attach_replies_come_back(message: Attached | Refused | IndexMoved) -> None:
    assert decode_attach_reply(encode(message)) == message


@given(ATTACHES | DECLINED)
def test_first_messages_come_back(message: Attach | Declined) -> None:
    assert decode_first(encode(message)) == message


@given(st.binary(max_size=200))
def test_stream_frames_announce_their_length(payload: bytes) -> None:
    framed = frame_stream(payload)
    assert stream_length(framed[:4]) == len(payload)
    assert framed[4:] == payload


# --- refusals -------------------------------------------------------------------------------------


CODES = {"version", "frame_too_large", "unknown_tag", "field", "malformed"}


def refusal_of(decode: Callable[[bytes], object], frame: bytes) -> ProtocolError | None:
    try:
        decode(frame)
    except ProtocolError as error:
        return error
    return None


def decode_all(frame: bytes) -> None:
    """Every decoder on one frame; anything but a message or a `ProtocolError` escapes."""
    for decode in DECODERS:
        error = refusal_of(decode, frame)
        assert error is None or (error.code in CODES and str(error))


@given(st.binary(max_size=200))
@example(b"")
@example(b"\x91" * 100_000)
@example(b"\xdf\xff\xff\xff\xff")
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\x81\xa4type\xa2\xff\xfe")
def test_random_bytes(frame: bytes) -> None:
    decode_all(frame)


@given(OBJECTS)
def test_random_fields(frame: bytes) -> None:
    decode_all(frame)


@settings(max_examples=300)
@given(FRAMES, st.data())
def test_damaged_frames(frame: bytes, data: st.DataObject) -> None:
    damaged = bytearray(frame)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged)))
        match data.draw(st.sampled_from(["flip", "cut", "insert", "drop"])):
            case "flip" if at < len(damaged):
                damaged[at] ^= 1 << data.draw(st.integers(0, 7))
            case "cut":
                del damaged[at:]
            case "insert":
                damaged[at:at] = data.draw(st.binary(min_size=1, max_size=4))
            case _:
                del damaged[at : at + 1]
    decode_all(bytes(damaged))


@given(FRAMES, FRAMES)
def test_two_messages_in_one_frame(first: bytes, second: bytes) -> None:
    for decode in DECODERS:
        with pytest.raises(ProtocolError):
            decode(first + second)


def refused(decode: Callable[[bytes], object], frame: bytes) -> tuple[str, str]:
    with pytest.raises(ProtocolError) as caught:
        decode(frame)
    return caught.value.code, str(caught.value)


@pytest.mark.parametrize("decode", DECODERS)
def test_a_frame_that_is_too_large_is_not_decoded(decode: Callable[[bytes], object]) -> None:
    code, message = refused(decode, bytes(FRAME_BYTES_MAX + 1))
    assert code == "frame_too_large"
    assert "FRAME_BYTES_MAX" in message


def test_a_stream_that_announces_too_much_is_refused() -> None:
    code, _ = refused(stream_length, (FRAME_BYTES_MAX + 1).to_bytes(4, "little"))
    assert code == "frame_too_large"
    assert stream_length(FRAME_BYTES_MAX.to_bytes(4, "little")) == FRAME_BYTES_MAX


@pytest.mark.parametrize("decode", [decode_client, decode_server, decode_attach_reply])
def test_a_message_of_another_kind_is_refused(decode: Callable[[bytes], object]) -> None:
    assert refused(decode, encode(WORKER))[0] == "unknown_tag"
    assert refused(decode_first, encode(Lease(1, 1, [])))[0] == "unknown_tag"


def test_bytes_that_are_not_messagepack_are_malformed() -> None:
    assert refused(decode_client, b"\xc1")[0] == "malformed"
    assert refused(decode_first, b"")[0] == "malformed"


def test_an_unknown_field_is_refused() -> None:
    frame = msgspec.msgpack.encode({"type": "lease", "epoch": 1, "lease_id": 1, "keys": [], "x": 1})
    assert refused(decode_client, frame)[0] == "field"


@pytest.mark.parametrize("version", [PROTOCOL_VERSION + 1, 0, -1])
def test_another_version_is_told_so_whatever_else_it_says(version: int) -> None:
    frame = msgspec.msgpack.encode({"type": "attach", "version": version, "unheard_of": 1})
    code, message = refused(decode_first, frame)
    assert code == "version"
    assert str(version) in message
    assert f"protocol version {PROTOCOL_VERSION}; install the same kvlake release" in message
    assert "install the same kvlake release" in message


LOAD = LoadChunk(KEY, 0, [1])
STORE = StoreChunk(KEY, KEY, bytes(4), [1])


def loading(chunk: LoadChunk) -> Submit:
    return Submit(1, 1, [LoadJob(1, [chunk])], [])


def storing(chunk: StoreChunk) -> Submit:
    return Submit(1, 1, [], [StoreJob(1, [chunk])])


replace = msgspec.structs.replace


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (Submit(1, 1, [LoadJob(1, [])] * (JOBS_PER_MESSAGE_MAX + 1), []), "loads"),
        (Submit(1, 1, [LoadJob(1, [])] * JOBS_PER_MESSAGE_MAX, [StoreJob(1, [])]), "jobs"),
        (loading(replace(LOAD, key=KEY[:31])), "loads[0][1][0][0]"),
        (loading(replace(LOAD, first_block=-1)), "loads[0][1][0][1]"),
        (loading(replace(LOAD, block_ids=[])), "loads[0][1][0][2]"),
        (storing(replace(STORE, key=b"")), "stores[0][1][0][0]"),
        (storing(replace(STORE, parent=bytes(33))), "stores[0][1][0][1]"),
        (storing(replace(STORE, block_ids=[])), "stores[0][1][0][3]"),
        (storing(replace(STORE, token_ids=bytes(5))), "token_ids"),
        (Lookup(1, 1, [KEY] * (KEYS_PER_MESSAGE_MAX + 1), 1), "keys"),
        (Lookup(1, 1, [KEY, b""], 1), "keys"),
        (Lookup(1, 1, [KEY], -1), "deadline_ms"),
        (Lease(1, 1, [KEY[1:]]), "keys"),
        (Submit(1, 1, [], [StoreJob(1, [], -1)]), "stores[0][2]"),
        (Submit(1, 1, [], [StoreJob(1, [], TTL_MS_MAX + 1)]), "stores[0][2]"),
        (Pin(1, [KEY], 0), "duration_ms"),
        (Pin(1, [KEY], PIN_MS_MAX + 1), "duration_ms"),
        (Pin(1, [KEY], 1, b"short"), "tenant"),
        (Pin(1, [KEY], 1, b"", [0, 0]), "groups"),
        (Release(1, [1], list(range(KEYS_PER_MESSAGE_MAX))), "ids"),
    ],
)
def test_a_client_message_outside_its_bounds(message: Submit, field: str) -> None:
    code, text = refused(decode_client, encode(message))
    assert code == "field"
    assert field in text or f"`$.{field}" in text


@pytest.mark.promise("epoch-in-messages")
def test_every_message_after_the_handshake_says_which_life_of_the_sidecar_it_is_of() -> None:
    for kind in (*get_args(ClientMessage), *get_args(ServerMessage), Attached, IndexMoved):
        (epoch,) = (one for one in msgspec.structs.fields(kind) if one.name == "epoch")
        assert epoch.required, kind


def test_a_list_is_measured_before_it_is_made() -> None:
    empty = encode(Lookup(1, 1, [], 1))
    place = empty.index(b"\xa4keys") + 5
    entries = KEYS_PER_MESSAGE_MAX * 16
    frame = empty[:place] + b"\xdd" + entries.to_bytes(4, "big") + b"\xc4\x00" * entries
    tracemalloc.start()
    try:
        code, text = refused(decode_client, frame + empty[place + 1 :])
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (code, "length <= 65536" in text) == ("field", True)
    # The frame itself is put together once more above; the list would have had 8 MiB.
    assert peak_bytes < len(frame) + (1 << 20)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"world_size": 0}, "world_size"),
        ({"world_size": 4097}, "world_size"),
        ({"rank": 1}, "rank"),
        ({"rank": -1}, "rank"),
        ({"block_tokens": 0}, "block_tokens"),
        ({"block_tokens": 65_537}, "block_tokens"),
        ({"blocks_per_chunk": 0}, "blocks_per_chunk"),
        ({"blocks_per_chunk": 65_537}, "blocks_per_chunk"),
        ({"namespace": b""}, "namespace"),
        ({"namespace": bytes(NAMESPACE_BYTES_MAX + 1)}, "namespace"),
        ({"engine_id": ""}, "engine_id"),
        ({"engine_id": "x" * 257}, "engine_id"),
        ({"topology": ""}, "topology"),
        ({"topology": "x" * 257}, "topology"),
        ({"model": "x" * 257}, "model"),
        ({"model": "llama\n"}, "model"),
        ({"segment": None}, "segment/layout/memory"),
        ({"layout": None}, "segment/layout/memory"),
        ({"memory": None}, "segment/layout/memory"),
    ],
)
def test_an_attach_outside_its_bounds(changes: dict[str, Any], field: str) -> None:
    code, text = refused(decode_first, encode(replace(WORKER, **changes)))
    assert code == "field"
    assert field in text


def test_only_a_model_that_is_files_is_named_beside_its_namespace() -> None:
    """Sidecars of before refuse the field, so it is sent only where it says something."""
    sent = msgspec.msgpack.decode(encode(WORKER))
    assert "model" not in sent
    first = decode_first(encode(WORKER))
    named = decode_first(encode(replace(WORKER, model="/models/llama")))
    assert isinstance(first, Attach)
    assert isinstance(named, Attach)
    assert first.model == ""
    assert {part.model for part in named.parts} == {"/models/llama"}


def test_an_impossible_layout_is_refused() -> None:
    fields = msgspec.to_builtins(WORKER)
    fields["layout"]["block_stride_bytes"] = 1
    fields["namespace"] = WORKER.namespace
    code, text = refused(decode_first, msgspec.msgpack.encode(fields))
    assert code == "field"
    assert "block_stride_bytes" in text

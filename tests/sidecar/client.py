"""A small synchronous client that speaks the real protocol over real sockets.

`Worker` has a memfd as KV memory and fills blocks with bytes that only their place and a seed
decide; `Scheduler` reads the shared index. `RunningSidecar` serves in a thread of the test's own
process, so that a test can look at its descriptors and hand it a faulty store.
"""

from __future__ import annotations

import array
import contextlib
import hashlib
import json
import os
import queue
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import anyio
import msgspec
import numpy as np
import numpy.typing as npt
import zmq

from sidecar import protocol
from sidecar.app import ServerInfo, serve
from sidecar.config.model import Config
from sidecar.protocol import (
    Attach,
    Attached,
    AttachReply,
    ClientMessage,
    Done,
    Error,
    IndexMoved,
    Lease,
    LoadChunk,
    LoadJob,
    Lookup,
    LookupDone,
    Memory,
    Outcome,
    Pin,
    Refused,
    Release,
    Role,
    ServerMessage,
    StoreChunk,
    StoreJob,
    Submit,
    Use,
    codec,
)
from tests.offsets import offset_of
from tiers.kv.fence import WorkerFence
from tiers.kv.index import ANYWHERE, IndexReader, tags_of
from tiers.kv.layout import KVLayout, Segment
from tiers.kv.memfd import sealed_memfd
from tiers.store.object_tier import ObjectTier

WAIT_SECONDS_MAX = 90.0
BLOCK_TOKENS = 16
BLOCKS_PER_CHUNK = 4
CONTENT_BYTES = 64
LAYERS = 3
HEADS = 4
NAMESPACE = json.dumps({"model": "tests/tiny", "dtype": "float16"}, sort_keys=True).encode()
ROOT = bytes(32)
PATIENT: dict[str, Any] = dict.fromkeys(
    ("load_deadline", "store_deadline", "lease_ttl", "attach_deadline"), 60.0
)
"""Limits that no pause of a slow machine comes near to."""


def key_of(*parts: object) -> bytes:
    """A chunk key made of anything."""
    return hashlib.sha256(repr(parts).encode()).digest()


def layout_of(rank: int = 0, world_size: int = 1, num_blocks: int = 64) -> KVLayout:
    """An LBHNC layout of this rank's heads, with a gap before every layer."""
    heads = HEADS // world_size
    token = CONTENT_BYTES
    head = token * BLOCK_TOKENS
    block = head * heads
    layer = block * num_blocks + 4096
    return KVLayout(
        segment=Segment(0, LAYERS, rank * heads, heads),
        num_blocks=num_blocks,
        block_tokens=BLOCK_TOKENS,
        content_bytes=CONTENT_BYTES,
        dtype="float16",
        encoding="plain",
        size_bytes=layer * LAYERS,
        layer_offsets_bytes=tuple(4096 + layer * number for number in range(LAYERS)),
        block_stride_bytes=block,
        head_stride_bytes=head,
        token_stride_bytes=token,
    )


def attach_message(role: Role, layout: KVLayout | None = None, **changes: Any) -> Attach:
    """A valid `Attach`; `changes` make it another, valid or not."""
    message = Attach(
        version=protocol.PROTOCOL_VERSION,
        role=role,
        engine_id="engine",
        rank=0,
        world_size=1,
        topology="tp1.pp1",
        namespace=NAMESPACE,
        block_tokens=BLOCK_TOKENS,
        blocks_per_chunk=BLOCKS_PER_CHUNK,
        pid=os.getpid(),
        segment=None if layout is None else layout.segment,
        layout=layout,
        memory=None if layout is None else Memory("memfd", layout.size_bytes),
    )
    return msgspec.structs.replace(message, **changes)


class RefusedError(Exception):
    """The sidecar answered `Refused`."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(f"{refused.code}: {refused.message}")
        self.code = refused.code
        self.message = refused.message


def accepted(reply: AttachReply) -> Attached:
    """The reply, if it is `Attached`."""
    if isinstance(reply, Refused):
        raise RefusedError(reply)
    assert isinstance(reply, Attached)
    return reply


class Client:
    """One session: both sockets."""

    def __init__(self, path: Path, message: Attach | bytes, fds: Sequence[int] = ()) -> None:
        self.unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._context = zmq.Context()
        try:
            self.unix.settimeout(WAIT_SECONDS_MAX)
            self.unix.connect(str(path))
            payload = message if isinstance(message, bytes) else codec.encode(message)
            self._send_attach(payload, fds)
            reply, self.fds = self.receive_unix()
            self.attached = accepted(reply)
            self.epoch = self.attached.epoch
            self.dealer = self._context.socket(zmq.DEALER)
            self.dealer.setsockopt(zmq.LINGER, 0)
            self.dealer.setsockopt(zmq.ROUTING_ID, self.attached.token)
            self.dealer.connect(self.attached.endpoint)
        except BaseException:
            self.close()
            raise
        self._kept: list[ServerMessage] = []

    def _send_attach(self, payload: bytes, fds: Sequence[int]) -> None:
        frame = codec.frame_stream(payload)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        sent = self.unix.sendmsg([frame], rights)
        # Not even an empty send after the whole frame: a refusal may have closed the other end.
        if sent < len(frame):
            self.unix.sendall(frame[sent:])

    def receive_unix(self) -> tuple[AttachReply, list[int]]:
        """The next frame on the Unix socket, and its descriptors. `EOFError` at the end."""
        fds: list[int] = []
        header = self._exactly(4, fds)
        frame = self._exactly(codec.stream_length(header), fds)
        return codec.decode_attach_reply(frame), fds

    def _exactly(self, num_bytes: int, fds: list[int]) -> bytes:
        data = b""
        while len(data) < num_bytes:
            space = socket.CMSG_SPACE(16)
            piece, ancillary, _, _ = self.unix.recvmsg(num_bytes - len(data), space)
            if not piece:
                raise EOFError
            for _, _, payload in ancillary:
                received = array.array("i")
                received.frombytes(payload)
                fds.extend(received)
            data += piece
        return data

    def at_end(self) -> bool:
        """Wait for the sidecar to close the Unix socket."""
        try:
            return self.unix.recv(1) == b""
        except ConnectionResetError:
            return True

    def send(self, message: ClientMessage | bytes) -> None:
        """Send one message, or any bytes, as one frame."""
        frame = message if isinstance(message, bytes) else codec.encode(message)
        self.dealer.send(frame)

    def receive(self, seconds_max: float = WAIT_SECONDS_MAX) -> ServerMessage:
        """The next message. `TimeoutError` if there is none."""
        if self._kept:
            return self._kept.pop(0)
        if not self.dealer.poll(int(seconds_max * 1000)):
            raise TimeoutError(f"no message in {seconds_max} s")
        return codec.decode_server(self.dealer.recv())

    def wait_for(self, wanted: Callable[[ServerMessage], bool]) -> ServerMessage:
        """The first message that is `wanted`; others are kept for later calls."""
        others: list[ServerMessage] = []
        try:
            while True:
                message = self.receive()
                if wanted(message):
                    return message
                others.append(message)
        finally:
            self._kept = others + self._kept

    def error(self) -> Error:
        """The next `Error`."""
        message = self.wait_for(lambda one: isinstance(one, Error))
        assert isinstance(message, Error)
        return message

    def close(self) -> None:
        """Close everything: the sidecar sees end of file."""
        for fd in getattr(self, "fds", []):
            with contextlib.suppress(OSError):
                os.close(fd)
        self.fds = []
        self._context.destroy(linger=0)
        self.unix.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Worker(Client):
    """A worker with KV memory of its own."""

    def __init__(self, path: Path, *, num_blocks: int = 64, **changes: Any) -> None:
        rank, world_size = changes.get("rank", 0), changes.get("world_size", 1)
        self.layout: KVLayout = changes.pop("layout", None) or layout_of(
            rank, world_size, num_blocks
        )
        self.memory_fd = sealed_memfd("test-kv", self.layout.size_bytes)
        self.memory: npt.NDArray[np.uint8] = np.memmap(
            f"/proc/self/fd/{self.memory_fd}", dtype=np.uint8, mode="r+"
        )
        self.fence = WorkerFence()
        self.done: dict[int, Outcome] = {}
        fds = changes.pop("fds", None) or (self.memory_fd, self.fence.fd)
        super().__init__(path, attach_message(Role.WORKER, self.layout, **changes), fds)

    def close(self) -> None:
        super().close()
        if hasattr(self, "memory"):
            del self.memory
            os.close(self.memory_fd)
            self.fence.close()

    def coordinates(self, block: int) -> Iterator[slice]:
        """Where in memory the content of a block is, in payload order."""
        for layer in range(self.layout.segment.num_layers):
            for head in range(self.layout.segment.num_heads):
                for token in range(self.layout.block_tokens):
                    start = offset_of(self.layout, layer, block, head, token)
                    yield slice(start, start + self.layout.content_bytes)

    def read(self, block: int) -> bytes:
        """A block's bytes in payload order, coordinate by coordinate."""
        return b"".join(self.memory[place].tobytes() for place in self.coordinates(block))

    def fill(self, blocks: Iterable[int], seed: int) -> list[bytes]:
        """Fill blocks with bytes that differ everywhere; returns what they hold."""
        content: list[bytes] = []
        for block in blocks:
            rng = np.random.default_rng((seed, block, self.layout.segment.first_head))
            for place in self.coordinates(block):
                self.memory[place] = rng.integers(0, 256, self.layout.content_bytes, dtype=np.uint8)
            content.append(self.read(block))
        return content

    def poison(self) -> None:
        """Overwrite all of the memory, so that nothing in it can be mistaken for a load."""
        self.memory[:] = 0xEE

    def chunk(
        self, key: bytes, blocks: Sequence[int], parent: bytes = ROOT, tenant: bytes = b""
    ) -> StoreChunk:
        """A store of `blocks` under `key`, with token ids made up from the key."""
        count = len(blocks) * BLOCK_TOKENS
        tokens = np.arange(count, dtype="<i4") + key[0]
        return StoreChunk(key, parent, tokens.tobytes(), list(blocks), tenant)

    def submit(
        self,
        *,
        stores: Sequence[StoreJob] = (),
        loads: Sequence[LoadJob] = (),
        fence: int = 0,
        epoch: int | None = None,
    ) -> None:
        """Send one step's jobs."""
        self.send(Submit(self.epoch if epoch is None else epoch, fence, list(loads), list(stores)))

    def outcome(self, job_id: int) -> Outcome:
        """Wait for a job's outcome."""
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while job_id not in self.done:
            message = self.wait_for(lambda one: isinstance(one, Done))
            assert isinstance(message, Done)
            for job in message.jobs:
                assert job.job_id not in self.done, f"job {job.job_id} was answered twice"
                self.done[job.job_id] = job.outcome
            assert time.monotonic() < deadline
        return self.done[job_id]

    def store(
        self,
        job_id: int,
        key: bytes,
        blocks: Sequence[int],
        parent: bytes = ROOT,
        *,
        ttl_seconds: float = 0.0,
    ) -> Outcome:
        """Store one chunk and wait."""
        chunks = [self.chunk(key, blocks, parent)]
        self.submit(stores=[StoreJob(job_id, chunks, int(ttl_seconds * 1000))])
        return self.outcome(job_id)

    def load(self, job_id: int, key: bytes, blocks: Sequence[int], first_block: int = 0) -> Outcome:
        """Load one chunk and wait."""
        self.submit(loads=[LoadJob(job_id, [LoadChunk(key, first_block, list(blocks))])])
        return self.outcome(job_id)


class Scheduler(Client):
    """A scheduler with its reader of the shared index."""

    def __init__(self, path: Path, **changes: Any) -> None:
        super().__init__(path, attach_message(Role.SCHEDULER, **changes))
        self.index = IndexReader(self.fds.pop(0), self.attached.index_bytes)

    def close(self) -> None:
        super().close()
        if hasattr(self, "index"):
            self.index.close()

    def flags(self, *keys: bytes) -> list[int]:
        """The index's flags of each key."""
        tags = tags_of(keys, self.attached.index_salt)
        return [int(flag) & ANYWHERE for flag in self.index.lookup(tags)]

    def take_moved_index(self) -> IndexMoved:
        """Receive `IndexMoved` and read the new index from now on."""
        moved, fds = self.receive_unix()
        assert isinstance(moved, IndexMoved)
        self.index.close()
        self.index = IndexReader(fds[0], moved.index_bytes)
        return moved

    def lookup(
        self, lookup_id: int, keys: Sequence[bytes], deadline_ms: int = 60_000
    ) -> LookupDone:
        """Ask for chunks of the store and wait for the answer."""
        self.send(Lookup(self.epoch, lookup_id, list(keys), deadline_ms))
        message = self.wait_for(
            lambda one: isinstance(one, LookupDone) and one.lookup_id == lookup_id
        )
        assert isinstance(message, LookupDone)
        return message

    def use(self, *keys: bytes, num_tokens: int = 0) -> None:
        """Say that a request has these chunks in its prompt."""
        self.send(Use(self.epoch, list(keys), num_tokens))

    def lease(self, lease_id: int, keys: Sequence[bytes], tenant: bytes = b"") -> None:
        """Pin chunks."""
        self.send(Lease(self.epoch, lease_id, list(keys), tenant))

    def pin(self, keys: Sequence[bytes], seconds: float) -> None:
        """Have chunks kept for a while."""
        self.send(Pin(self.epoch, list(keys), int(seconds * 1000)))

    def release(self, *lease_ids: int) -> None:
        """Unpin chunks."""
        self.send(Release(self.epoch, list(lease_ids), [], heard=0))


class RunningSidecar:
    """A sidecar in a thread; `with` stops it and checks that it ended well."""

    def __init__(
        self, config: Config, wrap_store: Callable[[ObjectTier], ObjectTier] | None = None
    ) -> None:
        self._told: queue.Queue[ServerInfo | BaseException] = queue.Queue()
        self.code: int | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(config, wrap_store))
        self._thread.start()
        told = self._told.get(timeout=WAIT_SECONDS_MAX)
        if isinstance(told, BaseException):
            self._thread.join()
            raise told
        self.info = told
        self.path = told.attach_path

    def _run(self, config: Config, wrap_store: Callable[[ObjectTier], ObjectTier] | None) -> None:
        async def main() -> int:
            return await serve(config, ready=self._told.put, wrap_store=wrap_store)

        try:
            self.code = anyio.run(main)
        except BaseException as error:
            self._failure = error
            self._told.put(error)

    def get(self, page: str) -> bytes:
        """Body of an HTTP page."""
        url = f"{self.info.http_url}{page}"
        with urllib.request.urlopen(url, timeout=WAIT_SECONDS_MAX) as answer:
            body: bytes = answer.read()
            return body

    def status(self) -> dict[str, Any]:
        """The status document."""
        document: dict[str, Any] = json.loads(self.get("/status"))
        return document

    @property
    def endpoint(self) -> str:
        """Where jobs are sent."""
        return f"ipc://{self.path.with_name('jobs.sock')}"

    @property
    def events(self) -> str:
        """Where KV events are published; empty without events."""
        return str((self.status()["events"] or {"endpoint": ""})["endpoint"])

    @property
    def replay(self) -> str:
        """Where KV events are replayed."""
        return str(self.status()["events"]["replay_endpoint"])

    def wait_until(self, true: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Poll the status until it says so."""
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while True:
            document = self.status()
            if true(document):
                return document
            assert time.monotonic() < deadline, json.dumps(document, indent=1)
            time.sleep(0.01)

    def stop(self) -> None:
        """Ask it to stop and wait for it."""
        self.info.stop()
        self._thread.join(WAIT_SECONDS_MAX)
        assert not self._thread.is_alive()
        if self._failure is not None:
            raise self._failure

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def config_in(directory: Path, **sections: dict[str, Any]) -> Config:
    """A configuration for tests: all below `directory`, any HTTP port, 8 MiB that are not kept.

    What an engine may wait for is not what decides: who tests a deadline gives a short one.
    """
    pool = directory / "pool"
    pool.mkdir(exist_ok=True)
    given: dict[str, dict[str, Any]] = {
        "runtime": {"directory": directory},
        "host": {"size": 8 << 20, "directory": pool, "prefault": False, "after_stop": "remove"},
        "http": {"port": 0},
        "limits": PATIENT,
    }
    for name, values in sections.items():
        given[name] = {**given.get(name, {}), **values}
    return Config.model_validate(given)

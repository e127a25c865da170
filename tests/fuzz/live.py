"""A sidecar that serves, and somebody who sends it everything but what the protocol says.

    python -m tests.fuzz.live --minutes 5 [--seed 1]

Owns the attacks on a live sidecar's two sockets, and the client beside them that must be served as
if nothing happened. Does not own the mutations (`mutation.py`).

Invariants: what is sent is a function of the seed; the attacker is a process of the sidecar's own
user, so it may fill what is shared by design (slots, realms, sessions) and nothing else.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import json
import os
import random
import re
import select
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

import zmq

from sidecar import protocol
from sidecar.protocol import Attached, Outcome, Refused, Role, codec
from sidecar.protocol.codec import ProtocolError
from tests.fuzz.mutation import damage, damage_message
from tests.fuzz.targets import client_frames
from tests.harness.sidecars import STOOD_STILL, SidecarProcess
from tests.sidecar.client import Scheduler, Worker, attach_message, key_of, layout_of
from tiers.kv.fence import PAGE_BYTES
from tiers.kv.index import FLAG_HOST
from tiers.kv.memfd import sealed_memfd

CONNECTIONS_MAX: Final = 24
DESCRIPTORS_MAX: Final = 40
REPLY_SECONDS_MAX: Final = 5.0
CHECK_EVERY: Final = 25
MEMORY_BYTES_MAX: Final = 1 << 30
"""Growth that is too much: 256 realms with an index each are allowed, and are most of it."""
LOG_LINE: Final = (
    r"^\d{4}-\d\d-\d\dT[\d:.]+Z "
    rf"((DEBUG|INFO|WARNING) [a-z.]+: |ERROR {re.escape(STOOD_STILL)}).*$"
)


class Attacker:
    """Talks to one sidecar, badly."""

    def __init__(self, path: Path, chooser: random.Random) -> None:
        self._path = path
        self._chooser = chooser
        self._context = zmq.Context()
        self._open: list[socket.socket] = []
        self._dealers: list[tuple[zmq.Socket[bytes], int]] = []
        self._endpoint = ""
        self.attached = 0
        self.refused = 0
        self._attacks: tuple[Callable[[], None], ...] = (
            *(self._stream, self._attach, self._attach, self._attach),
            *(self._frames, self._frames, self._frames, self._stranger, self._leave),
        )

    def attack(self) -> None:
        """One attack, whichever."""
        self._chooser.choice(self._attacks)()

    def close(self) -> None:
        """Hang up everywhere."""
        while self._open:
            self._open.pop().close()
        self._context.destroy(linger=0)

    # --- the Unix socket -------------------------------------------------------------------

    def _connect(self) -> socket.socket:
        while len(self._open) >= CONNECTIONS_MAX:
            self._open.pop(self._chooser.randrange(len(self._open))).close()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(REPLY_SECONDS_MAX)
        sock.connect(str(self._path))
        self._open.append(sock)
        return sock

    def _stream(self) -> None:
        """Bytes that are no frame, half a frame, a length and nothing behind it."""
        frame = codec.frame_stream(codec.encode(attach_message(Role.SCHEDULER)))
        data = damage(frame, self._chooser)
        self._send(self._connect(), data[: self._chooser.randint(0, len(data))], [])

    def _attach(self) -> None:
        """A damaged `Attach`, or a good one, with descriptors that have nothing to do with it."""
        chooser = self._chooser
        role = chooser.choice((Role.WORKER, Role.WORKER, Role.SCHEDULER))
        layout = layout_of() if role is Role.WORKER else None
        message = attach_message(
            role, layout, engine_id=f"hostile-{chooser.randrange(12)}", want_events=True
        )
        payload = codec.encode(message)
        if chooser.random() < 0.7:
            payload = damage_message(payload, chooser)
        good = layout is not None and chooser.random() < 0.6
        fds = (
            [
                sealed_memfd("fuzz-kv", layout.size_bytes),
                sealed_memfd("fuzz-fence", PAGE_BYTES),
            ]
            if good and layout is not None
            else self._descriptors()
        )
        if len(fds) == 2 and good:
            os.pwrite(fds[1], chooser.randbytes(16), 0)
        sock = self._connect()
        try:
            self._send(sock, codec.frame_stream(payload), fds)
        finally:
            for fd in fds:
                os.close(fd)
        self._read_reply(sock)

    def _send(self, sock: socket.socket, data: bytes, fds: list[int]) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        # It may have been cut off before it was done.
        with contextlib.suppress(OSError):
            sent = sock.sendmsg([data], rights) if data else 0
            sock.sendall(data[sent:])

    def _read_reply(self, sock: socket.socket) -> None:
        if not select.select([sock], [], [], 0.05)[0]:
            return
        with contextlib.suppress(OSError, ProtocolError):
            space = socket.CMSG_SPACE(16)
            data, ancillary, _, _ = sock.recvmsg(65_536, space, socket.MSG_CMSG_CLOEXEC)
            for _, _, given in ancillary:
                fds = array.array("i")
                fds.frombytes(given)
                for fd in fds:
                    os.close(fd)
            reply = codec.decode_attach_reply(data[4:])
            if isinstance(reply, Refused):
                self.refused += 1
            if isinstance(reply, Attached):
                self.attached += 1
                self._endpoint = reply.endpoint
                self._dealer(reply.token, reply.epoch)

    def _descriptors(self) -> list[int]:
        count = self._chooser.choice((0, 1, 2, 2, 2, 3, 5, DESCRIPTORS_MAX))
        return [self._descriptor() for _ in range(count)]

    def _descriptor(self) -> int:
        match self._chooser.randrange(10):
            case 0:
                return os.memfd_create("fuzz-unsealed", os.MFD_CLOEXEC)
            case 1:
                return sealed_memfd("fuzz-small", 1)
            case 2:
                fd = sealed_memfd("fuzz-read-only", layout_of().size_bytes)
                read_only = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
                os.close(fd)
                return read_only
            case 3:
                reader, writer = os.pipe()
                os.close(writer)
                return reader
            case 4:
                return os.open("/dev/zero", os.O_RDWR | os.O_CLOEXEC)
            case 5:
                return os.open("/", os.O_RDONLY | os.O_CLOEXEC)
            case 6:
                return os.open("/", os.O_PATH | os.O_CLOEXEC)
            case 7:
                return os.eventfd(0, os.EFD_CLOEXEC)
            case 8:
                return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM).detach()
            case _:
                return sealed_memfd("fuzz-large", 1 << 33)

    # --- ZMQ -------------------------------------------------------------------------------------

    def _dealer(self, token: bytes, epoch: int) -> None:
        while len(self._dealers) >= CONNECTIONS_MAX:
            self._dealers.pop(0)[0].close(linger=0)
        dealer: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.ROUTING_ID, token)
        dealer.connect(self._endpoint)
        self._dealers.append((dealer, epoch))

    def _frames(self) -> None:
        """Frames of a client that did attach: damaged, in parts, empty, or large."""
        if not self._dealers:
            return
        chooser = self._chooser
        dealer, epoch = chooser.choice(self._dealers)
        good = client_frames(epoch)
        for _ in range(chooser.choice((1, 5, 20))):
            frame = damage_message(chooser.choice(good), chooser, good)
            parts = [frame] if chooser.random() < 0.95 else [frame, b"", frame]
            if chooser.random() < 0.002:
                parts = [bytes(protocol.FRAME_BYTES_MAX + 1)]
            with contextlib.suppress(zmq.ZMQError):
                dealer.send_multipart(parts, zmq.NOBLOCK)
        # Some read their answers, others let them pile up.
        if chooser.random() < 0.5:
            with contextlib.suppress(zmq.ZMQError):
                while True:
                    codec.decode_server(dealer.recv(zmq.NOBLOCK))

    def _stranger(self) -> None:
        """Somebody with no session, or with a name that is not his."""
        if self._endpoint:
            token = self._chooser.randbytes(self._chooser.choice((1, 16, 255)))
            self._dealer(b"x" + token[1:], self._chooser.randrange(2**63))
            self._frames()

    def _leave(self) -> None:
        """Connections end in the middle of whatever they were doing."""
        for _ in range(min(len(self._open), self._chooser.choice((1, 3, CONNECTIONS_MAX)))):
            self._open.pop(self._chooser.randrange(len(self._open))).close()


class Bystander:
    """A good client of the same sidecar, and what it must find at any moment."""

    def __init__(self, sidecar: SidecarProcess) -> None:
        self._sidecar = sidecar
        self._path = Path(sidecar.socket)
        self._rounds = 0
        self.worker = Worker(self._path)
        self.scheduler = Scheduler(self._path)

    def check(self) -> None:
        """A store, a hit, a load of the same bytes; pages that can be read; nobody died."""
        self._rounds += 1
        number = self._rounds
        key = key_of("bystander", number)
        wanted = self.worker.fill((0, 1), number)
        assert self.worker.store(2 * number, key, [0, 1]) is Outcome.OK
        deadline = time.monotonic() + REPLY_SECONDS_MAX
        while not self.scheduler.flags(key)[0] & FLAG_HOST:
            assert time.monotonic() < deadline, "what was stored is not in the index"
            time.sleep(0.001)
        assert self.worker.load(2 * number + 1, key, [2, 3]) is Outcome.OK
        assert [self.worker.read(2), self.worker.read(3)] == wanted
        self._sidecar.get("/healthz")
        assert self._sidecar.get("/metrics").startswith("# HELP")
        assert self._sidecar.status()["sessions"]

    def close(self) -> None:
        """End both sessions."""
        self.worker.close()
        self.scheduler.close()


class Process:
    """What the kernel says of the sidecar."""

    def __init__(self, pid: int) -> None:
        self._folder = Path("/proc") / str(pid)

    def descriptors(self) -> int:
        """How many it has open."""
        return len(os.listdir(self._folder / "fd"))

    def kinds(self) -> Counter[str]:
        """What its descriptors are, without their numbers."""
        found: Counter[str] = Counter()
        for entry in (self._folder / "fd").iterdir():
            with contextlib.suppress(OSError):
                found[re.sub(r"\d+", "N", str(entry.readlink()))] += 1
        return found

    def foreign_mappings(self) -> int:
        """Mappings of memory that clients of a test made."""
        return (self._folder / "maps").read_text().count("/memfd:fuzz-")

    def memory_bytes(self) -> int:
        """Resident memory, shared pages included."""
        return int((self._folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def campaign(folder: Path, seed: int, *, seconds_max: float, attacks_max: int) -> dict[str, int]:
    """Attack a new sidecar; returns what was counted. Raises `AssertionError` for a finding."""
    # ZMQ never reads from a second peer of one name. If that one sends more than may wait, not even
    # its end is noticed (docs/reference/security.md); this attacker sends 20 at most to each.
    config = {
        "host": {"size": "16MiB", "prefault": False},
    }
    sidecar = SidecarProcess(folder, config)
    with sidecar:
        assert sidecar.process is not None
        process = Process(sidecar.process.pid)
        bystander = Bystander(sidecar)
        bystander.check()
        descriptors, memory_bytes = process.descriptors(), process.memory_bytes()
        attacker = Attacker(Path(sidecar.socket), random.Random(seed))
        deadline = time.monotonic() + seconds_max
        attacks = 0
        while attacks < attacks_max and time.monotonic() < deadline:
            attacker.attack()
            attacks += 1
            if attacks % CHECK_EVERY == 0:
                bystander.check()
        attacker.close()
        bystander.check()
        refused = sidecar.status()["sockets"]["frames_refused"]
        # An index for each realm that the attacker made up stays: its mapping's own descriptor,
        # and the one that is handed out.
        realms = len(sidecar.status()["realms"])
        _wait(
            lambda: process.descriptors() <= descriptors + 2 * (realms - 1),
            lambda: (descriptors, realms, process.kinds()),
        )
        _wait(lambda: process.foreign_mappings() == 0, process.foreign_mappings)
        grown_bytes = process.memory_bytes() - memory_bytes
        assert grown_bytes < MEMORY_BYTES_MAX, f"the sidecar grew by {grown_bytes} bytes"
        bystander.close()
    assert sidecar.process.poll() == 0, "it drained"
    _check_log(sidecar.log_path)
    return {
        "attacks": attacks,
        "attached": attacker.attached,
        "refused": attacker.refused,
        "frames_refused": sum(refused.values()),
    }


def _wait(true: Callable[[], bool], shown: Callable[[], object]) -> None:
    deadline = time.monotonic() + REPLY_SECONDS_MAX * 2
    while not true():
        assert time.monotonic() < deadline, shown()
        time.sleep(0.02)


def _check_log(path: Path) -> None:
    """Every line is one event, none is an error: a client cannot forge, or cause, either.

    But for what a machine that pauses causes.
    """
    for line in path.read_text(errors="replace").splitlines():
        assert re.match(LOG_LINE, line), line[:2000]


def main() -> int:
    """A long campaign; 1 if it found something."""
    parser = argparse.ArgumentParser(description="Attack a live sidecar.")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kvl-fuzz-"))
    print(f"live: seed {given.seed}, log in {folder}")
    try:
        counted = campaign(
            folder / "live", given.seed, seconds_max=given.minutes * 60, attacks_max=2**62
        )
    except AssertionError as error:
        print(f"live: FOUND: {error}")
        return 1
    print(f"live: {json.dumps(counted)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

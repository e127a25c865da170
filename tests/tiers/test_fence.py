from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests import places
from tiers.kv.fence import PAGE_BYTES, SidecarFence, WorkerFence

if TYPE_CHECKING:
    from collections.abc import Iterator


# A sidecar in a process of its own: one command a line, one answer a line.
SIDECAR = """
import contextlib, sys
from tiers.kv.fence import SidecarFence

fence = SidecarFence(int(sys.argv[1]))
copies = {}
print("ready", flush=True)
for line in sys.stdin:
    verb, number = line.split()
    if verb == "start":
        copies[number] = contextlib.ExitStack()
        print(copies[number].enter_context(fence.copying(int(number))), flush=True)
    elif verb == "end":
        copies.pop(number).close()
        print("ended", flush=True)
    elif verb == "reached":
        print(fence.reached(int(number)), flush=True)
"""

# A worker that takes the lock to revoke, and is stopped in that very moment.
WORKER = """
import fcntl, sys
from tiers.kv.fence import lock_page

lock_page(int(sys.argv[1]), fcntl.F_WRLCK)
print("locked", flush=True)
sys.stdin.read()
"""


class Peer:
    """A child process that was handed the fence's descriptor, as SCM_RIGHTS would."""

    def __init__(self, script: str, fd: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, str(fd)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[fd],
            cwd=places.ROOT,
            text=True,
        )
        self.greeting = self.answer()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def ask(self, line: str) -> str:
        self.tell(line)
        return self.answer()

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.communicate(timeout=60)


@pytest.fixture
def worker() -> Iterator[WorkerFence]:
    fence = WorkerFence()
    yield fence
    fence.close()


@pytest.fixture
def sidecar(worker: WorkerFence) -> Iterator[Peer]:
    peer = Peer(SIDECAR, worker.fd)
    assert peer.greeting == "ready"
    yield peer
    peer.end()


def local_sidecar(worker: WorkerFence) -> contextlib.closing[SidecarFence]:
    return contextlib.closing(SidecarFence(os.dup(worker.fd)))


def test_the_sidecar_sees_the_step_that_the_worker_signalled(
    worker: WorkerFence, sidecar: Peer
) -> None:
    assert sidecar.ask("reached 0") == "True"
    assert sidecar.ask("reached 7") == "False"
    worker.signal(7)
    assert worker.done == 7
    assert sidecar.ask("reached 7") == "True"
    assert sidecar.ask("reached 8") == "False"


def test_revoking_is_refused_while_a_copy_runs(worker: WorkerFence, sidecar: Peer) -> None:
    assert sidecar.ask("start 5") == "True"
    assert not worker.try_revoke(6)
    # A refused revocation voided nothing: the job may still be copied.
    worker.give_up_revoking()
    assert sidecar.ask("start 4") == "True"
    assert sidecar.ask("end 5") == "ended"
    assert not worker.try_revoke(6)
    assert sidecar.ask("end 4") == "ended"
    assert worker.try_revoke(6)


def test_copies_that_overlap_do_not_keep_a_worker_from_revoking(worker: WorkerFence) -> None:
    with local_sidecar(worker) as fence:
        copying = contextlib.ExitStack()
        assert copying.enter_context(fence.copying(1))
        for _ in range(100):
            if worker.try_revoke(2):
                break
            following = contextlib.ExitStack()
            with contextlib.suppress(BlockingIOError):
                following.enter_context(fence.copying(1))
            copying.close()
            copying = following
        else:
            pytest.fail("a hundred copies in a row, and no moment to revoke in between")
        with fence.copying(1) as valid:
            assert not valid
        with fence.copying(2) as valid:
            assert valid, "copies start again"


def test_a_late_copy_of_a_revoked_job_does_not_start(worker: WorkerFence, sidecar: Peer) -> None:
    assert worker.try_revoke(6)
    assert sidecar.ask("start 5") == "False"
    assert sidecar.ask("end 5") == "ended"
    assert sidecar.ask("start 6") == "True"


def test_killing_the_holder_frees_the_lock(worker: WorkerFence, sidecar: Peer) -> None:
    assert sidecar.ask("start 5") == "True"
    assert not worker.try_revoke(6)
    sidecar.process.send_signal(signal.SIGKILL)
    sidecar.process.wait(timeout=60)
    assert worker.try_revoke(6)


def test_a_sidecar_that_was_stopped_finds_its_jobs_void_when_it_wakes(
    worker: WorkerFence, sidecar: Peer
) -> None:
    os.kill(sidecar.process.pid, signal.SIGSTOP)
    os.waitpid(sidecar.process.pid, os.WUNTRACED)
    sidecar.tell("start 5")
    assert worker.try_revoke(6)
    os.kill(sidecar.process.pid, signal.SIGCONT)
    assert sidecar.answer() == "False"


def test_a_sidecar_that_is_stopped_in_a_copy_keeps_the_blocks(
    worker: WorkerFence, sidecar: Peer
) -> None:
    assert sidecar.ask("start 5") == "True"
    os.kill(sidecar.process.pid, signal.SIGSTOP)
    os.waitpid(sidecar.process.pid, os.WUNTRACED)
    assert not worker.try_revoke(6)
    os.kill(sidecar.process.pid, signal.SIGCONT)
    assert sidecar.ask("end 5") == "ended"
    assert worker.try_revoke(6)


def test_another_sidecar_takes_over_the_page_of_a_killed_one(
    worker: WorkerFence, sidecar: Peer
) -> None:
    assert worker.try_revoke(3)
    sidecar.end()
    successor = Peer(SIDECAR, worker.fd)
    try:
        assert successor.ask("start 2") == "False"
        assert successor.ask("start 3") == "True"
        assert not worker.try_revoke(4)
    finally:
        successor.end()
    assert worker.try_revoke(4)


def test_a_copy_never_waits_for_a_worker_that_stopped_while_revoking(worker: WorkerFence) -> None:
    # The child holds the worker's own file description, so it locks as the worker.
    revoking = Peer(WORKER, worker.fd)
    assert revoking.greeting == "locked"
    try:
        with local_sidecar(worker) as fence:
            with pytest.raises(BlockingIOError), fence.copying(1):
                pass
            # The lock belongs to the page's description: its last holder has to let go of it.
            assert worker.try_revoke(1)
            with fence.copying(1) as valid:
                assert valid
    finally:
        revoking.end()


def test_copies_on_several_threads_hold_the_page_side_by_side(worker: WorkerFence) -> None:
    inside = threading.Barrier(3)
    leave = threading.Event()
    seen: list[bool] = []

    def copy(fence: SidecarFence, job_id: int) -> None:
        with fence.copying(job_id) as valid:
            seen.append(valid)
            inside.wait(timeout=60)
            leave.wait(timeout=60)

    with local_sidecar(worker) as fence:
        threads = [threading.Thread(target=copy, args=(fence, job_id)) for job_id in (1, 2)]
        for thread in threads:
            thread.start()
        inside.wait(timeout=60)
        assert not worker.try_revoke(3)
        leave.set()
        for thread in threads:
            thread.join()
        assert worker.try_revoke(3)
    assert seen == [True, True]


def test_a_copy_that_raises_lets_go_of_the_page(worker: WorkerFence) -> None:
    with local_sidecar(worker) as fence:
        with pytest.raises(RuntimeError, match="disk on fire"), fence.copying(1):
            raise RuntimeError("disk on fire")
        assert worker.try_revoke(2)


def test_revoking_less_does_not_bring_a_job_back(worker: WorkerFence) -> None:
    assert worker.try_revoke(9)
    assert worker.try_revoke(3)
    with local_sidecar(worker) as fence, fence.copying(8) as valid:
        assert not valid


def test_the_sidecar_cannot_write_the_page(worker: WorkerFence) -> None:
    with local_sidecar(worker) as fence, pytest.raises(ValueError, match="read-only"):
        fence._words[0] = 1  # noqa: SLF001 (what is tested is that it cannot be written)


@pytest.mark.parametrize("size_bytes", [0, 1, PAGE_BYTES - 1])
def test_a_page_that_is_too_small_is_refused_and_its_descriptor_closed(size_bytes: int) -> None:
    fd = os.memfd_create("kvlake-test")
    os.ftruncate(fd, size_bytes)
    with pytest.raises(ValueError, match="mmap length is greater than file size"):
        SidecarFence(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_descriptor_that_cannot_be_mapped_is_refused_and_closed(tmp_path: Path) -> None:
    path = tmp_path / "write-only"
    path.write_bytes(bytes(PAGE_BYTES))
    fd = os.open(path, os.O_WRONLY)
    with pytest.raises(OSError, match="Permission denied"):
        SidecarFence(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_closing_leaves_no_descriptor_behind() -> None:
    def descriptors() -> set[str]:
        return set(os.listdir("/proc/self/fd"))

    before = descriptors()
    worker = WorkerFence()
    fence = SidecarFence(os.dup(worker.fd))
    with fence.copying(1):
        pass
    fence.close()
    worker.close()
    worker.close()
    # Python may close others of earlier tests at any time.
    assert descriptors() <= before


def test_sequence_numbers_use_all_64_bits(worker: WorkerFence) -> None:
    last = int(np.iinfo(np.uint64).max)
    worker.signal(last)
    with local_sidecar(worker) as fence:
        assert fence.reached(last)

"""Run a module in namespaces of its own, as two containers that share none run theirs.

    python -m tests.gpu.real.apart PID MODULE [ARGUMENT …]

The IPC, PID, mount and UTS namespaces are new, /proc shows the new processes only, and /dev/shm is
an empty file system. User and network stay those of the caller. The module runs as process PID of
its namespace, 2 or more, behind a first process as containers have one. It needs the right to do
so (root, or CAP_SYS_ADMIN). SIGTERM and SIGUSR1 go to the module, its exit code comes back, and it
ends when this process does.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Final

NAMESPACES: Final = ("mnt", "ipc", "pid", "uts")
_CLONE: Final = {"mnt": 0x00020000, "uts": 0x04000000, "ipc": 0x08000000, "pid": 0x20000000}
_PRIVATE: Final = 1 << 18 | 1 << 14  # MS_PRIVATE | MS_REC
_PR_SET_PDEATHSIG: Final = 1
_SHARED_MEMORY_BYTES: Final = 16 << 30
_libc = ctypes.CDLL(None, use_errno=True)


def _checked(what: str, code: int) -> None:
    if code:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def _mount(kind: str, target: str, flags: int, options: str = "") -> None:
    code = _libc.mount(
        kind.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()
    )
    _checked(f"mount {kind} on {target}", code)


def _leave() -> None:
    flags = 0
    for name in NAMESPACES:
        flags |= _CLONE[name]
    _checked("unshare", _libc.unshare(flags))
    _mount("none", "/", _PRIVATE)


def _child() -> int:
    """Fork. The child returns 0, and ends when its parent does; the parent returns the id."""
    child = os.fork()
    if not child:
        _checked("prctl", _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL))
    return child


def _follow(child: int) -> int:
    """Pass signals on to `child` until it ends; its exit code, or 128 and its signal."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda received, _: os.kill(child, received))
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return 128 + os.WTERMSIG(status)
    return os.waitstatus_to_exitcode(status)


def main(pid: int, module: str, arguments: list[str]) -> int:
    """Start `module` apart and wait for it; its exit code, or 128 and the signal that ended it."""
    _leave()
    # The first child is in the new PID namespace, this process is not.
    if first := _child():
        return _follow(first)
    _mount("proc", "/proc", 0)
    _mount("tmpfs", "/dev/shm", 0, f"size={_SHARED_MEMORY_BYTES}")
    Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
    if second := _child():
        return _follow(second)
    assert os.getpid() == pid
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))

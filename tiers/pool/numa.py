"""The NUMA nodes of host memory: chosen, requested and sampled.

Owns the choice (the nodes of this machine's GPUs, as the kernel and NVIDIA's driver report them,
without CUDA) and the system calls, through ctypes since libnuma has no well-kept binding.

Nodes are preferred, not enforced: when a node is full, a strict policy ends processes (the OOM
killer) instead of using another node. Several nodes are interleaved, for the GPUs of all sockets.
The policy is a thread's own (set_mempolicy): it ends with the threads that allocate the pages.

Invariants: the policy is set before the first page is allocated, since it moves no page; a setting
that names nodes is followed or refused, `auto` is followed or gives a reason.
"""

import contextlib
import ctypes
import errno
import os
import platform
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from tiers.errors import PoolError
from tiers.kv.layout import Bytes

PAGES_SAMPLED: Final = 64

_CALLS: Final = {"x86_64": (238, 239), "aarch64": (237, 236)}
"""set_mempolicy and get_mempolicy."""
_PREFERRED: Final = 1
_INTERLEAVE: Final = 3
_OF_THE_PAGE: Final = 3
"""MPOL_F_NODE | MPOL_F_ADDR: the node of the page at an address."""
_MASK_BITS: Final = 1024
_WORD_BITS: Final = 64
_PAGE_BYTES: Final = 4096

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


@dataclass(slots=True)
class Placement:
    """Preferred nodes of memory."""

    nodes: tuple[int, ...] = ()
    """Without any, a page lies on the node that touches it first."""
    reason: str = ""
    """Why there are none."""
    strict: bool = False
    """Whether it is an error if the kernel refuses."""
    refused: bool = False
    """Whether there are none because the kernel refused."""

    @classmethod
    def of(
        cls, setting: Literal["auto", "off"] | tuple[int, ...], root: Path = Path("/")
    ) -> "Placement":
        """A setting on this machine. Raises `PoolError` for nodes that do not exist."""
        if setting == "off":
            return cls(reason="host.numa is off")
        there = memory_nodes(root)
        if isinstance(setting, tuple):
            unknown = sorted(set(setting) - set(there))
            if unknown:
                raise PoolError(
                    f"host.numa={list(setting)}: this machine has memory on the nodes "
                    f"{list(there)}; name some of them, or write auto"
                )
            return cls(setting, strict=True)
        if len(there) <= 1:
            return cls(reason="the machine has one node")
        nodes = gpu_nodes(root)
        return cls(nodes) if nodes else cls(reason="no GPU whose node is known")

    def settle(self) -> None:
        """Try it. If the kernel refuses, raises `PoolError` if `strict`, else clears the nodes."""
        if not self.nodes:
            return
        with ThreadPoolExecutor(1) as thread:
            refusal = thread.submit(prefer_nodes, self.nodes).result()
        if refusal and self.strict:
            raise PoolError(f"host.numa={list(self.nodes)}: {refusal}")
        if refusal:
            self.nodes, self.reason, self.refused = (), refusal, True

    def adopt(self) -> None:
        """Prefer the nodes for what this thread allocates from now on, after `settle`."""
        if self.nodes:
            prefer_nodes(self.nodes)

    def describe(self, memory: Bytes) -> dict[str, object]:
        """For status: the request, and the nodes of a sample of the pages."""
        return {
            "nodes": list(self.nodes),
            "reason": self.reason,
            "pages_sampled": {str(node): count for node, count in sample(memory).items()},
        }


def memory_nodes(root: Path = Path("/")) -> tuple[int, ...]:
    """Nodes that have memory; node 0 if the kernel does not say."""
    try:
        text = (root / "sys/devices/system/node/has_memory").read_text()
    except OSError:
        return (0,)
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal():
            found += range(int(first), int(last or first) + 1)
    return tuple(found) or (0,)


def gpu_nodes(root: Path = Path("/")) -> tuple[int, ...]:
    """Nodes of the GPUs that NVIDIA's driver shows here, as far as they are known."""
    found: set[int] = set()
    for gpu in (root / "proc/driver/nvidia/gpus").glob("*"):
        with contextlib.suppress(OSError):
            text = (root / "sys/bus/pci/devices" / gpu.name.lower() / "numa_node").read_text()
            if text.strip().isdecimal():  # -1 if the firmware does not say
                found.add(int(text))
    return tuple(sorted(found))


def sample(memory: Bytes) -> dict[int, int]:
    """Nodes of up to PAGES_SAMPLED evenly spread pages, as counts; empty if unknown.

    Maps and allocates these pages.
    """
    call = _call(1)
    pages = memory.size // _PAGE_BYTES
    if call is None or not pages:
        return {}
    found: Counter[int] = Counter()
    count, none = min(pages, PAGES_SAMPLED), ctypes.c_ulong(0)
    for number in range(count):
        node = ctypes.c_int(-1)
        address = memory.ctypes.data + number * pages // count * _PAGE_BYTES
        page, flags = ctypes.c_void_p(address), ctypes.c_ulong(_OF_THE_PAGE)
        if libc.syscall(call, ctypes.byref(node), None, none, page, flags):
            return {}
        found[node.value] += 1
    return dict(sorted(found.items()))


def prefer_nodes(nodes: tuple[int, ...]) -> str:
    """Prefer the nodes for what this thread allocates from now on.

    Empty, or why the kernel does not do so, with the remedy.
    """
    call = _call(0)
    if call is None:
        return f"how to place memory on {platform.machine()} is not known"
    words = (ctypes.c_ulong * (_MASK_BITS // _WORD_BITS))()
    for node in nodes:
        words[node // _WORD_BITS] |= 1 << node % _WORD_BITS
    mode = ctypes.c_long(_PREFERRED if len(nodes) == 1 else _INTERLEAVE)
    # The kernel uses one bit less.
    if libc.syscall(call, mode, words, ctypes.c_ulong(_MASK_BITS + 1)) == 0:
        return ""
    code = ctypes.get_errno()
    why = f"memory cannot be placed on the nodes {list(nodes)} (set_mempolicy: {os.strerror(code)})"
    if code == errno.EPERM:
        why += "; let the container do so (docker --cap-add SYS_NICE, or the capability SYS_NICE)"
    return why


def _call(number: int) -> ctypes.c_long | None:
    found = _CALLS.get(platform.machine())
    return None if found is None else ctypes.c_long(found[number])

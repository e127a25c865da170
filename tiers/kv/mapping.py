"""Mappings of memory that processes share: where they lie, and pages allocated ahead of use.

Owns the placement of a mapping, huge pages, the NUMA nodes of an engine's memory, and keeping
prompts out of core dumps. Does not own the nodes of the pool (`pool/numa.py`), descriptors
(`memfd.py`), or what is in the memory.

A copy into pages that are not mapped takes a fault for each, which makes it three times slower. A
copy of memory that was idle looks up the address of each page, in a virtual machine twice: on two
cores of one, 16 MiB that had been idle for half a second took 11 to 42 ms in pages of 4 KiB, and
3.3 ms in pages of 2 MiB (docs/adr/0054).

A process gets huge pages of shared memory without a privilege or a setting of the machine: it asks
for the collapse of pages that it has (MADV_COLLAPSE), in a mapping at a multiple of their size.
Where the kernel refuses (before 6.1, `shmem_enabled` set to `deny`, no free huge page, memory
pinned for a GPU), the pages stay as they are.
"""

import contextlib
import ctypes
import errno
import mmap
import os
import platform
from typing import Final

import numpy as np

from tiers.kv.layout import Bytes

HUGE_PAGE_BYTES: Final = 2 << 20
"""On x86-64, and on arm64 with pages of 4 KiB. Elsewhere the kernel refuses them."""

_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
_MADV_POPULATE_READ: Final = 22
_MADV_POPULATE_WRITE: Final = 23
_MADV_COLLAPSE: Final = 25
_COLLAPSE_ATTEMPTS_MAX: Final = 2
"""Pages that another thread has just allocated may still be on their way to the kernel's lists."""
_FIRST_PAGES_STEP: Final = 181
"""From one huge page to the next, how much later the page lies that is allocated first, round and
round. The kernel interleaves NUMA nodes by the number of a page, and a huge page comes to lie where
its first page does. With this step those are in turn on any number of nodes; without one all are
on one."""

_CALLS: Final = {"x86_64": (237, 239, 309), "aarch64": (235, 236, 168)}
"""mbind, get_mempolicy, getcpu."""
_POLICY_DEFAULT: Final = 0
_POLICY_PREFERRED: Final = 1
_POLICY_LOCAL: Final = 4
_NODES_MAX: Final = 1024
_WORD_BITS: Final = 64

# Through ctypes: Python's mmap takes no address, and its madvise() holds the GIL.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.syscall.restype = ctypes.c_long


def map_shared(fd: int, size_bytes: int, *, writable: bool = True) -> tuple[mmap.mmap, Bytes]:
    """The first `size_bytes` of a file, mapped at a multiple of 2 MiB, outside of core dumps.

    Returns the owner of the mapping and its bytes, which may be written to if `writable`. The
    mapping ends when the owner is closed, or with the last array over it. Where the kernel has no
    room for the addresses, the file is mapped at any page. Raises `OSError`.
    """
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    # Addresses only, of which a part is mapped to the file. The owner unmaps all of them.
    try:
        owner = mmap.mmap(-1, size_bytes + HUGE_PAGE_BYTES, flags=private)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        # With vm.overcommit_memory=2 they count as memory, also where the file has its own already.
        owner = mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED, prot=access)
        memory: Bytes = np.frombuffer(owner, dtype=np.uint8)
    else:
        reserved = np.frombuffer(owner, dtype=np.uint8)
        first = -reserved.ctypes.data % HUGE_PAGE_BYTES
        memory = reserved[first : first + size_bytes]
        memory.flags.writeable = writable
        shared = mmap.MAP_SHARED | _MAP_FIXED
        if _libc.mmap(memory.ctypes.data, size_bytes, access, shared, fd, 0) == _MAP_FAILED:
            raise _os_error()
    # It contains prompts, and is large.
    with contextlib.suppress(OSError):
        owner.madvise(mmap.MADV_DONTDUMP)
    return owner, memory


def populate(memory: Bytes, *, collapse: bool = True) -> bool:
    """Allocate and map every page of `memory`, which starts on one, in huge pages where they fit.

    Its contents stay, and others may use it meanwhile. Holds no GIL: this takes milliseconds for
    every 16 MiB. Memory that may only be read, or without `collapse`, is mapped in the pages that
    it has. A huge page lies on the NUMA node of most of its pages, and is charged to this process.
    False on a kernel before 5.14. Raises `OSError` without memory for it.
    """
    advice = _MADV_POPULATE_WRITE if memory.flags.writeable else _MADV_POPULATE_READ
    address, end = memory.ctypes.data, memory.ctypes.data + memory.size
    first = address + -address % HUGE_PAGE_BYTES
    huge_bytes = (end - first) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if huge_bytes > 0 and memory.flags.writeable and collapse:
        # A collapse fills what is missing, but not where there is no page at all. One page each is
        # five times faster than all of them.
        for start in range(first, first + huge_bytes, HUGE_PAGE_BYTES):
            step_bytes = start // HUGE_PAGE_BYTES * _FIRST_PAGES_STEP * mmap.PAGESIZE
            _libc.madvise(start + step_bytes % HUGE_PAGE_BYTES, mmap.PAGESIZE, advice)
        for _ in range(_COLLAPSE_ATTEMPTS_MAX):
            if _libc.madvise(first, huge_bytes, _MADV_COLLAPSE) == 0:
                break
            if ctypes.get_errno() != errno.EAGAIN:
                break
    if _libc.madvise(address, memory.size, advice) == 0:
        return True
    if ctypes.get_errno() == errno.EINVAL:
        return False
    raise _os_error()


def place_as_here(memory: Bytes) -> bool:
    """Have pages of shared memory lie on the NUMA nodes of this thread, also if others touch them.

    Call it before they are touched: an engine binds itself to the node of its cores, and the
    sidecar, which maps the engine's memory ahead, runs on any. False where the kernel or a
    container does not allow it; then a page lies on the node of the thread that touches it first.
    """
    calls = _CALLS.get(platform.machine())
    if calls is None:
        return False
    mbind, get_policy, get_cpu = calls
    mode, nodes = ctypes.c_int(), (ctypes.c_ulong * (_NODES_MAX // _WORD_BITS))()
    # The kernel uses one bit less.
    bits, none = ctypes.c_ulong(_NODES_MAX + 1), ctypes.c_ulong(0)
    if _libc.syscall(get_policy, ctypes.byref(mode), nodes, bits, none, none):
        return False
    if mode.value in (_POLICY_DEFAULT, _POLICY_LOCAL):
        node = ctypes.c_uint()
        if _libc.syscall(get_cpu, None, ctypes.byref(node), None):
            return False
        mode.value, nodes[node.value // _WORD_BITS] = (
            _POLICY_PREFERRED,
            1 << node.value % _WORD_BITS,
        )
    address, size_bytes = ctypes.c_ulong(memory.ctypes.data), ctypes.c_ulong(memory.size)
    policy = ctypes.c_long(mode.value)
    return not _libc.syscall(mbind, address, size_bytes, policy, nodes, bits, none)


def _os_error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))

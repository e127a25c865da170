"""Constants of the protocol: its version, and the limits of messages and their parts.

Nothing here is a setting: both sides are built with the same values.
"""

from __future__ import annotations

from typing import Final

PROTOCOL_VERSION: Final = 5
"""Increased by every incompatible change. Both sides refuse other versions."""

FRAME_BYTES_MAX: Final = 4 * 1024 * 1024
KEYS_PER_MESSAGE_MAX: Final = 65_536
JOBS_PER_MESSAGE_MAX: Final = 4_096
NAMESPACE_BYTES_MAX: Final = 65_536
MODEL_CHARACTERS_MAX: Final = 256
BLOCKS_PER_CHUNK_MAX: Final = 65_536
TTL_MS_MAX: Final = 365 * 24 * 3600 * 1000
PIN_MS_MAX: Final = 24 * 3600 * 1000
GROUPS_MAX: Final = 64
"""KV cache groups of one engine: a model of 62 layers, one in six of another kind, has 7."""
KEY_BYTES: Final = 32
EVENT_NAME_BYTES: Final = 16
"""The name of a chunk in KV cache events: the first half of its key."""
TOKEN_BYTES: Final = 16
TENANT_BYTES: Final = 8
FDS_PER_ATTACH_MAX: Final = 4
UUID_BYTES: Final = 16
IPC_HANDLE_BYTES: Final = 64
DECLINED_CHARS_MAX: Final = 1_000
DECLINE_REASONS: Final = ("chunk_tokens", "unsupported", "weights", "memory")
"""Why an engine serves without the cache, in a `Declined`:

chunk_tokens: the chunk size is not a multiple of the block size. unsupported: something of the
model, the engine or the machine is refused. weights: the files of the model cannot be read. memory:
the KV cache of a rank cannot be shared.
"""

KIND_MEMFD: Final = "memfd"
KIND_CUDA_IPC: Final = "cuda_ipc"
KIND_CUDA_VMM: Final = "cuda_vmm"
MEMORY_FDS: Final[dict[str, tuple[str, ...]]] = {
    KIND_MEMFD: ("KV memory", "fence page"),
    KIND_CUDA_IPC: ("fence page",),
    KIND_CUDA_VMM: ("KV memory", "fence page"),
}
"""Kinds of memory, and the descriptors that arrive with each; the fence page is the last."""

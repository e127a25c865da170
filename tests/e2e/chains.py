"""A prompt's chunks in order, wherever they are: in a pool's memory, or in a store's folder.

An image says its key and that of the chunk before it, so a chain can be followed across writers.
(What a chunk's tokens are, vLLM's own offloading does not tell.)
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

import pyarrow as pa

from tests.harness.sidecars import POOLS
from tiers.kv.arrow_file import PAGE_BYTES

if TYPE_CHECKING:
    from tests.harness.sidecars import SidecarProcess

MAGIC: Final = b"ARROW1\0\0"
QUARANTINE: Final = "quarantine"

P = TypeVar("P")


class Images(NamedTuple, Generic[P]):
    """Images by key: the key of the chunk before each, and the place where it is."""

    found: dict[bytes, tuple[bytes, P]]

    def since(self, before: Images[P]) -> Images[P]:
        """Those that were not there `before`."""
        return Images({key: one for key, one in self.found.items() if key not in before.found})

    def chains(self) -> list[list[P]]:
        """Places of the chunks of each chain that begins in these images, its head first.

        If two chunks follow one, the chain goes on with the one that others follow.
        """
        after: dict[bytes, list[bytes]] = {}
        for key, (parent, _) in self.found.items():
            after.setdefault(parent, []).append(key)
        chains: list[list[P]] = []
        for key, (parent, _) in self.found.items():
            if parent not in self.found:
                chain = [key]
                while following := after.get(chain[-1]):
                    chain.append(max(following, key=lambda one: one in after))
                chains.append([self.found[one][1] for one in chain])
        return chains


def pool_of(sidecar: SidecarProcess) -> Path:
    """The file of a sidecar's host memory."""
    return POOLS / f"kvlake-{os.getuid()}-{sidecar.name}.pool"


def in_pool(sidecar: SidecarProcess) -> Images[int]:
    """Position in the pool's file of each image in host memory."""
    memory = pool_of(sidecar).read_bytes()
    found: dict[bytes, tuple[bytes, int]] = {}
    place = memory.find(MAGIC)
    while place >= 0:
        if place % PAGE_BYTES == 0:
            key, parent = _names(pa.py_buffer(memory).slice(place))
            if any(key):
                found[key] = parent, place
        place = memory.find(MAGIC, place + 1)
    return Images(found)


def in_folder(folder: Path) -> Images[Path]:
    """The file of each object of a store in a folder."""
    found: dict[bytes, tuple[bytes, Path]] = {}
    for path in folder.rglob("??/*/*.arrow"):
        if QUARANTINE not in path.parts:
            with pa.memory_map(str(path)) as file:
                key, parent = _names(file.read_buffer())
            found[key] = parent, path
    return Images(found)


def _names(image: pa.Buffer) -> tuple[bytes, bytes]:
    # Behind its magic an Arrow file is a stream, which can be read though the file's end is not
    # known: a slot may be larger than what is in it.
    with pa.ipc.open_stream(pa.BufferReader(image.slice(len(MAGIC)))) as reader:
        row = reader.read_next_batch()
    return row.column("block_hash")[0].as_py(), row.column("parent_hash")[0].as_py()

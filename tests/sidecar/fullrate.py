"""An engine's worker that stores as fast as its sidecar takes it, in a thread.

Owns the load: chunks with keys of their own, some steps ahead of the answers. Does not own the
sidecar, nor what becomes of the chunks.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from pathlib import Path
from typing import Self

from sidecar.protocol import Outcome, StoreJob
from tests.sidecar.client import BLOCKS_PER_CHUNK, HEADS, LAYERS, Worker, key_of
from tiers.kv.layout import KVLayout, Segment

BLOCK_TOKENS = 16
STEPS_AHEAD = 4


def wide_layout(content_bytes: int, num_blocks: int = 4 * BLOCKS_PER_CHUNK) -> KVLayout:
    """A dense layout whose chunks have 768 times `content_bytes`."""
    head = content_bytes * BLOCK_TOKENS
    block = head * HEADS
    layer = block * num_blocks
    return KVLayout(
        segment=Segment(0, LAYERS, 0, HEADS),
        num_blocks=num_blocks,
        block_tokens=BLOCK_TOKENS,
        content_bytes=content_bytes,
        dtype="float16",
        encoding="plain",
        size_bytes=layer * LAYERS,
        layer_offsets_bytes=tuple(layer * number for number in range(LAYERS)),
        block_stride_bytes=block,
        head_stride_bytes=head,
        token_stride_bytes=content_bytes,
    )


class FullRate:
    """Stores until it is closed. `outcomes` counts what became of the chunks."""

    def __init__(self, path: Path, name: str, content_bytes: int) -> None:
        self._worker = Worker(path, layout=wide_layout(content_bytes))
        self._worker.memory[:] = 7
        self._name = name
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._store)
        self.outcomes: Counter[Outcome] = Counter()
        self.failure: BaseException | None = None

    def _store(self) -> None:
        try:
            for job in itertools.count(1):
                if job > STEPS_AHEAD:
                    self.outcomes[self._worker.outcome(job - STEPS_AHEAD)] += 1
                if self._over.is_set():
                    return
                first = job % STEPS_AHEAD * BLOCKS_PER_CHUNK
                chunk = self._worker.chunk(
                    key_of(self._name, job), range(first, first + BLOCKS_PER_CHUNK)
                )
                self._worker.submit(stores=[StoreJob(job, [chunk])])
        except BaseException as error:
            self.failure = error

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._worker.close()
        if self.failure is not None:
            raise self.failure

"""An object on its way from the store into a slot: hashed as it comes, judged when it is there.

Owns the hash of one read and its verdict. Does not own reading (`tiers/store/object_tier.py`), the
checks themselves (`tiers/kv/slot_image.py`), nor what follows from a verdict (`executor.py`).

A payload that is hashed after it has arrived is read from memory once more, which takes half as
long as receiving it. So whoever receives it tells of each piece while it is in the core's cache, in
the thread that has just put it there.

Invariants: a verdict covers all bytes of the object, in the order in which they lie in the slot, or
there is none and the caller hashes the slot itself. A read that is tried again is hashed anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiers.kv.slot_image import payload_hasher

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from sidecar.sessions.namespaces import RankLayout
    from tiers.kv.slot_image import SegmentMeta, SlotTemplate

    Bytes = npt.NDArray[np.uint8]


class StreamingVerifier:
    """One read of a rank's own segment. `seen` is the tier's `Seen`."""

    def __init__(self, rank: RankLayout, key: bytes, slot: Bytes) -> None:
        self._rank = rank
        self._key = key
        self._slot = slot
        self._template: SlotTemplate | None = None
        self._hasher = payload_hasher()
        self._there = 0
        self._judged_bytes = -1
        self._meta: SegmentMeta | None = None
        self._error: Exception | None = None

    def seen(self, size_bytes: int, first: int, last: int) -> None:
        """In the thread that reads: these bytes have come. Of no size: a try begins."""
        if not size_bytes:
            self._template, self._judged_bytes = None, -1
            return
        if first == 0:
            self._begin(size_bytes)
        template = self._template
        if template is None or first != self._there:
            self._template = None
            return
        self._there = last
        start = template.payload_offset
        payload = self._slot[max(first, start) : min(last, start + template.payload_bytes)]
        if payload.size:
            self._hasher.update(payload.data)
        if last == size_bytes:
            self._judge(size_bytes)

    def _begin(self, size_bytes: int) -> None:
        self._there, self._judged_bytes = 0, -1
        self._hasher = payload_hasher()
        try:
            self._template = self._rank.templates.for_image_bytes(size_bytes)
        except Exception:
            # In blocks of another size, damaged, or a bug: told apart when all of it is there.
            self._template = None

    def _judge(self, size_bytes: int) -> None:
        digest = self._hasher.digest()
        try:
            self._meta, self._error = self._verified(self._slot[:size_bytes], digest), None
        except Exception as error:
            # Raised where the read ends: to whoever reads, this is not a failure of the store.
            # With its traceback it would keep this object, and through it a view of the slot.
            self._meta, self._error = None, error.with_traceback(None)
        self._judged_bytes = size_bytes

    def judged(self, num_bytes: int) -> bool:
        """Whether what has arrived, so many bytes, was hashed on its way."""
        return self._judged_bytes == num_bytes

    def verdict(self, num_bytes: int) -> SegmentMeta | None:
        """What the object holds; None where its blocks are of another size than this rank's.

        Where it was not hashed on its way, that is done now: then it belongs into a thread.
        Raises `ChunkCorrupt`.
        """
        if not self.judged(num_bytes):
            return self._verified(self._slot[:num_bytes], None)
        if self._error is not None:
            raise self._error
        return self._meta

    def _verified(self, image: Bytes, digest: bytes | None) -> SegmentMeta | None:
        rank = self._rank
        if rank.as_stored(image) is not rank:
            return None
        template = rank.templates.for_image_bytes(len(image))
        return template.verify(image, self._key, digest=digest)

"""Completes the descriptions of an engine with digests of files, without delaying the engine.

Owns the thread that reads large files while the engine serves without the cache, and who is to be
called once they are read. If the digests are remembered on this node, or the files are small, the
descriptions are complete at once and there is no thread. Does not own the reading itself
(`file_digests.py`).

Invariants:

* Files are read in the versions that were there when the descriptions were made. If a file is
  another one before all are read, the engine is refused.
* `descriptions` and `refusal` change once, before any call. Each call is made once, in the order of
  `then`, on the thread or at once.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from connector.identity.file_digests import (
    ReadingStopped,
    digests_of,
    file_stamp,
    known_digests,
    path_of,
    size_bytes_of,
)
from connector.identity.weights import completed, unread_stamps

logger = logging.getLogger("vllm.kvlake")


class Identity:
    """Descriptions that may still lack digests. If it `logs`, the log says so.

    Raises `OSError` if files cannot be read.
    """

    def __init__(self, descriptions: Sequence[Any], *, logs: bool) -> None:
        self._incomplete = descriptions
        self._level = logging.INFO if logs else logging.DEBUG
        self._stamps = list(dict.fromkeys(s for one in descriptions for s in unread_stamps(one)))
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._calls: list[Callable[[], None]] = []
        self.ended = False
        """Whether the descriptions are complete, or refused."""
        self.descriptions: list[Any] = []
        """Complete ones; empty until then."""
        self.refusal = ""
        """Why they can never be complete."""
        digests = known_digests(self._stamps) if self._stamps else {}
        if digests is not None:
            self._end(digests)
            return
        logger.log(
            self._level,
            "kvlake: the weights must be read once to identify them (%.1f GB); until then this "
            "engine is served without the cache",
            size_bytes_of(self._stamps) / 1e9,
        )
        threading.Thread(target=self._read, name="kvlake-identity", daemon=True).start()

    def then(self, call: Callable[[], None]) -> None:
        """Call this when it has ended, at once if it has. Never after `close`."""
        with self._lock:
            if not self.ended:
                self._calls.append(call)
                return
        call()

    def when_complete(self, call: Callable[[], None]) -> None:
        """As `then`, but not after a refusal."""

        def call_if_complete() -> None:
            if not self.refusal:
                call()

        self.then(call_if_complete)

    def close(self) -> None:
        """Stop reading. Does not wait for the thread, which ends at the next piece of a file."""
        self._stop.set()
        with self._lock:
            self._calls.clear()

    def _read(self) -> None:
        began = time.monotonic()
        try:
            digests = digests_of(self._stamps, self._stop, beside_engine=True)
            self._check_unchanged()
        except ReadingStopped:
            return
        except Exception as error:
            # A bug, too: it must be seen, and not leave an engine that waits for ever.
            self._end({}, refusal=str(error) or repr(error))
            return
        seconds = time.monotonic() - began
        logger.log(self._level, "kvlake: the weights are identified after %.0f s", seconds)
        self._end(digests)

    def _check_unchanged(self) -> None:
        for stamp in self._stamps:
            path = path_of(stamp)
            if file_stamp(path) != stamp:
                raise OSError(f"{path} was changed while the weights were read")

    def _end(self, digests: dict[str, str], *, refusal: str = "") -> None:
        if not refusal:
            self.descriptions = [completed(one, digests) for one in self._incomplete]
        self.refusal = refusal
        while True:
            with self._lock:
                if not self._calls:
                    self.ended = True
                    return
                call = self._calls.pop(0)
            call()

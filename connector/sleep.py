"""An engine that sleeps: its KV memory goes, and comes back as other memory at the same addresses.

Owns whether a worker's memory is shared now. vLLM tells a connector of it since 0.33: before memory
goes (`unregister_kv_caches`), which may be before each sleep and each release of the KV cache, and
once it is back (`restore_kv_caches`). Does not own the jobs (`worker.py`) nor the export.

Invariants: memory goes only after the sidecar has let go of it, or after a bounded wait; what the
sidecar mapped before is never taken for what came back, for that is exported and attached anew. A
mapping of it that is still there keeps the old memory, so a late copy harms nobody.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from connector.export import EXPORT_FAULTS, fault_told

if TYPE_CHECKING:
    from collections.abc import Callable

    from connector.export import ExportedMemory
    from connector.worker import WorkerRole

logger = logging.getLogger("vllm.kvlake")

RELEASE_SECONDS_MAX: Final = 10.0
"""The sidecar unmaps within milliseconds, but for a copy that runs."""


class SharedMemory:
    """The memory of one worker, shared but while its engine sleeps.

    Args:
        role: attached with what `share` gave first.
        share: exports the KV cache as it is now; raises one of `EXPORT_FAULTS`.
    """

    def __init__(self, role: WorkerRole, share: Callable[[], ExportedMemory]) -> None:
        self._role = role
        self._share = share
        self._shared = True
        self.lost_why = ""
        """Why the memory cannot be shared any more, or nothing."""

    def unregister(self) -> None:
        """The memory is about to go. Again is harmless."""
        if not self._shared:
            return
        self._shared = False
        if not self._role.suspend(RELEASE_SECONDS_MAX):
            logger.warning(
                "kvlake: the sidecar has not let go of this engine's KV memory within %g s; until "
                "it does, that memory is not free",
                RELEASE_SECONDS_MAX,
            )

    def restore(self) -> None:
        """The memory is back. Again is harmless."""
        if self._shared or self.lost_why:
            return
        try:
            memory = self._share()
            self._role.resume(memory)
        except EXPORT_FAULTS as error:
            # For good: the other ranks and the scheduler leave too, and nobody calls them back.
            self.lost_why = (
                f"after its sleep {fault_told(error)}; restart the engine to have it cached again"
            )
            self._role.give_up(self.lost_why)
            return
        self._shared = True

"""Blocks of an engine do not change hands while a copy reads or writes them.

Owns which copies stand in the middle of their work. Does not own what they copy (`images.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

from tests import places
from tests.simulation.clock import Violation

if TYPE_CHECKING:
    from sidecar.data.copy_queue import CopyGroup
    from tests.simulation.engine import SimEngine


class Copying:
    """The copies of all sidecars that live while `watched` lasts."""

    def __init__(self) -> None:
        self._running: list[CopyGroup] = []

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Know which copies stand in the middle of their work."""
        with contextlib.ExitStack() as stack:
            for name in ("gather_group", "scatter_group"):
                stack.enter_context(places.patched(name, self._watched(places.find(name).value)))
            yield

    def _watched(self, copy: Callable[[CopyGroup, Any], Any]) -> Callable[[CopyGroup, Any], Any]:
        def watched(group: CopyGroup, pool: Any) -> Any:
            self._running.append(group)
            try:
                return copy(group, pool)
            finally:
                self._running.remove(group)

        return watched

    def blocks_taken(self, engine: SimEngine, block_ids: list[int]) -> None:
        """Blocks got a new owner, or new content: nobody may be copying from or to them."""
        if not self._running:
            return
        taken = set(block_ids)
        wires = {rank.wire for rank in engine.ranks}
        for group in self._running:
            connection = cast("Any", group.session.connection)
            if connection.wire not in wires:
                continue
            for command in group.commands:
                both = taken.intersection(command.block_ids)
                if both:
                    raise Violation("a block is not reused under a copy", f"{both} of {command}")

"""A tier that does what its script says, and what wrappers around it are made with."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from tiers.errors import TierUnavailable
from tiers.store.client import Found
from tiers.store.object_tier import Abilities, UrlObjects

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiers.store.client import Bytes, Listing, Seen


def memory() -> UrlObjects:
    return UrlObjects(f"memory://{secrets.token_hex(6)}")


async def no_sleep(seconds: float) -> None:
    await anyio.lowlevel.checkpoint()


class Scripted:
    """Raises what its script says, one entry for each call; None succeeds, as does its end."""

    def __init__(self, script: Sequence[Exception | None] = ()) -> None:
        self._script = list(script)
        self.calls: list[str] = []
        self.running = 0
        self.running_max = 0
        self.gate = anyio.Event()
        self.gate.set()

    @property
    def url(self) -> str:
        return "scripted://here"

    async def _step(self, verb: str) -> None:
        self.calls.append(verb)
        self.running += 1
        self.running_max = max(self.running_max, self.running)
        try:
            await self.gate.wait()
            await anyio.lowlevel.checkpoint()
        finally:
            self.running -= 1
        error = self._script.pop(0) if self._script else None
        if error is not None:
            raise error

    async def probe(self) -> Abilities:
        await self._step("probe")
        return Abilities(creates=True)

    async def write(self, name: str, image: Bytes, *, create: bool = False) -> None:
        await self._step("write")

    async def read(self, name: str, into: Bytes, *, seen: Seen | None = None) -> int:
        await self._step("read")
        return 7

    async def list(
        self, prefix: str, *, start_after: str = "", deep: bool = True, names_max: int | None = None
    ) -> Listing:
        await self._step("list")
        return [Found("a", 1, 0.0)]

    async def delete(self, names: Sequence[str]) -> None:
        await self._step("delete")

    async def quarantine(self, name: str) -> None:
        await self._step("quarantine")

    async def close(self) -> None:
        await self._step("close")


def later() -> TierUnavailable:
    return TierUnavailable("busy", retryable=True)

"""OpenTelemetry spans of what the cache did for a request, beside vLLM's own span of it.

Owns which spans there are and what they say. Does not own how they are sent: `connector/vllm.py`
passes vLLM's tracer. A request has trace headers only if vLLM traces (`--otlp-traces-endpoint`) and
its caller sent some. For every other request this does nothing.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from connector.scheduler.requests import RequestState
from sidecar.protocol import LoadChunk, StoreChunk
from sidecar.protocol.prompts import LOADED, PromptOutcome

Attributes: TypeAlias = dict[str, str | int]
EmitSpan: TypeAlias = Callable[[str, Mapping[str, str], int, int, Attributes], None]
"""Takes a name, trace headers, begin and end in nanoseconds since 1970, and attributes."""

REQUEST_ID: Final = "kvlake.request_id"
"""VLLM's id of the request inside its engine: that of its span, with random digits behind it."""
TOKEN_ID_BYTES: Final = 4


@dataclass(slots=True)
class Tracer:
    """Makes the spans of one engine, from times on the scheduler's `clock`."""

    emit: EmitSpan | None = None
    block_bytes: Sequence[int] = ()
    """Bytes of a block of each KV cache group, on all ranks together."""
    clock: Callable[[], float] = time.monotonic

    def headers(self, request: Any) -> Mapping[str, str] | None:
        """The trace headers of a request, if it is traced."""
        return None if self.emit is None else request.trace_headers

    def _size(self, chunks: Iterable[LoadChunk | StoreChunk]) -> int:
        return sum(len(chunk.block_ids) * self.block_bytes[chunk.group] for chunk in chunks)

    def planned(self, state: RequestState, chunks: Sequence[LoadChunk]) -> None:
        """Note the sizes of a load that begins, for `prompt`."""
        if self.headers(state.request):
            stored = [chunk for chunk in chunks if chunk.key in state.from_store_keys]
            state.loaded_bytes = (self._size(chunks), self._size(stored))

    def prompt(self, state: RequestState, tokens: Mapping[PromptOutcome, int]) -> None:
        """Make the spans of a prompt that has its first token: lookup, read, load.

        If there were several lookups, reads or loads, the span begins with the first and is as long
        as all of them together.
        """
        headers = self.headers(state.request)
        if not headers:
            return
        computed = {name: count for name, count in tokens.items() if name not in LOADED}
        reason = max(computed, key=lambda name: computed[name], default=None)
        loaded, stored = state.loaded_bytes
        from_store = tokens.get(PromptOutcome.STORE, 0)
        lookup, read, load = state.seconds
        self._emit(
            *("kvlake.lookup", headers, state, state.lookup_began, lookup),
            {f"kvlake.tokens.{name}": count for name, count in tokens.items()}
            | ({} if reason is None else {"kvlake.reason": str(reason)}),
        )
        if state.read_began:
            attributes = _moved("store", from_store, stored)
            if not from_store:
                attributes["kvlake.reason"] = str(state.store_reason)
            self._emit("kvlake.read", headers, state, state.read_began, read, attributes)
        if state.load_began:
            attributes = _moved("host", from_store + tokens.get(PromptOutcome.HOST, 0), loaded)
            if PromptOutcome.FAILED in tokens:
                attributes["kvlake.reason"] = str(PromptOutcome.FAILED)
            self._emit("kvlake.load", headers, state, state.load_began, load, attributes)

    def storing(
        self, state: RequestState, chunks: Sequence[StoreChunk]
    ) -> Callable[[], None] | None:
        """What makes the span of a store that begins now, once all ranks have ended it."""
        headers = self.headers(state.request)
        if not headers:
            return None
        began, group = self.clock(), chunks[0].group
        token_bytes = sum(len(chunk.token_ids) for chunk in chunks if chunk.group == group)
        attributes = _moved("host", token_bytes // TOKEN_ID_BYTES, self._size(chunks))

        def ended() -> None:
            seconds = self.clock() - began
            self._emit("kvlake.store", headers, state, began, seconds, attributes)

        return ended

    def _emit(
        self,
        name: str,
        headers: Mapping[str, str],
        state: RequestState,
        began: float,
        seconds: float,
        attributes: Attributes,
    ) -> None:
        assert self.emit is not None, "there are no headers without a tracer"
        begin = time.time_ns() - round((self.clock() - began) * 1e9)
        attributes[REQUEST_ID] = state.request.request_id
        self.emit(name, headers, begin, begin + round(seconds * 1e9), attributes)


def _moved(tier: str, num_tokens: int, num_bytes: int) -> Attributes:
    return {"kvlake.tier": tier, "kvlake.tokens": num_tokens, "kvlake.bytes": num_bytes}

"""Where the tokens of each prompt came from, and why the others were computed.

Owns the sorting of prompt tokens. vLLM counts a prompt in `vllm:prompt_tokens_total` when it takes
the request's `prefill_stats`, so it is sorted then: every token once, with vLLM's own numbers for
what was not computed. Does not own why a chunk was not found (`lookup.py`).

Invariant: the tokens of a prompt over all outcomes add up to its length.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from connector.scheduler.prefill import PrefillTimes
from connector.scheduler.requests import RequestState
from connector.scheduler.traces import Tracer
from sidecar.protocol.prompts import (
    PROMPTS_PER_MESSAGE_MAX,
    REQUEST_ID_CHARACTERS_MAX,
    PromptOutcome,
    PromptRecord,
)

PREFIX: Final = "prompt_tokens/"
"""How the names of these counts begin in vLLM's statistics."""
HELP: Final = (
    "Prompt tokens by where their KV came from, and the computed ones by reason. All together are"
    " vllm:prompt_tokens_total"
)


class Computed(NamedTuple):
    """Tokens up to `end_tokens`, from the end of the ones before, were computed for one reason."""

    end_tokens: int
    reason: PromptOutcome


class Missed(NamedTuple):
    """The first chunk that was not loaded."""

    key: bytes = b""
    token: int = 0


@dataclass(slots=True)
class _Prompt:
    request: Any
    prefill_stats: Any
    """What vLLM sets when the request is scheduled, and takes when it counts the prompt."""
    computed: Sequence[Computed]
    missed: Missed
    state: RequestState | None
    loading: bool
    """The external tokens are our load; otherwise they are another connector's."""
    failed: bool = False


class PromptTokens:
    """Sorts the tokens of prompts."""

    def __init__(self, times: PrefillTimes | None = None, tracer: Tracer | None = None) -> None:
        self._tracer = Tracer() if tracer is None else tracer
        self._times = PrefillTimes() if times is None else times
        self._prompts: dict[str, _Prompt] = {}
        self._counts = Counter[PromptOutcome]()
        self._records: list[PromptRecord] = []

    def scheduled(
        self,
        request: Any,
        computed: Sequence[Computed],
        missed: Missed = Missed(),  # noqa: B008 (immutable)
        state: RequestState | None = None,
        *,
        loading: bool = False,
    ) -> None:
        """Note what a request is scheduled with, as often as vLLM says it.

        vLLM says it for a load, and again for the rest of the prompt; after a preemption it leaves
        the numbers of `prefill_stats` as they were.
        """
        name, stats = request.request_id, request.prefill_stats
        if stats is None or (name in self._prompts and request.num_preemptions):
            return
        if loading or name not in self._prompts or not stats.num_external_cached_tokens:
            self._prompts[name] = _Prompt(request, stats, computed, missed, state, loading)

    def uncached(self, request: Any) -> None:
        """Note a request whose prompt the cache neither loads nor stores."""
        self.scheduled(request, [Computed(request.num_prompt_tokens, PromptOutcome.REFUSED)])

    def load_failed(self, request_id: str) -> None:
        """What was loaded for this request is computed."""
        if (prompt := self._prompts.get(request_id)) is not None:
            prompt.failed = True

    def finished(self, request: Any) -> None:
        """Forget a request. Without a first token, vLLM does not count its prompt."""
        prompt = self._prompts.pop(request.request_id, None)
        if prompt is not None and request.prefill_stats is None:
            self._count(prompt)

    def take(self) -> dict[str, int]:
        """Tokens of the prompts that vLLM counted since the last call, by `PREFIX` and outcome."""
        for request_id, prompt in list(self._prompts.items()):
            if prompt.request.prefill_stats is None:
                del self._prompts[request_id]
                self._count(prompt)
        taken, self._counts = self._counts, Counter()
        return {f"{PREFIX}{outcome}": count for outcome, count in taken.items()}

    def take_records(self) -> list[PromptRecord]:
        """The same prompts one by one, as many as a message takes; newer ones are left out."""
        taken, self._records = self._records, []
        return taken

    def _count(self, prompt: _Prompt) -> None:
        tokens = _sorted(prompt)
        self._counts.update(tokens)
        if prompt.state is not None:
            self._tracer.prompt(prompt.state, tokens)
        if len(self._records) < PROMPTS_PER_MESSAGE_MAX:
            state = prompt.state
            seconds = (0.0, 0.0, 0.0) if state is None else state.seconds
            local, loaded = tokens.get(PromptOutcome.LOCAL, 0), _loaded(tokens)
            lookup_us, read_us, load_us = (int(each * 1e6) for each in seconds)
            saved = int(self._times.seconds(local, loaded) * 1e6) if loaded else 0
            name: str = prompt.request.request_id[:REQUEST_ID_CHARACTERS_MAX]
            if not name.isprintable():
                # A client may choose it, and the sidecar refuses a message with such a name.
                name = "".join(one if one.isprintable() else "?" for one in name)
            self._records.append(
                PromptRecord(name, tokens, *prompt.missed, lookup_us, read_us, load_us, saved)
            )


def _loaded(tokens: dict[PromptOutcome, int]) -> int:
    return tokens.get(PromptOutcome.HOST, 0) + tokens.get(PromptOutcome.STORE, 0)


def _sorted(prompt: _Prompt) -> dict[PromptOutcome, int]:
    stats, counts = prompt.prefill_stats, Counter[PromptOutcome]()
    local, external = stats.num_local_cached_tokens, stats.num_external_cached_tokens
    counts[PromptOutcome.LOCAL] += local
    if not prompt.loading:
        counts[PromptOutcome.OTHER] += external
    elif prompt.failed or prompt.state is None:
        counts[PromptOutcome.FAILED] += external
    else:
        from_store = min(prompt.state.hit_sources[1], external)
        counts[PromptOutcome.STORE] += from_store
        counts[PromptOutcome.HOST] += external - from_store
    begin, total = local + external, stats.num_prompt_tokens
    for end_tokens, reason in (*prompt.computed, Computed(total, PromptOutcome.TAIL)):
        end = min(end_tokens, total)
        if end > begin:
            counts[reason] += end - begin
            begin = end
    return dict(+counts)

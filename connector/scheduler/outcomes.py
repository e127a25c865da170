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
    RUNS_MAX,
    PromptOutcome,
    PromptRecord,
    TokenRun,
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
    """The first token of it that is computed."""
    reason: PromptOutcome | None = None


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
        runs = _sorted(prompt)
        tokens = _counted(runs)
        self._counts.update(tokens)
        if prompt.state is not None:
            self._tracer.prompt(prompt.state, tokens)
        if len(self._records) < PROMPTS_PER_MESSAGE_MAX:
            state = prompt.state
            seconds = (0.0, 0.0, 0.0) if state is None else state.seconds
            late = state.late if state is not None and PromptOutcome.LATE in tokens else (0.0, 0.0)
            local, loaded = tokens.get(PromptOutcome.LOCAL, 0), _loaded(tokens)
            lookup_us, read_us, load_us = (int(each * 1e6) for each in seconds)
            # What another engine computed for this very request is not saved. It counts there what
            # it loaded itself.
            handed = 0 if state is None else state.request_params.expects_tokens
            begin, end = max(local, handed), local + loaded
            saved = int(self._times.seconds(begin, end - begin) * 1e6) if begin < end else 0
            missed = prompt.missed
            name: str = prompt.request.request_id[:REQUEST_ID_CHARACTERS_MAX]
            if not name.isprintable():
                # A client may choose it, and the sidecar refuses a message with such a name.
                name = "".join(one if one.isprintable() else "?" for one in name)
            self._records.append(
                PromptRecord(
                    name,
                    tokens,
                    missed.key,
                    missed.token,
                    lookup_us,
                    read_us,
                    load_us,
                    saved,
                    missed_reason=missed.reason,
                    late_us=int(late[0] * 1e6),
                    late_limit_us=int(late[1] * 1e6),
                    runs=runs[:RUNS_MAX],
                )
            )


def _loaded(tokens: dict[PromptOutcome, int]) -> int:
    return tokens.get(PromptOutcome.HOST, 0) + tokens.get(PromptOutcome.STORE, 0)


def _sorted(prompt: _Prompt) -> list[TokenRun]:
    """The tokens of a prompt in their order."""
    stats, runs = prompt.prefill_stats, list[TokenRun]()
    loaded_end = stats.num_local_cached_tokens + stats.num_external_cached_tokens
    _extend(runs, stats.num_local_cached_tokens, PromptOutcome.LOCAL)
    if not prompt.loading:
        _extend(runs, loaded_end, PromptOutcome.OTHER)
    elif prompt.failed or prompt.state is None:
        _extend(runs, loaded_end, PromptOutcome.FAILED)
    else:
        for run in prompt.state.hit_runs:
            _extend(runs, min(run.end_tokens, loaded_end), run.outcome)
        _extend(runs, loaded_end, PromptOutcome.HOST)
    total = stats.num_prompt_tokens
    for end_tokens, reason in (*prompt.computed, Computed(total, PromptOutcome.TAIL)):
        _extend(runs, min(end_tokens, total), reason)
    return runs


def _extend(runs: list[TokenRun], end_tokens: int, outcome: PromptOutcome) -> None:
    """Have the runs reach `end_tokens`, if they do not yet."""
    if end_tokens <= (runs[-1].end_tokens if runs else 0):
        return
    if runs and runs[-1].outcome is outcome:
        runs.pop()
    runs.append(TokenRun(outcome, end_tokens))


def _counted(runs: Sequence[TokenRun]) -> dict[PromptOutcome, int]:
    counts, begin = Counter[PromptOutcome](), 0
    for run in runs:
        counts[run.outcome] += run.end_tokens - begin
        begin = run.end_tokens
    return dict(counts)

"""Speculative decoding, as far as the KV cache goes: whose drafts are cached, and what they add.

Drafts that are rejected need no care here: a token counts as computed once it is known, and the
slots of what was rejected are written again before anything behind them is. What matters is a
drafter with layers of its own. They are more layers of the engine's groups, so

* the drafter is part of the namespace;
* a drafter that reads the token behind a position (EAGLE, MTP) makes the KV of a block depend on
  that token, and so the key of a chunk names it (`keys.py`). vLLM itself drops the last block of
  a hit for the same reason;
* a step that is too long for the drafter leaves its layers as they were, so nothing that such a
  step computes is stored.

A drafter without layers (n-grams, suffixes, heads on hidden states) changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from connector.identity.weights import model_identity
from connector.options import samples_weights

if TYPE_CHECKING:
    from collections.abc import Iterable

WITHOUT_LAYERS: Final = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
READS_AHEAD: Final = ("eagle", "eagle3", "mtp")
WITH_LAYERS: Final = (*READS_AHEAD, "draft_model")


@dataclass(frozen=True, slots=True)
class Speculation:
    """How an engine drafts."""

    ahead_tokens: int = 0
    """Tokens behind a position that its KV depends on."""
    drafter: dict[str, Any] = field(default_factory=dict[str, Any])
    """What tells a drafter with layers in the KV cache from others, for the namespace."""
    sequence_tokens_max: int = 0
    """In a step with a longer sequence nothing is drafted, for no request; 0: no such limit."""
    draft_tokens: int = 0
    """Drafted at a time at most, by whatever drafts."""

    def leaves_out(self, sequences_tokens: Iterable[int]) -> bool:
        """Whether the drafter's layers stay unwritten in a step that ends at these tokens."""
        longest = max(sequences_tokens, default=0)
        return 0 < self.sequence_tokens_max < longest


NO_DRAFTS: Final = Speculation()


def speculation_unsupported_reason(vllm_config: Any) -> str:
    """Why an engine with these drafts cannot be cached safely, or nothing."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        return ""
    parallel = vllm_config.parallel_config
    method = str(speculative.method)
    if parallel.pipeline_parallel_size > 1:
        # There vLLM asks for this step's stores in the last stage only.
        return "speculative decoding over pipeline stages is not supported by this release"
    if method in WITHOUT_LAYERS:
        return ""
    if method not in WITH_LAYERS:
        return f"speculative decoding by {method!r} is not supported by this release"
    # Each leaves layers of the drafter unwritten, or written from tokens that were never known.
    for unsafe, name in (
        (speculative.parallel_drafting, "parallel_drafting"),
        (
            speculative.num_speculative_tokens_per_batch_size,
            "num_speculative_tokens_per_batch_size",
        ),
        (speculative.use_multi_module_mtp(), "MTP of several modules"),
        (speculative.use_gemma4_mtp(), "MTP of gemma 4"),
        (speculative.use_step3p5_mtp(), "MTP of step 3.5"),
    ):
        if unsafe:
            return f"speculative decoding with {name} is not supported by this release"
    tp_size = int(parallel.tensor_parallel_size)
    draft_tp_size = int(speculative.draft_parallel_config.tensor_parallel_size)
    if draft_tp_size != tp_size:
        return f"draft_tensor_parallel_size={draft_tp_size}: its ranks would hold copies of a head"
    heads = int(speculative.draft_model_config.get_total_num_kv_heads())
    if heads < tp_size and not speculative.draft_model_config.use_mla:
        return f"its drafter has {heads} KV heads for {tp_size} ranks, which would hold copies"
    return ""


def speculation_of(vllm_config: Any) -> Speculation:
    """How an engine that was not refused drafts.

    Raises:
        WeightsUnknown: nothing tells the drafter's weights from others.
        OSError: its files are there and cannot be read.
    """
    speculative = vllm_config.speculative_config
    if speculative is None:
        return NO_DRAFTS
    draft_tokens = int(speculative.num_speculative_tokens)
    if speculative.method in WITHOUT_LAYERS:
        return Speculation(draft_tokens=draft_tokens)
    model = speculative.draft_model_config
    load = speculative.draft_load_config or vllm_config.load_config
    drafter = {
        "method": str(speculative.method),
        "quantization": str(model.quantization),
        **model_identity(
            model.model,
            model.revision,
            model.hf_config,
            dummy=str(load.load_format) == "dummy",
            sampled=samples_weights(vllm_config),
            load_format=str(load.load_format),
        ),
    }
    lengths = (vllm_config.model_config.max_model_len, model.max_model_len)
    longest = min(int(length) for length in lengths if length)
    return Speculation(
        ahead_tokens=int(speculative.method in READS_AHEAD),
        drafter=drafter,
        # One less than vLLM itself takes: it is about a few tokens of the longest context.
        sequence_tokens_max=longest - draft_tokens - 1,
        draft_tokens=draft_tokens,
    )

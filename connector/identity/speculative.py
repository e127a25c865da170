"""Speculative decoding and the KV cache: which drafters are supported, and what they change.

Rejected drafts need no care here: a token counts as computed once it is accepted, and the slots of
rejected ones are written again before anything after them. What matters is a drafter with layers
of its own in the engine's KV cache groups:

* the drafter is part of the namespace;
* a drafter that reads the token after a position (EAGLE, MTP) makes the KV of a block depend on
  that token, so the key of a chunk covers it (`keys.py`). vLLM drops the last block of a hit for
  the same reason;
* in vLLM's first model runner, a step that is too long for the drafter does not write its layers,
  so nothing of it is stored. The second runs the drafter in each step.

A drafter without layers (n-grams, suffixes, heads on hidden states) changes nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from connector.identity.weights import model_identity
from connector.options import samples_weights

WITHOUT_LAYERS: Final = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
READS_AHEAD: Final = ("eagle", "eagle3", "mtp")
WITH_LAYERS: Final = (*READS_AHEAD, "draft_model")


@dataclass(frozen=True, slots=True)
class Speculation:
    """How an engine drafts tokens."""

    ahead_tokens: int = 0
    """Tokens after a position that its KV depends on."""
    drafter: dict[str, Any] = field(default_factory=dict[str, Any])
    """The identity of a drafter with layers in the KV cache, for the namespace; to be `completed`
    (`weights.py`)."""
    sequence_tokens_max: int = 0
    """A step with a longer sequence drafts nothing, for no request; 0: no limit."""
    draft_tokens: int = 0
    """At most this many at a time."""

    def leaves_out(self, sequences_tokens: Iterable[int]) -> bool:
        """Whether a step that ends at these tokens does not write the drafter's layers."""
        limit = self.sequence_tokens_max
        return limit > 0 and max(sequences_tokens, default=0) > limit


NO_DRAFTS: Final = Speculation()


def speculation_unsupported_reason(vllm_config: Any) -> str:
    """Why an engine with this drafter cannot be cached safely, or nothing."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        return ""
    parallel = vllm_config.parallel_config
    method = str(speculative.method)
    if parallel.pipeline_parallel_size > 1:
        # vLLM asks for this step's stores only in the last stage.
        return "speculative decoding over pipeline stages is not supported by this release"
    if method in WITHOUT_LAYERS:
        return ""
    if method not in WITH_LAYERS:
        return f"speculative decoding by {method!r} is not supported by this release"
    # Each leaves layers of the drafter unwritten, or writes them from tokens that are not known.
    for name, unsafe in {
        "parallel_drafting": speculative.parallel_drafting,
        "num_speculative_tokens_per_batch_size": speculative.num_speculative_tokens_per_batch_size,
        "MTP of several modules": speculative.use_multi_module_mtp(),
        "MTP of gemma 4": speculative.use_gemma4_mtp(),
        "MTP of step 3.5": speculative.use_step3p5_mtp(),
    }.items():
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
    """How a supported engine drafts. Raises as `model_identity` does, for the drafter."""
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
        **model_identity(model, str(load.load_format), sampled=samples_weights(vllm_config)),
    }
    # Its layers may be in one group with the model's, whose encoding does not tell of these.
    if speculative.kv_cache_dtype is not None:
        drafter["kv_cache_dtype"] = str(speculative.kv_cache_dtype)
    if speculative.attention_backend is not None:
        drafter["attention_backend"] = str(speculative.attention_backend.name)
    lengths = (vllm_config.model_config.max_model_len, model.max_model_len)
    # One less than vLLM's own limit, which costs a few tokens of the longest context.
    longest = min(int(length) for length in lengths if length) - draft_tokens - 1
    return Speculation(
        ahead_tokens=int(speculative.method in READS_AHEAD),
        drafter=drafter,
        sequence_tokens_max=0 if vllm_config.use_v2_model_runner else longest,
        draft_tokens=draft_tokens,
    )

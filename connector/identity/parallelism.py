"""Which part of a model's KV cache a rank holds: the layers of its pipeline stage, and its heads.

vLLM numbers ranks by stage first. It shows each stage its own layers, and the scheduler those of
the first stage. Which layers of the model these are is computed here and compared with their names,
because a layer taken for another would give wrong KV.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tiers.errors import LayoutError
from tiers.kv.layout import Segment, head_segment


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """How an engine divides its model: into stages of layers, and their heads over ranks."""

    stages: int
    tensors: int
    num_layers: int
    """Layers of the whole model, as vLLM divides them into stages."""

    @property
    def is_even(self) -> bool:
        """Whether all stages hold the same number of layers."""
        return len({len(self._layers(stage)) for stage in range(self.stages)}) == 1

    def this_rank(self) -> int:
        """The number of this process among the ranks of its engine."""
        from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

        stage = int(get_pp_group().rank_in_group)
        return stage * self.tensors + int(get_tensor_model_parallel_rank())

    def topology(self, replicas: int) -> str:
        """Its name, without ranks that hold copies. Engines with the same name share segments."""
        name = f"tp{self.tensors // replicas}"
        return f"pp{self.stages}{name}" if self.stages > 1 else name

    def segment(
        self, layer_names: Sequence[str], num_heads: int, rank: int, *, latent: bool = False
    ) -> Segment:
        """Layers and heads of a rank. Raises `LayoutError`.

        `latent` is MLA: one vector per token instead of heads, of which every rank has all.
        """
        stage, tensor = divmod(rank, self.tensors)
        first_layer = self._first_layer(layer_names, stage)
        if latent:
            return Segment(first_layer, len(layer_names), 0, 1)
        return head_segment(
            len(layer_names), num_heads, tensor, self.tensors, first_layer=first_layer
        )

    def first_rank_of(self, layer_names: Sequence[str]) -> int:
        """The first rank of the stage with these layers; 0 if no stage has them."""
        stages = (stage for stage in range(self.stages) if self._holds(layer_names, stage))
        return next(stages, 0) * self.tensors

    def _first_layer(self, layer_names: Sequence[str], stage: int) -> int:
        if self.stages == 1:
            return 0
        own = self._layers(stage)
        if not self._holds(layer_names, stage):
            raise LayoutError(
                f"stage {stage} of {self.stages} was expected to hold layers {own.start} to "
                f"{own.stop - 1} of the model, and holds {', '.join(layer_names) or 'none'}"
            )
        return own.start

    def _holds(self, layer_names: Sequence[str], stage: int) -> bool:
        numbers = [
            [int(part) for part in one.split(".") if part.isdecimal()] for one in layer_names
        ]
        return numbers == [[layer] for layer in self._layers(stage)]

    def _layers(self, stage: int) -> range:
        # Not at import: vLLM's front end imports this too, and needs no ranks.
        from vllm.distributed.utils import get_pp_indices

        return range(*get_pp_indices(self.num_layers, stage, self.stages))


def parallel_layout_of(vllm_config: Any) -> ParallelLayout:
    """How an engine divides its model over ranks."""
    parallel = vllm_config.parallel_config
    return ParallelLayout(
        stages=int(parallel.pipeline_parallel_size),
        tensors=int(parallel.tensor_parallel_size),
        num_layers=int(vllm_config.model_config.get_total_num_hidden_layers()),
    )

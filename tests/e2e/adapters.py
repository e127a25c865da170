"""LoRA adapters of the fixture `model`, with random weights that change every logit."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pathlib import Path

HIDDEN: Final = 256
LAYERS: Final = 6
RANK: Final = 8
ENGINE_ARGS: Final[dict[str, Any]] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}


def write_adapter(folder: Path, seed: int) -> None:
    """Write one to `folder`."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Any] = {}
    for layer in range(LAYERS):
        for part in ("q_proj", "k_proj", "v_proj"):
            name = f"base_model.model.model.layers.{layer}.self_attn.{part}"
            down = torch.randn(RANK, HIDDEN, generator=generator) * 0.1
            up = torch.randn(HIDDEN, RANK, generator=generator) * 0.1
            tensors[f"{name}.lora_A.weight"] = down.to(torch.bfloat16)
            tensors[f"{name}.lora_B.weight"] = up.to(torch.bfloat16)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["q_proj", "k_proj", "v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))

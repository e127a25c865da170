"""`kvlake demo`: the main job with a small model that is made on the spot."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def write_model(folder: Path) -> Path:
    """Save the demo's model in `folder`, for `vllm serve`; returns the folder."""
    from sidecar.demo import model

    return model.write_model(folder)


def main(*, json: bool = False) -> int:
    """Run the demo; with `json`, its measurements are the only output. Returns the exit code."""
    # The demo pulls in a model library and an engine; `kvlake --help` must not.
    from sidecar.demo.scenes import run

    return run(json=json)

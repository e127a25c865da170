"""Pipeline stages: each holds a range of layers, and a chunk is whole with those of all stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
import pytest

from sidecar.protocol import Outcome
from tests.sidecar.client import (
    HEADS,
    LAYERS,
    RunningSidecar,
    Scheduler,
    Worker,
    config_in,
    key_of,
    layout_of,
)
from tiers.catalog.names import parse_name
from tiers.kv.index import FLAG_HOST, FLAG_STORE
from tiers.kv.layout import KVLayout, Segment

if TYPE_CHECKING:
    from pathlib import Path

STAGES: Final = ((0, 2), (2, LAYERS - 2))
"""First layer and number of layers: vLLM need not cut them evenly."""
CUT: Final[dict[str, Any]] = {"world_size": len(STAGES), "topology": "pp2tp1"}


def stage_layout(stage: int) -> KVLayout:
    """The memory of a stage: its layers alone."""
    whole, (first, count) = layout_of(), STAGES[stage]
    return msgspec.structs.replace(
        whole,
        segment=Segment(first, count, 0, HEADS),
        layer_offsets_bytes=whole.layer_offsets_bytes[:count],
    )


@pytest.mark.promise("other-stages", "pipeline-parallel")
def test_a_chunk_is_whole_with_the_layers_of_all_stages(short_directory: Path) -> None:
    """In host memory; and from the store, for engines that are not cut at all, too."""
    bucket, keys = short_directory / "bucket", [key_of(str(number)) for number in range(4)]
    store = {"url": f"file://{bucket}", "refresh_seconds": 0.05, "recompute": "never"}
    (short_directory / "one").mkdir()
    (short_directory / "two").mkdir()
    with (
        RunningSidecar(config_in(short_directory / "one", store=store)) as running,
        Scheduler(running.path, **CUT) as scheduler,
        Worker(running.path, layout=stage_layout(0), rank=0, **CUT) as first,
        Worker(running.path, layout=stage_layout(1), rank=1, **CUT) as second,
    ):
        contents: list[list[bytes]] = []
        for stage, worker in enumerate((first, second)):
            assert not any(flags & FLAG_HOST for flags in scheduler.flags(*keys))
            contents.append(worker.fill(range(len(keys)), seed=stage))
            for number, name in enumerate(keys):
                assert worker.store(number, name, [number]) is Outcome.OK
        assert all(flags & FLAG_HOST for flags in scheduler.flags(*keys))
        for worker, content in zip((first, second), contents, strict=True):
            worker.poison()
            for number, name in enumerate(keys):
                assert worker.load(100 + number, name, [20 + number]) is Outcome.OK
                assert worker.read(20 + number) == content[number]
        running.wait_until(lambda status: status["counters"]["chunks_written"] == len(keys))
    names = [parse_name(str(path.relative_to(bucket))) for path in bucket.rglob("*.arrow")]
    assert len([name for name in names if name is not None]) == len(STAGES) * len(keys)
    with (
        RunningSidecar(config_in(short_directory / "two", store=store)) as running,
        Scheduler(running.path, topology="tp1") as scheduler,
        Worker(running.path, topology="tp1") as whole,
    ):
        running.wait_until(lambda _: all(f & FLAG_STORE for f in scheduler.flags(*keys)))
        assert scheduler.lookup(1, keys).ready == len(keys)
        for number, name in enumerate(keys):
            assert whole.load(100 + number, name, [number]) is Outcome.OK
            # Layers are the outermost axis of a payload.
            assert whole.read(number) == contents[0][number] + contents[1][number]

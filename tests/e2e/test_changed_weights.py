"""Weights that change under their name while an engine serves: an adapter's, and the model's own.

vLLM reads an adapter's files again when it gave the adapter up for another (`max_cpu_loras`), reads
those of `add_lora` before any request, and replaces a model's weights when it is told to.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from sidecar.demo.model import write_model
from tests.e2e import adapters
from tests.e2e.arms import Call, empty, fresh_salt, own_hit, whole_blocks, words
from tests.e2e.setups import SMALL, attached, sidecar_in
from tests.harness.engine import EngineProcess, EngineSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.harness.engine import Generation

pytestmark = [
    pytest.mark.engine,
    # What of it every change must keep is shown by `test_requests.py`, on an engine less.
    pytest.mark.nightly,
    pytest.mark.promise("connector", "suite-changed-weights"),
]

ENGINE_ARGS: Final[dict[str, Any]] = {**SMALL, **adapters.ENGINE_ARGS, "max_loras": 1}
"""With memory for one adapter: the next one pushes it out."""
PROMPT: Final = words(700, 1)
CACHED: Final = whole_blocks(len(PROMPT))


@pytest.fixture(scope="module")
def engine(folder: Path, model: str) -> Iterator[EngineProcess]:
    socket = sidecar_in(folder).socket
    with (
        EngineProcess(EngineSpec(model, socket, ENGINE_ARGS), folder / "engine.log") as engine,
        attached(folder, engine.wait_ready()),
    ):
        yield engine


class Adapter:
    """An adapter in a folder, under one number, whose files are replaced."""

    _numbers: int = 0

    def __init__(self, folder: Path, name: str, seed: int) -> None:
        Adapter._numbers += 1
        self.place = folder / name
        adapters.write_adapter(self.place, seed)
        self.known = (name, Adapter._numbers, str(self.place))

    def replace(self, seed: int) -> None:
        shutil.rmtree(self.place)
        adapters.write_adapter(self.place, seed)

    def generate(self, engine: EngineProcess, salt: str) -> Generation:
        """From nothing that the engine itself has."""
        empty(engine)
        return Call(PROMPT, options={"adapter": self.known}).generate(engine, salt)


@pytest.mark.promise("adapters")
def test_an_adapter_whose_files_are_replaced_while_another_is_in_memory(
    engine: EngineProcess, folder: Path
) -> None:
    one, other = Adapter(folder, "one", 1), Adapter(folder, "other", 2)
    salt = fresh_salt()
    first = one.generate(engine, salt)
    again = one.generate(engine, salt)
    assert (first.cached_tokens, again.cached_tokens) == (0, CACHED)
    one.replace(3)
    other.generate(engine, salt)
    replaced = one.generate(engine, salt)
    assert replaced.cached_tokens == 0
    expected = Adapter(folder, "third", 3).generate(engine, fresh_salt())
    assert replaced.logprobs == expected.logprobs
    # What it computed is stored under no name: neither that of the old files nor of the new.
    old, new = Adapter(folder, "old", 1), Adapter(folder, "new", 3)
    old.generate(engine, fresh_salt())
    assert old.generate(engine, salt).logprobs == again.logprobs
    new.generate(engine, fresh_salt())
    assert new.generate(engine, salt).cached_tokens == 0
    assert one.generate(engine, salt).logprobs == expected.logprobs


@pytest.mark.promise("adapters")
def test_an_adapter_that_was_loaded_before_its_files_were_replaced(
    engine: EngineProcess, folder: Path
) -> None:
    salt = fresh_salt()
    stored = Adapter(folder, "stored", 5)
    new = stored.generate(engine, salt)
    assert stored.generate(engine, salt).cached_tokens == CACHED
    early = Adapter(folder, "early", 6)
    empty(engine)
    engine.add_lora(early.known)
    early.replace(5)
    # vLLM has the old files; the new ones have chunks.
    generation = early.generate(engine, salt)
    assert generation.cached_tokens == 0
    expected = Adapter(folder, "unreplaced", 6).generate(engine, fresh_salt())
    assert generation.logprobs == expected.logprobs != new.logprobs
    # It is kept out for good: vLLM may read the new ones at any time.
    other = fresh_salt()
    early.generate(engine, other)
    assert stored.generate(engine, other).cached_tokens == 0


@pytest.mark.promise("weights-replaced")
def test_a_model_whose_weights_are_replaced(
    engine: EngineProcess, folder: Path, model: str
) -> None:
    """From then on the engine is by itself."""
    other = write_model(folder / "other-model", layers=6, hidden=256, heads=4, kv_heads=4, seed=9)
    call, salt = Call(PROMPT), fresh_salt()
    old = own_hit(engine, call, before=[call])
    before = call.generate(engine, salt)
    empty(engine)
    assert call.generate(engine, salt).cached_tokens == CACHED
    engine.rpc("reload_weights", weights_path=str(other))
    empty(engine)
    replaced = call.generate(engine, salt)
    assert replaced.cached_tokens == 0
    assert replaced.logprobs != before.logprobs
    empty(engine)
    assert call.generate(engine, salt).cached_tokens == CACHED
    fresh = fresh_salt()
    Call(words(700, 2)).generate(engine, fresh)
    empty(engine)
    # And none of that is of the old ones, should they come back.
    engine.rpc("reload_weights", weights_path=model)
    empty(engine)
    for prompt, under in ((PROMPT, salt), (words(700, 2), fresh)):
        generation = Call(prompt).generate(engine, under)
        assert generation.cached_tokens == 0
        if prompt is PROMPT:
            assert generation.logprobs == before.logprobs
    assert own_hit(engine, call, before=[call]).generation.logprobs == old.generation.logprobs


@pytest.mark.promise("weights-replaced")
def test_an_extension_of_the_worker_that_loads_weights(engine: EngineProcess) -> None:
    """The engine core does not know the call; the worker says so with the next step."""
    call, salt = Call(PROMPT), fresh_salt()
    call.generate(engine, salt)
    empty(engine)
    assert call.generate(engine, salt).cached_tokens == CACHED
    engine.rpc("kvlake_load_no_weights")
    # The first step after it is where the scheduler hears of it, and what it loads then fails.
    for _ in range(2):
        empty(engine)
        assert call.generate(engine, salt).cached_tokens == 0
    empty(engine)
    assert call.generate(engine, salt).cached_tokens == CACHED

"""The first start with a model in a folder: an engine serves while its weights are being read.

Another process reads them, as far as the engine can see: the test holds the lock of the cache of
digests. So the engine cannot identify its weights before the test lets it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.connector.locked_weights import LockedWeights
from tests.e2e.arms import Call, attach, empty, fresh_salt, own_hit, same_output, words
from tests.e2e.native import NativeEngine
from tests.e2e.setups import SMALL, sidecar_in
from tests.harness.engine import EngineProcess, EngineSpec

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.engine, pytest.mark.promise("weights-read")]


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(EngineProcess, marks=pytest.mark.promise("connector", "suite-first-start")),
        pytest.param(NativeEngine, marks=pytest.mark.promise("offloading", "suite-first-start")),
    ],
)
def test_an_engine_serves_while_its_weights_are_read(
    folder: Path, model: str, kind: type[EngineProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = LockedWeights(folder / kind.__name__, monkeypatch)
    log = folder / f"{kind.__name__}.log"
    call, salt = Call(words(700, 1)), fresh_salt()
    sidecar = sidecar_in(folder, name=kind.__name__)
    with sidecar, kind(EngineSpec(model, sidecar.socket, SMALL), log) as engine:
        engine.wait_ready()
        cold = call.generate(engine, salt)
        empty(engine)
        again = call.generate(engine, salt)
        assert (cold.cached_tokens, again.cached_tokens) == (0, 0)
        assert same_output(cold, again)
        assert not sidecar.status()["sessions"]
        locked.release()
        attach(engine, sidecar)
        own = own_hit(engine, call, before=[call]).generation
        empty(engine)
        assert call.generate(engine, salt).cached_tokens == 0, "nothing was stored before"
        empty(engine)
        hit = call.generate(engine, salt)
        assert hit.cached_tokens == own.cached_tokens > 0
        assert same_output(hit, own)

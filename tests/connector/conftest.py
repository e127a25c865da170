"""Engines for the tests, and vLLM imported once.

vLLM's own imports warn, and the house turns warnings into errors.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.connector.engine import Engine

# Before vLLM is imported: it sets up its logging then.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm.v1.attention.backends.cpu_attn
    import vllm.v1.core.sched.scheduler
    import vllm.v1.structured_output
    import vllm.v1.worker.utils  # noqa: F401


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache folder of this process.

    While another process has the lock of one, the digests of new weights are read in a thread.
    """
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder."""
    from tests.connector.configurations import write_model

    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def make(model: Path) -> Iterator[Callable[..., Engine]]:
    """Makes engines of this model, with options that it is given; they are closed at the end."""
    from tests.connector.engine import Engine

    engines: list[Engine] = []

    def engine_of(**options: Any) -> Engine:
        engines.append(Engine(model, **options))
        return engines[-1]

    yield engine_of
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(make: Callable[..., Engine]) -> Engine:
    """One engine."""
    return make()

"""The cases of `make gpu-test`, rehearsed on the double: that they are right when a GPU is there.

It proves nothing about a GPU. The same code runs, with small sizes and without torch's kernels.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.gpu.double.control import Double
from tests.gpu.real.cases import CASES, NOT_REHEARSED, told
from tests.gpu.real.world import Rehearsal, World

pytestmark = pytest.mark.promise("gpu-rehearsal")

pytest.importorskip("cuda.bindings.driver")


@pytest.fixture(scope="module")
def world(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    double = Double(library, tmp_path_factory.mktemp("rehearsal") / "control")
    with World(Rehearsal(double)) as made:
        yield made
    double.no_violations()


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_rehearsal_of_a_whole_engine_on_cpus(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    command = [sys.executable, "-m", "tests.gpu.real.whole_engine", "--rehearse"]
    command += ["--layouts", "llama", "--limit", "800", "--out", str(tmp_path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.parametrize(("kept", "least", "good"), [(2, 2, True), (1, 2, False), (0, 1, False)])
def test_a_hit_must_leave_its_blocks_in_the_memory_of_each_worker(
    kept: int, least: int, good: bool
) -> None:
    pytest.importorskip("vllm")
    from tests.e2e.arms import Measured
    from tests.gpu.real.whole_engine import Wrong, check_loaded
    from tests.harness.engine import Generation

    nothing = Generation([], [], 64, 0.0, 0.0, None)
    oracle = Measured(nothing, [Counter("abc"), Counter("abc")], "")
    found = Measured(nothing, [Counter("abc"), Counter("abc"[:kept] + "xyz")], "")
    with nullcontext() if good else pytest.raises(Wrong, match=f"{kept} blocks .* not {least}"):
        check_loaded("a hit", found, oracle, least)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case not in NOT_REHEARSED])
def test_rehearsal_on_the_double(case: str, world: World) -> None:
    assert told(case, world)

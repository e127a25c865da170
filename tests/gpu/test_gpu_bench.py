"""`make gpu-bench` rehearsed on the double, its table, and how both GPU targets refuse.

It proves nothing about a GPU: the rates that come out here are thrown away.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu.effort import SMALL
from benchmarks.gpu.figures import (
    BEGIN,
    END,
    NOT_YET,
    PAGE,
    RESULTS,
    Figure,
    Missing,
    put_into,
    section,
    verdict,
    write,
)
from benchmarks.gpu.parts import PARTS, Bench, asked_of, percentile
from benchmarks.gpu.run import measure
from tests import places
from tests.gpu.child import start
from tests.gpu.double.control import Double
from tests.gpu.real import run as gpu_test
from tests.gpu.real.preflight import Device
from tests.gpu.real.world import Rehearsal

pytestmark = pytest.mark.promise("gpu-rehearsal")

DEVICE = Device("NVIDIA Test 80GB", 80 << 30, 13000, "2.13.0+cu130", "13.0", "3.12.3", 16)


@pytest.mark.slow
def test_rehearsal_of_the_benchmarks_on_the_double(double: Double) -> None:
    pytest.importorskip("cuda.bindings.driver")
    place = Rehearsal(double)
    # A fork of the tests' warm server has vLLM.
    place.start = start
    with Bench(place, SMALL) as bench:
        figures, missing = measure(bench, PARTS, 500.0)
        assert missing == []
        assert len({one.part for one in figures}) == len(PARTS)
        assert all(math.isfinite(one.value) for one in figures)
        # What runs beside a GPU needs no vLLM.
        for child in (bench.worker, bench.copier):
            assert child.run("import sys; result = 'vllm' in sys.modules") is False


@pytest.mark.slow
def test_what_runs_beside_the_engines_needs_no_vllm_and_no_torch() -> None:
    code = (
        "import sys, benchmarks.gpu.run, benchmarks.gpu.parts, tests.gpu.real.cases,"
        " tests.gpu.real.run, sidecar.cli, sidecar.app\n"
        "print(*sorted({'torch', 'vllm', 'obstore', 's3fs', 'trustme'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=places.ROOT
    )
    assert done.stdout.strip() == ""


def test_what_a_rehearsal_measures_is_never_kept(tmp_path: Path) -> None:
    assert Rehearsal.real is False
    with pytest.raises(AssertionError, match="rehearsal"):
        write(tmp_path, DEVICE, [], [], real=False)
    assert list(tmp_path.iterdir()) == []


def test_a_figure_says_what_was_asked_and_whether_it_holds() -> None:
    assert Figure("p", "n", 0.96, "", at_least=0.95).verdict == "HOLDS"
    assert Figure("p", "n", 0.94, "", at_least=0.95).verdict == "FALLS SHORT"
    assert Figure("p", "n", 2.1, "%", at_most=2.0).verdict == "FALLS SHORT"
    assert Figure("p", "n", math.nan, "%", at_most=2.0).verdict == "FALLS SHORT"
    assert Figure("p", "n", 7.0, "GB/s").verdict == ""
    assert asked_of(64 << 10, to_device=True) == 0.75
    assert asked_of(64 << 10, to_device=False) == 0.85
    assert asked_of(16 << 10, to_device=False) is None
    assert percentile([float(n) for n in range(100)], 0.99) == 99.0


def test_the_page_shows_every_result_and_says_so_where_there_is_none(tmp_path: Path) -> None:
    page, results = tmp_path / "page.md", tmp_path / "results"
    results.mkdir()
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    put_into(page, results)
    assert page.read_text() == f"before\n{BEGIN}\n\n{NOT_YET}\n\n{END}\nafter\n"
    write(
        results,
        DEVICE,
        [Figure("copies alone", "64 KiB to host", 0.8, "of a plain copy", at_least=0.85)],
        [Missing("costs", "no time was left")],
        real=True,
    )
    found = {"fenced_stores": {"holds": False, "seconds": 1.0, "said": "", "reason": "3 torn"}}
    gpu_test.write(results, DEVICE, found)
    put_into(page, results)
    for said in (
        "NVIDIA Test 80GB",
        "| copies alone: 64 KiB to host | 0.80 of a plain copy | ≥ 0.85 | FALLS SHORT |",
        "| costs | not measured: no time was left | | |",
        "| fenced stores | 3 torn | FAILS |",
    ):
        assert said in page.read_text()
    assert "old" not in page.read_text()


def test_the_page_of_the_project_shows_what_its_results_say() -> None:
    _, _, rest = (places.ROOT / PAGE).read_text().partition(BEGIN)
    assert rest.partition(END)[0].strip() == section(places.ROOT / RESULTS)


def test_a_report_of_pytest_is_read_as_outcomes(tmp_path: Path) -> None:
    report = tmp_path / "tests.xml"
    report.write_text(
        '<testsuites><testsuite><testcase name="test_on_a_gpu[fenced_loads]" time="2.5">'
        '<properties><property name="said" value="0 torn"/></properties></testcase>'
        '<testcase name="test_on_a_gpu[killed_worker]" time="1">'
        '<failure message="its memory came back after [2.0] s">long</failure></testcase>'
        '<testcase name="test_on_a_gpu[separate_namespaces]" time="1">'
        '<skipped message="this user may not make namespaces">long</skipped></testcase>'
        "</testsuite></testsuites>"
    )
    found = gpu_test.outcomes(report)
    assert found["fenced_loads"] == {
        "holds": True, "skipped": False, "seconds": 2.5, "said": "0 torn", "reason": "",
    }  # fmt: skip
    assert [verdict(one) for one in found.values()] == ["HOLDS", "FAILS", "SKIPPED"]
    assert "came back" in found["killed_worker"]["reason"]


@pytest.mark.slow
@pytest.mark.parametrize("module", ["tests.gpu.real.run", "benchmarks.gpu.run"])
@pytest.mark.parametrize(
    ("why", "said"),
    [
        ("no driver", "no GPU that can be used"),
        ("no device", "no GPU that can be used"),
        ("mig", "a slice of a GPU (MIG)"),
        ("double", "is the double of libcuda"),
    ],
)
def test_both_refuse_where_they_cannot_run(
    double: Double, module: str, why: str, said: str
) -> None:
    pytest.importorskip("cuda.bindings.driver")
    double.page.num_devices = 0 if why == "no device" else 1
    if why == "mig":
        double.page.device_names[0].value = b"NVIDIA A100-SXM4-40GB MIG 1g.5gb"
    done = subprocess.run(
        [sys.executable, "-m", module],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""} if why == "no driver" else double.env(),
        cwd=places.ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "cannot run here" in done.stderr
    assert said in done.stderr
    assert done.stdout == ""


def test_a_name_makes_a_file_name() -> None:
    assert DEVICE.slug == "nvidia-test-80gb"
    assert replace(DEVICE, name="A/B  c").slug == "a-b-c"

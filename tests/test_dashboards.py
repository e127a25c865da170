"""Every panel of the dashboards gets data from a real Prometheus that scrapes a real sidecar."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import yaml

from sidecar.observe.metrics import COUNTERS, GAUGES, HISTOGRAMS, PREFIX, name_of
from sidecar.protocol.prompts import PromptOutcome, PromptRecord, Prompts
from tests import places, promtool
from tests.faulty_tier import FaultRates, Faulty
from tests.sidecar.client import (
    WAIT_SECONDS_MAX,
    RunningSidecar,
    Scheduler,
    Worker,
    config_in,
    key_of,
)

FOLDER: Final = places.ROOT / "deploy" / "grafana"
RECORDING: Final = places.ROOT / "deploy" / "prometheus" / "kvlake.recording.yaml"
SCRAPE_SECONDS: Final = 1
BUILT_IN: Final = re.compile(r"^process_\w+$")
NAME: Final = re.compile(r"\b(?:kvlake|process)[\w:]+")


def dashboards() -> Any:
    spec = importlib.util.spec_from_file_location("dashboards", FOLDER / "dashboards.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def panels() -> list[tuple[str, str, str]]:
    """Dashboard, panel and query, as Grafana reads them."""
    return [
        (path.stem, panel["title"], target["expr"])
        for path in sorted(FOLDER.glob("*.json"))
        for panel in json.loads(path.read_text())["panels"]
        for target in panel["targets"]
    ]


def test_the_files_are_as_generated() -> None:
    module = dashboards()
    assert {path.stem for path in FOLDER.glob("*.json")} == set(module.DASHBOARDS)
    for name in module.DASHBOARDS:
        assert (FOLDER / f"{name}.json").read_text() == module.as_text(name), (
            "run: python deploy/grafana/dashboards.py"
        )


def test_savings_may_be_below_zero_and_nothing_else() -> None:
    """A cache that costs time must not look like one that saves none."""
    drawn = [
        (panel["title"], panel["fieldConfig"]["defaults"].get("min"))
        for path in FOLDER.glob("*.json")
        for panel in json.loads(path.read_text())["panels"]
    ]
    assert sorted(title for title, lowest in drawn if lowest != 0) == [
        "GPU seconds saved and spent per second",
        "GPU seconds saved per second",
    ]
    nets = [query for _, title, query in panels() if "saved" in title and " - " in query]
    recorded = [query for _, _, query in panels() if "kvlake:gpu_seconds_saved" in query]
    assert (len(nets), len(recorded)) == (1, 1)


def test_parts_are_not_called_chunks() -> None:
    """Each rank of an engine loads its part of a chunk, and is counted."""
    assert COUNTERS["chunks_loaded"].startswith("Parts of chunks")
    legends = {
        query["legendFormat"]
        for path in FOLDER.glob("*.json")
        for panel in json.loads(path.read_text())["panels"]
        for query in panel["targets"]
        if "kvlake_chunks_loaded_total" in query["expr"]
    }
    assert legends == {"loaded (parts)"}


def test_all_stores_that_did_not_happen_are_drawn() -> None:
    """Those that the default policy refuses were left out."""
    (title,) = {title for _, title, query in panels() if "kvlake_stores_expired_total" in query}
    drawn = {name for _, one, query in panels() if one == title for name in NAME.findall(query)}
    # The first is in host memory already; the second says nothing that operators do not know.
    apart = {"stores_duplicate", "stores_dropped_draining"}
    counted = {name for name in COUNTERS if name.startswith("stores_")} - apart
    assert drawn == {f"{PREFIX}{name}_total" for name in counted}


def test_every_metric_is_known() -> None:
    endings = (
        (GAUGES, ("",)),
        (COUNTERS, ("_total",)),
        (HISTOGRAMS, ("_bucket", "_sum", "_count")),
    )
    known = {
        PREFIX + name_of(row)[0] + ending
        for table, names in endings
        for row in table
        for ending in names
    }
    (group,) = yaml.safe_load(RECORDING.read_text())["groups"]
    known |= {rule["record"] for rule in group["rules"]}
    queries = [query for _, _, query in panels()] + [rule["expr"] for rule in group["rules"]]
    asked = {name for query in queries for name in NAME.findall(query)}
    unknown = {name for name in asked - known if not BUILT_IN.match(name)}
    assert not unknown


def test_processes_are_sidecars() -> None:
    """By default all nodes are chosen, and so were all programs that Prometheus scrapes."""
    asked = [query for _, _, query in panels() if "process_" in query]
    assert asked
    assert [query for query in asked if " and on (job, instance) kvlake_info" not in query] == []


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[str]:
    """A real one that scrapes the target, with the recording rules; yields its address."""
    program = promtool.find("prometheus")
    assert program is not None, promtool.REMEDY
    # As fast as the test: an operator's Prometheus records every half minute.
    rules = RECORDING.read_text().replace("interval: 30s", f"interval: {SCRAPE_SECONDS}s")
    rules = rules.replace("[5m]", "[5s]")
    (folder / "rules.yaml").write_text(rules)
    (folder / "prometheus.yaml").write_text(
        f"""
global: {{scrape_interval: {SCRAPE_SECONDS}s, evaluation_interval: {SCRAPE_SECONDS}s}}
rule_files: [rules.yaml]
scrape_configs:
  - {{job_name: kvlake, static_configs: [{{targets: ["{target}"]}}]}}
"""
    )
    command = [
        *(str(program), f"--config.file={folder}/prometheus.yaml"),
        *(f"--storage.tsdb.path={folder}/data", "--web.listen-address=127.0.0.1:0"),
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield f"http://{_listening_on(folder / 'log')}"
    finally:
        process.terminate()
        process.wait(WAIT_SECONDS_MAX)


def _listening_on(log: Path) -> str:
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while (found := re.search(r"Listening on.*address=(\S+)", log.read_text())) is None:
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    return found[1]


def answer(address: str, query: str) -> list[dict[str, Any]]:
    """Series that a query gives now."""
    query = query.replace("$__rate_interval", "5s").replace("$node", ".*")
    url = f"{address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    with urllib.request.urlopen(url, timeout=WAIT_SECONDS_MAX) as answered:
        series: list[dict[str, Any]] = json.loads(answered.read())["data"]["result"]
        return series


def test_every_query_has_data(short_directory: Path, tmp_path: Path) -> None:
    store = {
        "url": f"file://{short_directory}/bucket",
        "refresh_seconds": 0.2,
        "breaker": {"failures_max": 1000},
    }
    config = config_in(short_directory, store=store)
    faulty = lambda tier: Faulty(tier, seed=1, rates=FaultRates(unavailable=0.3))  # noqa: E731
    lacking = panels()
    with (
        RunningSidecar(config, wrap_store=faulty) as sidecar,
        Scheduler(sidecar.path) as scheduler,
        Worker(sidecar.path) as worker,
        prometheus(tmp_path, sidecar.info.http_url.partition("://")[2]) as address,
    ):
        worker.fill(range(4), seed=1)
        deadline, number = time.monotonic() + WAIT_SECONDS_MAX, 0
        while lacking and time.monotonic() < deadline:
            number += 1
            use(scheduler, worker, number)
            time.sleep(0.1)
            if number % 10 == 0:
                with suppress(OSError):
                    lacking = [one for one in lacking if not answer(address, one[2])]
        assert lacking == [], (tmp_path / "log").read_text()[-2000:]


def use(scheduler: Scheduler, worker: Worker, number: int) -> None:
    """One more chunk is stored, loaded, and reported."""
    key = key_of("prompt", number)
    worker.store(2 * number, key, range(4))
    scheduler.lookup(number, [key])
    scheduler.lease(2 * number + 1, [key])
    worker.load(2 * number + 1, key, range(4))
    tokens = {PromptOutcome.HOST: 64, PromptOutcome.NEW: 64, PromptOutcome.TAIL: 1}
    record = PromptRecord(f"request-{number}", tokens, load_us=1000, saved_us=50_000)
    scheduler.send(Prompts(scheduler.epoch, [record]))

"""The alarms of deploy/prometheus: each fires and clears, as Prometheus itself reckons.

`promtool` (`tests/promtool.py`) runs them over series that are written down here. That the names
and labels in them, and in the rules, are those that kvlake exports is taken from real expositions:
of a sidecar's /metrics, and of the connector's metrics as vLLM registers them.
"""

from __future__ import annotations

import re
import subprocess
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import pytest
import yaml
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from sidecar.protocol.prompts import Prompts
from sidecar.service.watchdog import PROBLEMS
from tests import places, promtool
from tests.sidecar.client import (
    RefusedError,
    RunningSidecar,
    Scheduler,
    Worker,
    config_in,
    key_of,
)
from tests.sidecar.prompt_records import RECORDS

RULES: Final = places.ROOT / "deploy" / "prometheus" / "kvlake.rules.yaml"
PAGE: Final = "alarms.md"
TARGET: Final = {"job": "kvlake-nodes", "instance": "n1:9400"}
"""What Prometheus adds to each series of a sidecar."""
ENGINE: Final = {"job": "vllm", "instance": "n1:8000", "model_name": "m", "engine": "0"}


def rules() -> dict[str, dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    found: dict[str, dict[str, Any]] = {rule["alert"]: rule for rule in group["rules"]}
    assert len(found) == len(group["rules"]), "names are given once"
    return found


def run(*arguments: str, stdin: bytes = b"") -> str:
    """What promtool has to say; it must find nothing wrong."""
    program = promtool.find()
    assert program is not None, promtool.REMEDY
    done = subprocess.run([program, *arguments], input=stdin, capture_output=True)
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, said
    return said


# --- each fires and clears -----------------------------------------------------------------------


class Series(NamedTuple):
    """One series, with a value a minute in promtool's notation; `name` without its target."""

    name: str
    values: str
    target: Mapping[str, str] = TARGET

    @property
    def metric(self) -> str:
        return self.name.partition("{")[0]

    @property
    def labels(self) -> dict[str, str]:
        return dict(re.findall(r'(\w+)="([^"]*)"', self.name))

    def told(self) -> dict[str, str]:
        labels = {**self.labels, **self.target}
        inside = ",".join(f'{name}="{value}"' for name, value in labels.items())
        return {"series": f"{self.metric}{{{inside}}}", "values": self.values}


@dataclass(frozen=True)
class Case:
    """An alarm is off at the start, on after `on` minutes and off again after `off`."""

    alert: str
    series: tuple[Series, ...]
    on: int
    off: int
    labels: dict[str, str] = field(default_factory=lambda: dict(TARGET))
    """Labels of the alarm, except its severity."""


def gauge(alert: str, name: str, on: int, *, good: int = 0, bad: int = 1) -> Case:
    """A figure that is bad from the fifth minute on, for half an hour."""
    series = Series(name, f"{good}x4 {bad}x30 {good}x30")
    return Case(alert, (series,), 5 + on, 37, {**series.labels, **TARGET})


def jump(alert: str, name: str, off: int, *, by: int = 1) -> Case:
    """A counter that grows once, in the fifth minute."""
    return Case(alert, (Series(name, f"0x4 {by}x120"),), 6, 5 + off)


def growth(alert: str, on: int, off: int, *names: str) -> Case:
    """Counters that grow for an hour from the fifth minute on, and rest for another."""
    values = "0x4 1+1x60 61x60"
    return Case(alert, tuple(Series(name, values) for name in names), 5 + on, 65 + off)


def blink(alert: str, name: str, values: str, off: int) -> Case:
    """A figure that is bad from the fifth minute on; one sample is enough."""
    series = Series(name, values)
    return Case(alert, (series,), 5, off, {**series.labels, **TARGET})


def burst(
    alert: str,
    name: str,
    values: str,
    target: Mapping[str, str] = TARGET,
    *,
    also: str | None = None,
) -> Case:
    """A figure of short trouble from the fifth minute on, perhaps beside another one at rest."""
    series = Series(name, values, target)
    rest = () if also is None else (Series(also, "0x70", target),)
    return Case(alert, (series, *rest), 5, 60)


BURST: Final = "0x4 10 20x60"
"""A counter that grows for a minute."""
UP: Final = 'kvlake_info{version="1"}'
READS_PAUSED: Final = 'kvlake_store_paused{way="read"}'
PAUSED: Final = {"way": "read", **TARGET}
COPIES: Final = 'kvlake_problem{code="copies"}'
RESTARTS: Final = (
    Series("kvlake_start_time_seconds", "100x4 stale 300 stale 420 stale 540x60"),
    Series(UP, "1x4 stale 1 stale 1 stale 1x60"),
    Series("up", "1x4 0 1 0 1 0 1x60"),
    Series("kvlake_ready", "1x4 stale 0 stale 0 stale 1x60"),
)
"""It runs for a minute at a time. Prometheus marks the series of a failed scrape as stale."""
TOKENS: Final = "kvlake_prompt_tokens_total"
EVICTED: Final = f'{TOKENS}{{model_name="m",outcome="computed",reason="evicted"}}'
FROM_HOST: Final = f'{TOKENS}{{model_name="m",outcome="host",reason=""}}'
CASES: Final = (
    Case("KvlakeSidecarDown", (Series("up", "1x4 0x30 1x30"), Series(UP, "1x4 _x30 1x30")), 11, 37),
    # Another job: its earlier metrics show that it is a sidecar.
    Case(
        "KvlakeSidecarDown",
        (
            Series("up", "1x4 0x30 1x30", {"job": "nodes", "instance": "n1"}),
            Series(UP, "1x4 _x30 1x30", {"job": "nodes", "instance": "n1"}),
            Series("up", "0x90", {"job": "mail", "instance": "n1"}),
        ),
        12,
        37,
        {"job": "nodes", "instance": "n1"},
    ),
    # One that was never there, beside one that is.
    Case("KvlakeSidecarDown", (Series("up", "0x30 1x30"), Series(UP, "1x90", {"job": "b"})), 6, 33),
    # Its target is gone, too, and nobody else is there.
    Case("KvlakeSidecarDown", (Series(UP, "1x4 _x30 1x30"),), 15, 37, {}),
    gauge("KvlakeNotReady", "kvlake_ready", 3, good=1, bad=0),
    Case(
        "KvlakeNotReady",
        (Series("kvlake_ready", "1x4 0x30 1x30"), Series("kvlake_draining", "0x64")),
        8,
        37,
    ),
    blink("KvlakeCopiesStuck", COPIES, "0x4 1x30 0x30", 42),
    # systemd restarts the sidecar before the next sample.
    blink("KvlakeCopiesStuck", COPIES, "0x4 1 _ 0x60", 12),
    Case("KvlakeRestarts", RESTARTS, 10, 40),
    jump("KvlakeHostMemoryDamaged", "kvlake_quarantined_host_total", 61),
    gauge("KvlakeEngineUncached", 'kvlake_engines_uncached{reason="chunk_tokens"}', 6, bad=2),
    gauge("KvlakeEngineUncached", 'kvlake_problem{code="ranks"}', 6),
    Case(
        "KvlakeRequestsUncached",
        (Series("vllm:kvlake_requests_uncached_total", "0x4 1+5x20 101x30", ENGINE),),
        12,
        33,
        dict(ENGINE),
    ),
    jump("KvlakeObjectsDamaged", "kvlake_quarantined_store_total", 61),
    gauge("KvlakeStoreUnwell", "kvlake_store_well", 6, good=1, bad=0),
    Case("KvlakeStorePaused", (Series(READS_PAUSED, "0x4 1x30 0x30"),), 21, 42, PAUSED),
    # Few requests come, and each one finds the store away.
    Case(
        "KvlakeStorePaused",
        (Series(READS_PAUSED, f"0x4 {'1 0 0 0 ' * 8} 0x30"),),
        21,
        42,
        PAUSED,
    ),
    gauge("KvlakePoolFileGone", 'kvlake_problem{code="pool"}', 2),
    jump("KvlakeSocketRemoved", "kvlake_sockets_renewed_total", 61),
    jump("KvlakeSocketRemoved", "kvlake_locks_renewed_total", 61),
    Case("KvlakeLoopLate", (Series("kvlake_loop_lag_seconds", "0x4 0.5x30 0x30"),), 11, 41),
    # Either of the two does, with the other at rest or not there.
    Case(
        "KvlakeStrangers",
        (
            Series('kvlake_attaches_refused_total{code="user"}', "0x4 1x60"),
            Series('kvlake_http_refused_total{why="token"}', "0x64"),
        ),
        6,
        21,
    ),
    jump("KvlakeStrangers", 'kvlake_http_refused_total{why="token"}', 16),
    jump("KvlakeHandshakesRefused", 'kvlake_handshakes_refused_total{why="user"}', 16),
    jump("KvlakeAttachesRefused", 'kvlake_attaches_refused_total{code="pool"}', 16, by=20),
    Case(
        "KvlakeThrashing",
        (
            Series("kvlake_chunks_evicted_total", "0+10x120 1200x120"),
            Series(EVICTED, "0+500x120 60000x120"),
            Series(FROM_HOST, "0+400x240"),
        ),
        75,
        195,
    ),
    # Engines that use vLLM's own offloading report no prompts.
    Case(
        "KvlakeThrashing",
        (
            Series("kvlake_chunks_evicted_total", "0+10x120 1200x120"),
            Series("kvlake_chunks_loaded_total", "0x240"),
        ),
        75,
        195,
    ),
    growth("KvlakeWritesDropped", 32, 16, "kvlake_writes_dropped_total"),
    Case(
        "KvlakeDrainLoss",
        (
            Series("kvlake_last_stop_objects_lost", "0x4 7x90"),
            Series("kvlake_start_time_seconds", "0x4 300x90"),
        ),
        6,
        66,
    ),
    growth("KvlakeRefused", 17, 16, 'kvlake_refused_total{what="load",why="copies"}'),
    growth("KvlakeRevoked", 17, 16, "kvlake_loads_revoked_total", "kvlake_stores_revoked_total"),
)
QUIET: Final = (
    # As many are loaded as are evicted.
    Case(
        "KvlakeThrashing",
        (
            Series("kvlake_chunks_evicted_total", "0+10x120"),
            Series(EVICTED, "0+500x120"),
            Series(FROM_HOST, "0+600x120"),
        ),
        75,
        110,
    ),
    # What the loss of an earlier life was is no news after an hour of this one.
    Case(
        "KvlakeDrainLoss",
        (
            Series("kvlake_last_stop_objects_lost", "0x120"),
            Series("kvlake_start_time_seconds", "0x120"),
        ),
        10,
        110,
    ),
    # Each life and each gap is too short for these.
    Case("KvlakeSidecarDown", RESTARTS, 10, 40),
    Case("KvlakeNotReady", RESTARTS, 10, 40),
    # Trouble that is over before the time that the page states.
    burst("KvlakeStorePaused", READS_PAUSED, "0x4 1x8 0x60"),
    burst("KvlakeLoopLate", "kvlake_loop_lag_seconds", "0x4 0.5x1 0x60"),
    burst("KvlakeRequestsUncached", "vllm:kvlake_requests_uncached_total", BURST, ENGINE),
    burst("KvlakeRefused", 'kvlake_refused_total{what="load",why="copies"}', BURST),
    burst("KvlakeRevoked", "kvlake_loads_revoked_total", BURST, also="kvlake_stores_revoked_total"),
    burst("KvlakeWritesDropped", "kvlake_writes_dropped_total", "0x4 1+1x20 21x60"),
    # It writes what is left, for up to limits.drain_seconds_max.
    Case(
        "KvlakeNotReady",
        (Series("kvlake_ready", "1x4 0x30"), Series("kvlake_draining", "0x4 1x30")),
        8,
        34,
    ),
    # A new configuration, and one that corrects it.
    Case("KvlakeRestarts", (Series("kvlake_start_time_seconds", "100x4 _ 300x9 900x60"),), 20, 40),
    # Users who are not served are no engines.
    jump("KvlakeAttachesRefused", 'kvlake_attaches_refused_total{code="user"}', 16, by=20),
    # The page is opened.
    jump("KvlakeStrangers", 'kvlake_http_refused_total{why="no_token"}', 16),
)
"""No alarm until `off`."""


def expected_annotations(rule: dict[str, Any], labels: dict[str, str]) -> dict[str, str]:
    """What a rule says of an alarm with these labels."""

    def value(match: re.Match[str]) -> str:
        return labels.get(match[1], "")

    pattern = re.compile(r"\{\{ \$labels\.(\w+) \}\}")
    told = {name: pattern.sub(value, text) for name, text in rule["annotations"].items()}
    assert not any("{{" in text for text in told.values()), "what else it asks for is not known"
    return told


def unit_test(case: Case, rule: dict[str, Any], *, fires: bool) -> dict[str, Any]:
    fired = {
        "exp_labels": {**case.labels, **rule["labels"]},
        "exp_annotations": expected_annotations(rule, case.labels),
    }
    minutes = (1, case.on, case.off) if fires else range(1, case.off + 1)
    expected = {minute: [fired] if fires and minute == case.on else [] for minute in minutes}
    return {
        "interval": "1m",
        "input_series": [series.told() for series in case.series],
        "alert_rule_test": [
            {"eval_time": f"{minute}m", "alertname": case.alert, "exp_alerts": alerts}
            for minute, alerts in expected.items()
        ],
    }


@pytest.mark.promise("alarms")
def test_each_alarm_fires_and_clears(tmp_path: Path) -> None:
    known = rules()
    assert {case.alert for case in CASES} == set(known), "each has a case"
    tests = [unit_test(case, known[case.alert], fires=True) for case in CASES]
    tests += [unit_test(case, known[case.alert], fires=False) for case in QUIET]
    file = tmp_path / "tests.yaml"
    document = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}
    file.write_text(yaml.safe_dump(document))
    assert "SUCCESS" in run("test", "rules", str(file))


def test_prometheus_takes_the_rules() -> None:
    assert f"{len(rules())} rules found" in run("check", "rules", str(RULES))


# --- names and labels ----------------------------------------------------------------------------


class Exported(NamedTuple):
    """All series of one name: their labels, and each one's values."""

    names: set[str]
    values: list[dict[str, str]]


def exported_by(text: str) -> dict[str, Exported]:
    found: dict[str, Exported] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            one = found.setdefault(sample.name, Exported(set(sample.labels), []))
            assert one.names == set(sample.labels), sample.name
            one.values.append(dict(sample.labels))
    return found


@pytest.fixture(scope="module")
def sidecars_exposition(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Metrics of a sidecar with every feature that has some, after a refusal of each kind."""
    folder = tmp_path_factory.mktemp("alarms")
    config = config_in(
        folder,
        store={"url": f"file://{folder}/bucket"},
        events={"enabled": True},
        limits={"jobs_inflight_max": 1},
    )
    with (
        RunningSidecar(config) as sidecar,
        Worker(sidecar.path) as worker,
        Scheduler(sidecar.path) as scheduler,
    ):
        assert worker.store(1, key_of(1), [0]).name == "OK"
        with pytest.raises(RefusedError):
            Worker(sidecar.path, engine_id="large", blocks_per_chunk=4096)
        for number in (2, 3):
            scheduler.lease(number, [key_of(1)])
        scheduler.send(Prompts(scheduler.epoch, RECORDS))
        sidecar.wait_until(lambda now: "lease/client" in now["refused"])
        sidecar.wait_until(lambda now: now["prompts"]["prompts"])
        return sidecar.get("/metrics").decode()


@pytest.fixture(scope="module")
def connectors_exposition() -> str:
    """Metrics of the connector, as vLLM has it register them."""
    with warnings.catch_warnings():
        # vLLM's own imports warn.
        warnings.simplefilter("ignore")
        from connector.metrics import KVLakePromMetrics
    registry = CollectorRegistry()

    def counter(**options: Any) -> Counter:
        return Counter(**options, registry=registry)

    config: Any = msgspec.defstruct("Config", [("kv_transfer_config", object, None)])()
    kinds: Any = {Counter: counter, Gauge: Gauge, Histogram: Histogram}
    metrics = KVLakePromMetrics(config, kinds, ["model_name", "engine"], {0: ["m", "0"]})
    metrics.observe({"requests_uncached": 2}, 0)
    return generate_latest(registry).decode()


@pytest.fixture(scope="module")
def exported(sidecars_exposition: str, connectors_exposition: str) -> dict[str, Exported]:
    found = exported_by(sidecars_exposition) | exported_by(connectors_exposition)
    return found | {"up": Exported(set(), [{}])}


SELECTOR: Final = re.compile(r"\b((?:vllm:)?kvlake_\w+|up)\b(?:\{([^}]*)\})?")
MATCHER: Final = re.compile(r'(\w+)\s*(=~|!=|!~|=)\s*"([^"]*)"')
GROUPING: Final = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")
TARGET_LABELS: Final = {"job", "instance"}


def selects(labels: dict[str, str], name: str, how: str, value: str) -> bool:
    if name in TARGET_LABELS:
        return True
    equal = re.fullmatch(value, labels[name]) if "~" in how else labels[name] == value
    return bool(equal) != how.startswith("!")


@pytest.mark.promise("alarms")
@pytest.mark.parametrize("alert", rules())
def test_a_rule_selects_series_that_there_are(alert: str, exported: dict[str, Exported]) -> None:
    expression = rules()[alert]["expr"]
    labels = set(TARGET_LABELS)
    found = SELECTOR.findall(expression)
    assert found
    for name, inside in found:
        assert name in exported, name
        labels |= exported[name].names
        matchers = MATCHER.findall(inside)
        for label, _, _ in matchers:
            assert label in exported[name].names | TARGET_LABELS, f"{name} has no label {label}"
        assert any(
            all(selects(series, *matcher) for matcher in matchers)
            for series in exported[name].values
        ), f"nothing is {name}{{{inside}}}"
    for inside in GROUPING.findall(expression):
        for label in filter(None, re.split(r"[\s,]+", inside)):
            assert label in labels, f"{alert} groups by {label}"


def test_the_cases_have_series_as_they_are_exported(exported: dict[str, Exported]) -> None:
    for case in CASES + QUIET:
        for series in case.series:
            assert series.metric in exported, series
            names = exported[series.metric].names
            assert set(series.labels) | (set(series.target) & names) == names, series


def test_prometheus_finds_no_fault_with_the_metrics(sidecars_exposition: str) -> None:
    run("check", "metrics", stdin=sidecars_exposition.encode())


# --- what an operator reads ----------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """Anchors of all headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one).strip().lower().replace(" ", "-") for one in headings}


def test_each_alarm_has_a_place_in_the_runbook() -> None:
    found = anchors(places.page(PAGE).read_text())
    for alert, rule in rules().items():
        place, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert places.ROOT / place == places.page(PAGE)
        assert anchor == alert.lower()
        assert anchor in found, f"{PAGE} has no heading for {alert}"
        assert rule["labels"]["severity"] in ("page", "warn")
        assert rule["annotations"]["summary"]


def test_the_docs_explain_every_problem() -> None:
    text = places.page("monitor.md").read_text()
    for code in PROBLEMS:
        assert f"`{code}`" in text, code

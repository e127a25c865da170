"""The table of metrics: every count has a row, every row is exported, no two texts are alike."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sidecar.catalog.garbage_collector import Collected
from sidecar.core.commands import Counters
from sidecar.core.tenants import TenantCounters
from sidecar.observe.metrics import COUNTERS, GAUGES, HISTOGRAMS, PREFIX, name_of
from sidecar.service.dispatcher import SocketStats
from tests import metrics_page, places
from tests.sidecar.client import RunningSidecar
from tests.sidecar.configurations import with_events
from tiers.catalog.manifest import Counts

TABLE = GAUGES | COUNTERS | HISTOGRAMS


def names(table: dict[str, str]) -> dict[str, set[str]]:
    """The labels of each metric of a table."""
    return {name: set(labels) for name, labels in map(name_of, table)}


@pytest.mark.parametrize(
    ("prefix", "counts"),
    [
        ("", Counters),
        ("", SocketStats),
        ("tenant_", TenantCounters),
        ("catalog_", Counts),
        ("collection_", Collected),
    ],
)
def test_every_counted_field_is_a_counter(prefix: str, counts: Any) -> None:
    assert {prefix + field.name for field in dataclasses.fields(counts)} <= names(COUNTERS).keys()


def test_no_two_help_texts_are_alike() -> None:
    assert len(names(TABLE)) == len(TABLE) == len(set(TABLE.values()))
    for row, text in TABLE.items():
        assert text.lower() != row.partition("{")[0].replace("_", " "), "it only repeats the name"


def test_settings_in_help_texts_exist() -> None:
    """Those with a section: `limits.load_deadline`, `integrity.verify_loads`, ..."""
    configs = [places.ROOT / "configs" / name for name in ("default.yaml", "s3.yaml")]
    text = "\n".join(path.read_text() for path in configs)
    for sentence in TABLE.values():
        for section, name in re.findall(r"\b(limits|integrity|store)\.([a-z_]+)", sentence):
            assert re.search(rf"^#?\s+#?\s*{name}:", text, re.MULTILINE), f"{section}.{name}"


def test_every_row_is_exported_with_its_type_and_labels(short_directory: Path) -> None:
    store = {"url": f"file://{short_directory}/store"}
    with RunningSidecar(with_events(short_directory, store=store)) as sidecar:
        text = sidecar.get("/metrics").decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    exported = {
        name.removeprefix(PREFIX): family
        for name, family in families.items()
        if name.startswith(PREFIX)
    }
    assert exported.keys() == names(TABLE).keys()
    kinds = {"gauge": GAUGES, "counter": COUNTERS, "histogram": HISTOGRAMS}
    for kind, table in kinds.items():
        for name, labels in names(table).items():
            assert exported[name].type == kind
            for sample in exported[name].samples:
                assert sample.labels.keys() - {"le"} == labels, name
                # A family has one unit.
                assert not any(
                    value.endswith(("bytes", "seconds")) for value in sample.labels.values()
                )
    others = families.keys() - {PREFIX + name for name in exported}
    assert others >= {"process_cpu_seconds", "process_resident_memory_bytes", "process_open_fds"}
    assert all(name.startswith("process_") for name in others)


def test_the_page_of_all_metrics_is_as_the_code_has_it() -> None:
    assert metrics_page.PAGE.read_text() == metrics_page.page(), "run `make metrics-page`"

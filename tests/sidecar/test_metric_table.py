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
from sidecar.observe.metrics import COUNTERS, GAUGES
from sidecar.service.dispatcher import SocketStats
from tests import places
from tests.sidecar.client import RunningSidecar, with_events
from tiers.catalog.manifest import Counts

TABLE = GAUGES | COUNTERS


def names(table: dict[str, str]) -> dict[str, set[str]]:
    """The labels of each metric of a table."""
    found: dict[str, set[str]] = {}
    for row in table:
        name, _, labels = row.rstrip("}").partition("{")
        found[name] = set(labels.split(",")) if labels else set()
    return found


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
    exported = {
        family.name.removeprefix("kvlake_"): family
        for family in text_string_to_metric_families(text)
    }
    assert exported.keys() == names(TABLE).keys()
    for name, labels in names(TABLE).items():
        family = exported[name]
        assert family.type == ("gauge" if name in names(GAUGES) else "counter")
        assert all(sample.labels.keys() == labels for sample in family.samples), name

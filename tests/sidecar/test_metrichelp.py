"""Each exported count says what it is of: a sentence for each field, and no two alike."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from sidecar.catalog.garbage_collector import Collected
from sidecar.core.commands import Counters
from sidecar.core.tenants import TenantCounters
from sidecar.observe import metric_help as metrichelp
from tests import places
from tiers.catalog.manifest import Counts


@pytest.mark.parametrize(
    ("sentences", "counts"),
    [
        (metrichelp.COUNTERS, Counters),
        (metrichelp.TENANT_COUNTERS, TenantCounters),
        (metrichelp.CATALOG, Counts),
        (metrichelp.COLLECTION, Collected),
    ],
)
def test_a_field_has_a_sentence_of_its_own(sentences: dict[str, str], counts: Any) -> None:
    assert sorted(sentences) == sorted(field.name for field in dataclasses.fields(counts))
    assert len(set(sentences.values())) == len(sentences)
    for name, sentence in sentences.items():
        assert sentence.lower() != name.replace("_", " "), "it says no more than the name"


def test_settings_that_sentences_name_exist() -> None:
    """Those with a section: `limits.load_deadline`, `integrity.verify_loads`, ..."""
    configs = [places.ROOT / "configs" / name for name in ("default.yaml", "s3.yaml")]
    text = "\n".join(path.read_text() for path in configs)
    for sentence in (*metrichelp.COUNTERS.values(), *metrichelp.COLLECTION.values()):
        for section, name in re.findall(r"\b(limits|integrity|store)\.([a-z_]+)", sentence):
            assert re.search(rf"^#?\s+#?\s*{name}:", text, re.MULTILINE), f"{section}.{name}"

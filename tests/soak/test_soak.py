"""A minute of it, against a sidecar that leaks: the harness works, and sees what it is for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.soak.report import Told
from tests.soak.run import soak

pytestmark = pytest.mark.promise("soak")

SECONDS = 45.0
TOO_SHORT_FOR = {
    # How fast a shared machine is within a minute says nothing.
    "throughput",
    # Memory grows until caches are full and allocators settle: judged after a minute of a life.
    "sidecar.anonymous_bytes",
    "engine.anonymous_bytes",
    # As an engine first touches the pages of host memory, the later the slower the machine is.
    "engine.shared_bytes",
}


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.nightly
def test_a_planted_leak_is_seen_and_nothing_else(short_directory: Path) -> None:
    one, found = soak(
        short_directory, SECONDS, seed=3, program=("-m", "tests.soak.leaky"), chaos=False
    )
    bad = {verdict.name: verdict.said for verdict in found if not verdict.good}
    # What was said first: pytest cuts a long list.
    assert bad.keys() - TOO_SHORT_FOR == {"sidecar.descriptors"}, "; ".join(bad.values())
    assert one.samples
    assert one.checks["loaded"] >= 1
    assert one.pace.compared > 0
    told = Told(one, found)
    assert "**BAD** | sidecar.descriptors" in told.summary()
    written = told.write(short_directory, docs=False)
    assert [path.name for path in written] == ["soak.json", "soak.svg"]
    assert json.loads(written[0].read_text())["totals"]["requests"]

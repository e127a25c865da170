"""Options of the connector: unknown ones are logged at startup, by one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from connector.vllm import KVLakeConnector
from sidecar.protocol import sockets_of
from tests.connector.configurations import kv_cache_config, vllm_config


def told(model: Path, caplog: pytest.LogCaptureFixture, role: Any, **extra: Any) -> list[str]:
    caplog.clear()
    KVLakeConnector(vllm_config(model, **extra), role, kv_cache_config()).shutdown()
    return [one.getMessage() for one in caplog.records if "has no effect" in one.message]


@pytest.mark.promise("unknown-options")
def test_a_misspelt_option_is_logged_with_the_closest(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = told(model, caplog, KVConnectorRole.SCHEDULER, chunk_token=512, sokcet="/run/a")
    first, second = lines
    assert first == (
        "kvlake: kv_connector_extra_config['chunk_token']=512 is unknown and has no effect; "
        "did you mean 'chunk_tokens'?"
    )
    assert "['sokcet']='/run/a'" in second
    assert "'socket'?" in second


def test_an_option_like_no_other_is_logged_with_all(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (line,) = told(model, caplog, KVConnectorRole.SCHEDULER, qq={"a": 1})
    assert "'qq']={'a': 1} is unknown" in line
    assert line.endswith(
        "known are attach_seconds, chunk_tokens, load_tokens_min, socket, weights_digest"
    )


def test_workers_and_valid_configurations_log_nothing(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert told(model, caplog, KVConnectorRole.WORKER, chunk_token=512) == []
    assert told(model, caplog, KVConnectorRole.SCHEDULER, weights_digest="sampled") == []


def test_in_a_multi_connector_its_own_options_count(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A MultiConnector's own, such as `connectors`, it is not shown."""
    config = vllm_config(model, others=("EmptyConnector",), chunk_token=1)
    caplog.clear()
    KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, kv_cache_config())
    lines = [one.getMessage() for one in caplog.records if "has no effect" in one.message]
    assert len(lines) == 1
    assert "'chunk_token'" in lines[0]


def test_the_sidecar_is_looked_for_beside_the_user_and_where_services_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    own, in_tmp, service = sockets_of(None)
    assert own == f"{tmp_path}/kvlake/default/attach.sock"
    assert in_tmp == f"/tmp/kvlake-{os.getuid()}/default/attach.sock"
    assert service == "/run/kvlake/default/attach.sock"
    assert sockets_of("/a/b") == ("/a/b",)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "gone"))
    assert sockets_of(None) == (in_tmp, service)

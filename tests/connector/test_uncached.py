"""An engine without the cache says so to each sidecar that there is, and which option to change."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from connector.client import UncachedNotice
from connector.vllm import KVLakeConnector
from sidecar.protocol import DECLINE_REASONS, DECLINED_CHARS_MAX, Declined, Refused, Role
from sidecar.protocol.codec import encode, frame_stream
from tests import places
from tests.connector.configurations import kv_cache_config, request_of, spec_of, vllm_config
from tests.connector.engine import Engine
from tests.connector.listening import WAIT_SECONDS_MAX, Peer, Sidecar
from tests.connector.offloading_engine import Engine as NativeEngine
from tests.connector.prompts import counted, total

PROMPT = [number % 89 for number in range(300)]


@pytest.fixture
def sidecar(short_directory: Path) -> Iterator[Sidecar]:
    sidecar = Sidecar(short_directory)
    yield sidecar
    sidecar.close()


def declined(peer: Peer) -> Declined:
    assert isinstance(peer.first, Declined)
    return peer.first


def at_end(peer: Peer) -> bool:
    return peer.connection.recv(1) == b""


class TestUncachedNotice:
    def test_each_sidecar_gets_it_until_it_is_closed(self, sidecar: Sidecar) -> None:
        notice = UncachedNotice((sidecar.path,), Role.WORKER, "e", "memory", "why")
        assert declined(sidecar.accept()).message == "why"
        sidecar.stop()
        sidecar.listen()
        peer = sidecar.accept()
        assert (declined(peer).role, declined(peer).reason) == (Role.WORKER, "memory")
        notice.close()
        notice.close()
        assert at_end(peer)

    def test_an_older_sidecar_is_not_asked_again_at_once(
        self, sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It knows no such message and logs each one. So the longer of two pauses follows."""
        places.patch(monkeypatch, "NOTICE_RETRY_SECONDS", 10 * WAIT_SECONDS_MAX)
        places.patch(monkeypatch, "NOTICE_REFUSED_SECONDS", 0.02)
        notice = UncachedNotice((sidecar.path,), Role.WORKER, "e", "memory", "why")
        first = sidecar.accept()
        first.reply(frame_stream(encode(Refused("unknown_tag", "Invalid value 'declined'"))))
        again = sidecar.accept()
        notice.close()
        assert at_end(again)

    def test_a_long_message_is_cut(self, sidecar: Sidecar) -> None:
        notice = UncachedNotice((sidecar.path,), Role.WORKER, "e", "weights", "a\nb" + "c" * 5_000)
        told = declined(sidecar.accept()).message
        assert told.startswith("a bcc")
        assert len(told) == DECLINED_CHARS_MAX
        notice.close()


class TestEngine:
    """One that kvlake refuses. Each of its processes says so."""

    @pytest.mark.promise("uncached-engines")
    @pytest.mark.parametrize("role", [KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER])
    def test_chunks_that_do_not_fit(
        self, model: Path, sidecar: Sidecar, role: KVConnectorRole
    ) -> None:
        config = vllm_config(model, socket=sidecar.path, chunk_tokens=100)
        connector = KVLakeConnector(config, role, kv_cache_config())
        if role is KVConnectorRole.WORKER:
            connector.register_kv_caches({})
        peer = sidecar.accept()
        said = declined(peer)
        assert said.role == role.name.lower()
        assert config.kv_transfer_config is not None
        assert said.engine_id == config.kv_transfer_config.engine_id
        assert said.reason == "chunk_tokens"
        assert said.message == (
            "kv_connector_extra_config['chunk_tokens']=100 is not a multiple of the engine's block "
            "size, 16; choose 96 or 112, or leave it out"
        )
        connector.shutdown()
        assert at_end(peer)

    @pytest.mark.parametrize(
        ("tokens", "blocks", "said"),
        [
            (100, (32,), "block size, 32; choose 96 or 128,"),
            (8, (16,), "block size, 16; choose 16,"),
            (48, (32, 16, 32), "block size, 16 and 32; choose 32 or 64,"),
        ],
    )
    def test_the_log_names_the_option_that_was_given(
        self,
        model: Path,
        caplog: pytest.LogCaptureFixture,
        tokens: int,
        blocks: tuple[int, ...],
        said: str,
    ) -> None:
        """`kvlake run` takes it from the sidecar's configuration, where the operator wrote it."""
        specs = [spec_of(block_tokens=size) for size in blocks]
        config = vllm_config(model, chunk_tokens=tokens, chunk_tokens_from="chunk.tokens")
        with caplog.at_level(logging.WARNING, logger="vllm.kvlake"):
            connector = KVLakeConnector(
                config, KVConnectorRole.SCHEDULER, kv_cache_config(specs=specs)
            )
        connector.shutdown()
        (line,) = [one.getMessage() for one in caplog.records if one.name == "vllm.kvlake"]
        assert f"chunk.tokens={tokens} of the sidecar's configuration is not a multiple" in line
        assert said in line
        assert "kv_connector_extra_config" not in line

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"parallel_config.enable_fault_tolerance": True}, "unsupported"),
            ({"model_config.model": "/nowhere/model"}, "weights"),
        ],
    )
    def test_other_reasons(
        self,
        model: Path,
        sidecar: Sidecar,
        caplog: pytest.LogCaptureFixture,
        change: dict[str, Any],
        reason: str,
    ) -> None:
        config = vllm_config(model, socket=sidecar.path)
        for name, value in change.items():
            section, _, field = name.partition(".")
            setattr(getattr(config, section), field, value)
        connector = KVLakeConnector(config, KVConnectorRole.SCHEDULER, kv_cache_config())
        said = declined(sidecar.accept())
        assert said.reason == reason
        assert reason in DECLINE_REASONS
        assert f"served without the cache, because {said.message}" in caplog.text
        connector.shutdown()

    def test_memory_that_cannot_be_shared(
        self, model: Path, sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The worker alone knows, and says so before the first step."""
        places.patch(monkeypatch, "ParallelLayout.this_rank", lambda _layout: 0)
        config = vllm_config(model, socket=sidecar.path)
        connector = KVLakeConnector(config, KVConnectorRole.WORKER, kv_cache_config())
        connector.register_kv_caches({})
        said = declined(sidecar.accept())
        assert (said.role, said.reason) == (Role.WORKER, "memory")
        assert "registered no cache of layer 'layer.0'" in said.message
        connector.shutdown()

    def test_its_requests_are_counted(self, model: Path) -> None:
        config = vllm_config(model, chunk_tokens=100)
        connector = KVLakeConnector(config, KVConnectorRole.SCHEDULER, kv_cache_config())
        requests = [request_of(name, PROMPT) for name in "ab"]
        for request in requests:
            connector.on_new_request(request)
            # As vLLM's scheduler: it found 16 tokens in its own prefix cache.
            request.prefill_stats.set(len(PROMPT), 16, 0)
            connector.update_state_after_alloc(request, None, 0)
        stats = connector.get_kv_connector_stats()
        assert stats is not None
        assert stats.data == {"requests_uncached": 2}
        assert connector.get_kv_connector_stats() is None
        # One gets its first token, the other ends before.
        requests[0].take_prefill_stats()
        for request in requests:
            connector.request_finished(request, [])
        stats = connector.get_kv_connector_stats()
        assert stats is not None
        assert stats.data == {
            "prompt_tokens/local": 16,
            "prompt_tokens/refused": len(PROMPT) - 16,
        }
        connector.shutdown()


def test_a_step_that_counted_nothing_tells_nothing(engine: Engine) -> None:
    engine.run(request_of("a", PROMPT, max_tokens=1))
    engine.connector.get_kv_connector_stats()
    assert engine.connector.get_kv_connector_stats() is None


def test_requests_are_counted_while_no_sidecar_is_there(engine: Engine) -> None:
    taken = counted(engine)
    engine.run(request_of("a", PROMPT, max_tokens=2))
    assert total(taken, "requests_uncached") == 0
    engine.sidecar.detach()
    engine.run(request_of("b", PROMPT, max_tokens=2))
    assert total(taken, "requests_uncached") == 1
    engine.sidecar.attach()
    engine.run(request_of("c", PROMPT, max_tokens=2))
    assert total(taken, "requests_uncached") == 1
    engine.role.retire()
    engine.run(request_of("d", PROMPT, max_tokens=2))
    assert total(taken, "requests_uncached") == 2


@pytest.mark.promise("uncached-engines")
def test_vllms_own_offloading_without_our_tier(
    model: Path, sidecar: Sidecar, caplog: pytest.LogCaptureFixture
) -> None:
    engine = NativeEngine(model, sidecar.path, configured={"adapters": {}}, attach_seconds=0)
    peer = sidecar.accept()
    said = declined(peer)
    assert (said.role, said.reason) == (Role.SCHEDULER, "unsupported")
    assert said.engine_id == engine.engine_id
    assert said.message in caplog.text
    assert "set adapters_by_path to true" in said.message
    # vLLM forgets what made it; it is said for as long as the engine lives all the same.
    gc.collect()
    peer.connection.setblocking(False)
    with pytest.raises(BlockingIOError):
        peer.connection.recv(1)
    engine.close()

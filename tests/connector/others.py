"""Other connectors for a `MultiConnector`: one that holds nothing, and one that loads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)


class EmptyMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Nothing to do."""


class EmptyConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Loads nothing and stores nothing."""

    finished: ClassVar[list[str]] = []

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return EmptyMetadata()

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.finished.append(request.request_id)
        return False, None


@dataclass
class LoadingMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """The blocks to fill in this step, by request."""

    loads: dict[str, list[int]] = field(default_factory=dict[str, list[int]])


class LoadingConnector(EmptyConnector):
    """Offers the first tokens of every prompt, and fills their blocks with what a test gives it.

    At once, or while the request waits until the test lets it `arrive`; or it fails to, and then
    says so, as vLLM wants it: with the blocks of the step, or with the request.
    """

    offered_tokens: ClassVar[int] = 0
    waits: ClassVar[bool] = False
    fails: ClassVar[bool] = False
    arrived: ClassVar[set[str]] = set()

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.fill: Callable[[str, list[int]], None] = lambda request_id, block_ids: None
        self._planned = LoadingMetadata()
        self._invalid: set[int] = set()
        self._loading: dict[str, list[int]] = {}

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        matched = max(0, self.offered_tokens - num_computed_tokens)
        return matched, bool(matched) and self.waits

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._planned.loads[request.request_id] = list(blocks.get_block_ids()[0])

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        planned, self._planned = self._planned, LoadingMetadata()
        return planned

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, LoadingMetadata)
        if self.waits:
            self._loading |= connector_metadata.loads
            return
        for request_id, block_ids in connector_metadata.loads.items():
            if self.fails:
                self._invalid.update(block_ids[: self.offered_tokens // 16])
            else:
                self.fill(request_id, block_ids)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        ended = self.arrived & self._loading.keys()
        for request_id in ended:
            block_ids = self._loading.pop(request_id)
            if not self.fails:
                self.fill(request_id, block_ids)
        return KVConnectorTransferResults(
            finished_recving=ended, failed_recving=ended if self.fails else set()
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid

"""What both roles must agree on about their engine: its groups, their namespaces, how it attaches.

Read once from vLLM's configuration. If the engine is refused (`identity/eligibility.py`), only
`refusal`, `reason` and what is set before them exist. If its weights must be read first, namespaces
are empty until they are (`reading.py`), and a refusal may come later.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from vllm.v1.kv_cache_interface import MLAAttentionSpec

from connector.client import UncachedReason
from connector.export import ExportedMemory
from connector.identity.eligibility import (
    attention_of,
    chunk_tokens_unsupported_reason,
    media_unsupported_reason,
    num_heads_of,
    unsupported_reason,
)
from connector.identity.groups import CachedGroup, Geometry, chunk_tokens_of, whole_blocks
from connector.identity.namespace import (
    canonical_json,
    description_of,
    digest_of,
    encoding_of,
    served_as,
)
from connector.identity.parallelism import ParallelLayout, parallel_layout_of
from connector.identity.reading import Identity
from connector.identity.speculative import speculation_of
from connector.identity.weights import WeightsUnknown
from connector.options import chunk_tokens_source, option
from sidecar.protocol import PROTOCOL_VERSION, Attach, Group, Role, sockets_of, tiers_owner
from tiers.kv.layout import KVLayout, Segment

CHUNK_TOKENS: Final = 256
"""The default, rounded up to whole blocks."""


@dataclass(slots=True)
class EngineGroup(CachedGroup):
    """A group as workers share it."""

    namespace: bytes
    """Empty until the weights are identified."""
    layer_names: list[str]
    num_heads: int
    encoding: str
    latent: bool
    """MLA: one vector per token instead of heads, which every rank holds."""

    @property
    def entry_tokens(self) -> int:
        """Tokens per entry of a block."""
        return self.geometry.block_tokens if self.geometry.attention.recurrent else 1

    def segment(self, layout: ParallelLayout, rank: int) -> Segment:
        """Layers and heads of a rank. Raises `LayoutError`."""
        return layout.segment(self.layer_names, self.num_heads, rank, latent=self.latent)


def block_bytes_of(kv_cache_config: Any, world_size: int) -> list[int]:
    """Bytes of a block of each KV cache group, on all ranks together."""
    return [
        int(group.kv_cache_spec.page_size_bytes) * len(group.layer_names) * world_size
        for group in kv_cache_config.kv_cache_groups
    ]


class EngineProfile:
    """An engine as vLLM's configuration describes it. If it `logs`, the log tells of long reads."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, *, logs: bool = False) -> None:
        transfer = vllm_config.kv_transfer_config
        extra = transfer.kv_connector_extra_config
        self.sockets = sockets_of(extra.get("socket"))
        self.attach_seconds = option(extra, "attach_seconds", 2.0)
        self.load_tokens_min = option(extra, "load_tokens_min", 64)
        groups = kv_cache_config.kv_cache_groups
        block_sizes = [int(group.kv_cache_spec.block_size) for group in groups]
        chunk_tokens = option(extra, "chunk_tokens", whole_blocks(CHUNK_TOKENS, block_sizes))
        self.engine_id = str(transfer.engine_id)
        self.parallel_layout = parallel_layout_of(vllm_config)
        self.world_size = int(vllm_config.parallel_config.world_size)
        self.num_blocks = int(kv_cache_config.num_blocks)
        self.reason: UncachedReason = "unsupported"
        """The label of a refusal in the sidecar's metrics."""
        self._identity: Identity | None = None
        self.refusal = unsupported_reason(vllm_config, kv_cache_config)
        if self.refusal:
            return
        setting = chunk_tokens_source(extra)
        self.refusal = chunk_tokens_unsupported_reason(chunk_tokens, block_sizes, setting)
        if self.refusal:
            self.reason = "chunk_tokens"
            return
        try:
            self.speculation = speculation_of(vllm_config)
            found = [
                self._group(vllm_config, group, chunk_tokens, alone=len(groups) == 1)
                for group in groups
            ]
            self.groups = [group for group, _ in found]
            self._identity = Identity([description for _, description in found], logs=logs)
        except (WeightsUnknown, OSError) as error:
            self._refuse(str(error))
            return
        self._identity.then(self._identified)
        self.media_refusal = media_unsupported_reason(vllm_config)
        self.replicas = self.parallel_layout.tensors if self.groups[0].latent else 1
        self.topology = self.parallel_layout.topology(self.replicas)
        model = vllm_config.model_config
        self.model = served_as(model.model, str(model.served_model_name or model.model))

    def _group(
        self, vllm_config: Any, group: Any, chunk_tokens: int, *, alone: bool
    ) -> tuple[EngineGroup, dict[str, Any]]:
        """A group without its namespace, and the description of that."""
        spec = group.kv_cache_spec
        layer_names: list[str] = list(group.layer_names)
        attention = attention_of(spec)
        assert attention is not None, "refused by unsupported_reason"
        block_tokens = int(spec.block_size)
        tokens = chunk_tokens_of(chunk_tokens, block_tokens, attention)
        geometry = Geometry(block_tokens, tokens, attention)
        num_heads = num_heads_of(vllm_config, spec)
        description = description_of(
            vllm_config,
            block_tokens=block_tokens,
            blocks_per_chunk=geometry.blocks_per_chunk,
            spec=spec,
            # A single group is the whole model, which the namespace names already.
            layer_names=() if alone else layer_names,
            kv_heads=num_heads,
            drafter=self.speculation.drafter,
        )
        encoding = encoding_of(vllm_config, block_tokens, spec)
        latent = isinstance(spec, MLAAttentionSpec)
        made = EngineGroup(b"", geometry, b"", layer_names, num_heads, encoding, latent)
        return made, description

    def _identified(self) -> None:
        assert self._identity is not None
        if self._identity.refusal:
            self._refuse(self._identity.refusal)
            return
        for group, description in zip(self.groups, self._identity.descriptions, strict=True):
            group.namespace = canonical_json(description)
            group.namespace_digest = digest_of(group.namespace)

    def _refuse(self, why: str) -> None:
        # The reason first: another thread may wait for the refusal.
        self.reason = "weights"
        self.refusal = why

    def then(self, call: Callable[[], None]) -> None:
        """Call this when it is known whether the engine is refused: at once, or on a thread."""
        if self._identity is None:
            call()
        else:
            self._identity.then(call)

    def when_identified(self, call: Callable[[], None]) -> None:
        """Call this when the namespaces are known: at once, on a thread, or never."""
        assert self._identity is not None, "it was refused"
        self._identity.when_complete(call)

    def close(self) -> None:
        """Stop reading weights; calls that were not made yet are not made."""
        if self._identity is not None:
            self._identity.close()

    def owner(self, group: int) -> str:
        """Owner of a group's chunks in KV cache events."""
        one = self.groups[group]
        home = self.owner(0) if group else ""
        return tiers_owner(one.namespace_digest, self.topology, one.geometry.block_tokens, home)

    def attach(
        self, role: Role, rank: int, exported: ExportedMemory | None = None, **parts: Any
    ) -> Attach:
        """The attach message of a role of this engine; a worker passes its exported memory."""
        first, *others = self.groups
        layouts: Sequence[KVLayout | None] = [None] * len(self.groups)
        if exported is not None:
            layouts = exported.layouts
            parts |= {"segment": layouts[0].segment, "layout": layouts[0]}
        return Attach(
            version=PROTOCOL_VERSION,
            role=role,
            engine_id=self.engine_id,
            rank=rank,
            world_size=self.world_size,
            topology=self.topology,
            replicas=self.replicas,
            namespace=first.namespace,
            block_tokens=first.geometry.block_tokens,
            blocks_per_chunk=first.geometry.blocks_per_chunk,
            pid=os.getpid(),
            model=self.model,
            groups=tuple(
                Group(
                    group.namespace,
                    group.geometry.block_tokens,
                    group.geometry.blocks_per_chunk,
                    None if layout is None else layout.segment,
                    layout,
                )
                for group, layout in zip(others, layouts[1:], strict=True)
            ),
            **parts,
        )

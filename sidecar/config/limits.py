"""The section `limits`: deadlines and bounds of queues.

What happens at a limit is in `sidecar/core/fair_share.py`.
"""

from __future__ import annotations

from pydantic import Field, model_validator

from sidecar.config.types import Count, Duration, Section, Size
from sidecar.config.units import format_duration
from sidecar.protocol import GROUPS_MAX


class LimitsSettings(Section):
    """Deadlines and bounds. Engines receive the first four when they attach."""

    lookup_wait: Duration = Field(default=0.5, le=60)
    """Longest that a request waits for chunks that only the object store holds."""
    load_deadline: Duration = Field(default=5.0, ge=0.01, le=600)
    """Longest that an engine waits for a load; then it computes the tokens itself."""
    store_deadline: Duration = Field(default=10.0, ge=0.01, le=600)
    """Longest that an engine holds blocks for a store; then it takes them back."""
    lease_ttl: Duration = Field(default=10.0, ge=0.01, le=3600)
    """How long a pinned chunk stays pinned if its pin is not released."""
    attach_deadline: Duration = Field(default=5.0, ge=0.01, le=600)
    """How long a connected client may take to attach; then it is disconnected."""
    jobs_inflight_max: Count = Field(default=256, ge=1, le=4096)
    """Running jobs of one engine; at the limit, it stores nothing."""
    memory_max: Size = Field(default=256 << 20, ge=1 << 20)
    """Memory of the sidecar for pending lookups, leases, jobs and copies."""
    copies_queued_max: Count = Field(default=65_536, ge=16, le=10_000_000)
    """Chunks queued for copying; at the limit, loads miss and stores are dropped."""
    storing_max: Size | None = Field(default=None, ge=1)
    """Host memory of running stores. null: host.size."""
    pinned_max: Size | None = Field(default=None, ge=1)
    """Host memory that leases and lookups may pin. null: host.size."""
    lookups_max: Count = Field(default=4096, ge=2, le=1_000_000)
    """Lookups that are pending or hold chunks; further ones are refused."""
    leases_max: Count = Field(default=4096, ge=2, le=1_000_000)
    """Leases at a time; further loads run without one."""
    replies_queued_max: Count = Field(default=1024, ge=16, le=65_536)
    """Answers queued for one client; a client that does not read them is disconnected."""
    sessions_max: Count = Field(default=256, ge=1, le=65_536)
    """Attached clients: one scheduler and one worker per rank for each engine."""
    realms_max: Count = Field(default=256, ge=GROUPS_MAX, le=65_536)
    """Namespaces and topologies at a time; new ones replace unused ones."""
    drain_seconds_max: Duration = Field(default=30.0, le=3600)
    """Longest that a stopping sidecar writes to the object store."""

    @model_validator(mode="after")
    def _ordered(self) -> LimitsSettings:
        if self.lease_ttl < self.load_deadline:
            raise ValueError(
                f"lease_ttl={format_duration(self.lease_ttl)} ends before "
                f"load_deadline={format_duration(self.load_deadline)}; a lease must outlive the "
                "load that it protects, so raise lease_ttl or lower load_deadline"
            )
        return self

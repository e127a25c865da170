"""The section `limits`: what may wait, and for how long.

Owns this section. Does not own what is refused when a limit is reached
(`sidecar/core/fair_share.py`).
"""

from __future__ import annotations

from pydantic import Field, model_validator

from sidecar.config.section import Section
from sidecar.config.types import Count, Duration, Size
from sidecar.config.units import format_duration
from sidecar.protocol import GROUPS_MAX


class LimitsSettings(Section):
    """Deadlines and bounds. The first four are told to the engines when they attach."""

    lookup_wait: Duration = Field(default=0.5, le=60)
    """Longest that a request waits for chunks that only the store holds."""
    load_deadline: Duration = Field(default=5.0, ge=0.01, le=600)
    """Longest that an engine waits for a load; then it computes the tokens itself."""
    store_deadline: Duration = Field(default=10.0, ge=0.01, le=600)
    """Longest that an engine holds blocks for a store; then it takes them back."""
    lease_ttl: Duration = Field(default=10.0, ge=0.01, le=3600)
    """How long a pinned chunk stays pinned if nobody lets go of it."""
    attach_deadline: Duration = Field(default=5.0, ge=0.01, le=600)
    """How long a client that has connected may take to attach; then it is cut off."""
    jobs_inflight_max: Count = Field(default=256, ge=1, le=4096)
    """Jobs that one engine may have running; beyond it, it stores nothing."""
    memory_max: Size = Field(default=256 << 20, ge=1 << 20)
    """What all that waits (lookups, leases, jobs, copies) may take of the sidecar's own memory."""
    copies_queued_max: Count = Field(default=65_536, ge=16, le=10_000_000)
    """Chunks that may wait to be copied; beyond it loads miss and stores are dropped."""
    storing_max: Size | None = Field(default=None, ge=1)
    """Host memory that may be in the middle of being stored into. null: host.size."""
    pinned_max: Size | None = Field(default=None, ge=1)
    """Host memory that leases and lookups may keep from being evicted. null: host.size."""
    lookups_max: Count = Field(default=4096, ge=2, le=1_000_000)
    """Lookups that may wait or keep what they brought; beyond it they are answered as full."""
    leases_max: Count = Field(default=4096, ge=2, le=1_000_000)
    """Leases that may be held; beyond it a load goes without one."""
    replies_queued_max: Count = Field(default=1024, ge=16, le=65_536)
    """Answers that may wait for one client; one that does not read more is cut off."""
    sessions_max: Count = Field(default=256, ge=1, le=65_536)
    """Attached clients: one scheduler and one worker per rank for each engine."""
    realms_max: Count = Field(default=256, ge=GROUPS_MAX, le=65_536)
    """Namespaces and topologies that are known at a time; unused ones give way to new ones."""
    drain_seconds_max: Duration = Field(default=30.0, le=3600)
    """Longest that a stopping sidecar goes on writing to the store."""

    @model_validator(mode="after")
    def _ordered(self) -> LimitsSettings:
        if self.lease_ttl < self.load_deadline:
            raise ValueError(
                f"lease_ttl={format_duration(self.lease_ttl)} ends before "
                f"load_deadline={format_duration(self.load_deadline)}; a lease must outlive the "
                "load that it protects, so raise lease_ttl or lower load_deadline"
            )
        return self

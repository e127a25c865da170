"""The section `store`: the object store, what is written to it, and what it may hold and cost.

Owns this section, but for how a site reaches its store (`access.py`). Invariant: no password of a
URL is in a `repr`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal

from pydantic import Field, field_validator, model_validator

from sidecar.config.access import AccessSettings
from sidecar.config.section import Section
from sidecar.config.types import Count, Duration, Flag, Ratio, ReadMode, Size, WriteMode
from sidecar.config.units import format_duration
from sidecar.config.yaml_file import mask_url
from tiers.store.access import AccessError, check, chosen_backend
from tiers.store.middleware.billing import Operation, PriceTable

BEYOND_SHARE: Final = 0.5
"""Part of a bound that is written beyond it, while older chunks wait to be deleted."""

Price = Annotated[Ratio, Field(ge=0, le=1_000_000)]

_URL: Final = re.compile(r"^[a-z][a-z0-9+.-]*://.*", re.DOTALL)


class BreakerSettings(Section):
    """When a store that fails is left alone: reads and writes each on their own."""

    failures_max: Count = Field(default=5, ge=1, le=1_000_000)
    """Requests that fail in a row, retries included, before nothing is sent any more."""
    pause: Duration = Field(default=1.0, ge=0.01)
    """How long, before one request is sent to see whether the store works again."""
    pause_max: Duration = Field(default=30.0, ge=0.01)
    """The pause doubles with each such request that fails, up to this."""


class CollectionSettings(Section):
    """Compacting the catalog and deleting what is beyond `ttl`, `size_max` and `objects_max`."""

    enabled: Flag = True
    """Take part in it. One sidecar at a time does it, whoever gets the store's lease."""
    every: Duration = Field(default=600.0, ge=1.0)
    """How often it is looked whether there is anything to do."""
    grace: Duration = Field(default=300.0, ge=0.1)
    """From withdrawing a chunk to deleting it; longer than a refresh and a read together take."""
    quarantine_keep: Duration | None = Field(default=7 * 86_400.0, ge=1.0)
    """How long damaged objects stay in `quarantine/`, to be looked at; null: for ever."""


class PriceSettings(Section):
    """What the store charges, for an estimate of the monthly bill. Requests are per 1000."""

    currency: str = Field(default="USD", min_length=1, max_length=8)
    """What the prices are in; only shown."""
    list: Price = 0.0
    """1000 requests that list."""
    get: Price = 0.0
    """1000 requests that read."""
    put: Price = 0.0
    """1000 requests that write or copy."""
    delete: Price = 0.0
    """1000 requests that delete."""
    head: Price = 0.0
    """1000 requests that look at an object without reading it; the sidecar sends none."""
    gb_month: Price = 0.0
    """One GB (10^9 bytes) kept for a month."""
    gb_read: Price = 0.0
    """One GB read, where the store is elsewhere."""
    gb_written: Price = 0.0
    """One GB written."""

    def table(self) -> PriceTable:
        """The prices as the estimate takes them."""
        per_1000: dict[Operation, float] = {
            "list": self.list,
            "get": self.get,
            "put": self.put,
            "delete": self.delete,
            "head": self.head,
        }
        return PriceTable(per_1000, self.gb_month, self.gb_read, self.gb_written)


class StoreSettings(AccessSettings):
    """The object store tier, shared by every sidecar that names the same place."""

    storage_options: dict[str, Any] = Field(default_factory=dict, repr=False)
    """Handed to the fsspec client as they are, for what has no setting of its own here."""
    prefix: str = ""
    """Path under `url` below which everything is kept."""
    write: WriteMode = "through"
    """Which chunks are written, in the background. `through`: all, at once. `on_reuse`: those that
    are asked for again. `on_evict`: those that host memory will evict next. `off`: none."""
    read: ReadMode = "on"
    """`on`: chunks that only the store holds are served. `off`: they are not looked for."""
    refresh_seconds: Duration = Field(default=5.0, ge=0.05)
    """How often the catalog is looked at for what other sidecars wrote."""
    catalog_flush: Duration = Field(default=1.0, ge=0.01, le=3600)
    """Longest that a written chunk waits to be announced to others; a crash loses so much."""
    catalog_rows_max: Count = Field(default=10_000, ge=1, le=100_000)
    """Chunks after which they are announced at once."""
    reconcile_every: Duration = Field(default=86_400.0, ge=1.0)
    """How long it takes to compare all objects with the catalog, in the background, in slices."""
    ttl: Duration | None = Field(default=None, ge=1.0)
    """Age at which a chunk is deleted, such as "30d"; it counts from when it was written."""
    size_max: Size | None = Field(default=None, ge=1)
    """Bytes that a namespace (a model) may hold; beyond it, the oldest chunks are deleted."""
    objects_max: Count | None = Field(default=None, ge=1)
    """Objects that a namespace may hold; beyond it, the oldest chunks are deleted."""
    gc: CollectionSettings = Field(default_factory=CollectionSettings)
    prices: PriceSettings | None = None
    writes_inflight_max: Count = Field(default=4, ge=1, le=1024)
    """Objects written at the same time."""
    reads_inflight_max: Count = Field(default=16, ge=1, le=1024)
    """Objects read at the same time."""
    requests_per_second_max: Count | None = Field(default=None, ge=1, le=1_000_000)
    """Requests that may begin in a second, retries included, evenly spread; null: no limit."""
    write_queue_max: Size = Field(default="4GiB", ge=1, validate_default=True)
    """Bytes that wait to be written, in host memory; beyond it the oldest is not written."""
    breaker: BreakerSettings = Field(default_factory=BreakerSettings)
    recompute: Literal["when_sooner", "never"] = "when_sooner"
    """`when_sooner`: a prompt waits only while reading is expected to be sooner than computing.
    `never`: it waits as long as `limits.lookup_wait` allows, to spare the GPU."""
    regret_max: Ratio = Field(default=0.04, ge=0, le=1)
    """Of the time to compute prompts, the part that waiting for the store may cost in vain."""
    deadline_seconds_max: Duration = Field(default=30.0, ge=0.01)
    """Longest that one request to the store may take, retries included."""
    retries_max: Count = Field(default=3, ge=0, le=100)
    """How often a request that failed in passing is sent again."""

    @field_validator("url")
    @classmethod
    def _is_url(cls, value: str) -> str:
        if not _URL.match(value):
            remedy = f"file://{value}" if value.startswith("/") else f"s3://{value or 'bucket'}"
            raise ValueError(
                f"{mask_url(value)!r} has no scheme; write a URL such as {mask_url(remedy)}"
            )
        return value

    @field_validator("prefix")
    @classmethod
    def _relative(cls, value: str) -> str:
        trimmed = value.strip("/")
        if any(part in ("", ".", "..") for part in trimmed.split("/") if trimmed):
            raise ValueError(f"{value!r} must be a plain relative path such as team-a/kv")
        return trimmed

    @model_validator(mode="after")
    def _graceful(self) -> StoreSettings:
        least = self.refresh_seconds + self.deadline_seconds_max
        if self.gc.grace <= least:
            raise ValueError(
                f"gc.grace={format_duration(self.gc.grace)}: a chunk may still be read "
                f"{format_duration(least)} after it was withdrawn (refresh_seconds and "
                "deadline_seconds_max together); raise gc.grace"
            )
        return self

    @model_validator(mode="after")
    def _reachable(self) -> StoreSettings:
        # What a client cannot do is said when the file is checked, not when a sidecar starts.
        try:
            check(
                self.url, self.access, chosen_backend(self.url, self.access, self.storage_options)
            )
        except AccessError as error:
            raise ValueError(str(error)) from error
        return self

    @property
    def capped(self) -> bool:
        """Whether a namespace may hold only so much."""
        return self.size_max is not None or self.objects_max is not None

    def has_room(self, num_bytes: int, objects: int) -> bool:
        """Whether a namespace may come to so much until the next round of collection."""
        beyond = 1 + BEYOND_SHARE
        if self.size_max is not None and num_bytes > beyond * self.size_max:
            return False
        return self.objects_max is None or objects <= beyond * self.objects_max

    def __repr_args__(self) -> Any:
        """Leave no password of the URL in a traceback or a log line."""
        for name, value in super().__repr_args__():
            yield name, mask_url(value) if name == "url" and isinstance(value, str) else value

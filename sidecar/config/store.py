"""The section `store`: the object store, how it is reached, what is written to it, and its limits.

How it is reached, and what a provider or a client supports, is in `tiers/store/access.py`.

Invariant: no credential is in a `repr`, or in the output of `kvlake config show`.
"""

import re
from typing import Annotated, Final, Literal

from pydantic import Field, PlainSerializer, field_validator, model_validator

from tiers.redaction import mask_url, masked
from tiers.settings import Count, Duration, Flag, Ratio, ReadMode, Section, Size, WriteMode
from tiers.sizes import format_duration
from tiers.store.access import Access, AccessError, check, chosen_backend

BEYOND_SHARE: Final = 0.5
"""Share of a limit that may be written beyond it, until older chunks are deleted."""

Price = Annotated[Ratio, Field(ge=0, le=1_000_000)]

_URL: Final = re.compile(r"^[a-z][a-z0-9+.-]*://.*", re.DOTALL)


class BreakerSettings(Section):
    """When requests to a failing store are suspended, for reads and writes separately."""

    failures_max: Count = Field(default=5, ge=1, le=1_000_000)
    """Requests that fail in a row, retries included, before requests are suspended."""
    pause: Duration = Field(default=1.0, ge=0.01)
    """How long, before one request probes whether the store works again."""
    pause_max: Duration = Field(default=30.0, ge=0.01)
    """The pause doubles with each probe that fails, up to this."""


class CollectionSettings(Section):
    """Compaction of the catalog, and deletion by `ttl`, `size_max` and `objects_max`."""

    enabled: Flag = True
    """Take part in it. One sidecar at a time does it: the holder of the store's lease."""
    every: Duration = Field(default=600.0, ge=1.0)
    """How often the sidecar checks whether there is anything to do."""
    grace: Duration = Field(default=300.0, ge=0.1)
    """From withdrawing a chunk to deleting it; longer than a refresh and a read together."""
    quarantine_keep: Duration | None = Field(default=7 * 86_400.0, ge=1.0)
    """How long damaged objects stay in `quarantine/`, for inspection; null: for ever."""


class PriceSettings(Section):
    """What the store charges, for an estimate of the monthly bill. Requests are per 1000."""

    currency: str = Field(default="USD", min_length=1, max_length=8)
    """Currency of the prices; only shown."""
    list: Price = 0.0
    """1000 requests that list."""
    get: Price = 0.0
    """1000 requests that read."""
    put: Price = 0.0
    """1000 requests that write or copy."""
    delete: Price = 0.0
    """1000 requests that delete."""
    gb_month: Price = 0.0
    """One GB (10^9 bytes) kept for a month."""
    gb_read: Price = 0.0
    """One GB read."""
    gb_written: Price = 0.0
    """One GB written."""


class StoreSettings(Access):
    """The object store tier, shared by every sidecar with the same place."""

    url: Annotated[str, Field(repr=False), PlainSerializer(mask_url, when_used="json")]
    """Where chunks go: s3://bucket, gs://bucket, az://container, file:///directory."""
    prefix: str = ""
    """Path under `url` below which everything is kept."""
    write: WriteMode = "through"
    """Which chunks are written, in the background. `through`: all, at once. `on_reuse`: those that
    are requested again. `on_evict`: those that host memory will evict next. `off`: none."""
    read: ReadMode = "on"
    """`on`: chunks that only the store holds are served. `off`: they are not."""
    refresh_seconds: Duration = Field(default=5.0, ge=0.05)
    """How often the catalog is read for chunks of other sidecars."""
    catalog_flush: Duration = Field(default=1.0, ge=0.01, le=3600)
    """Longest until a written chunk is announced to others. A crash loses unannounced ones."""
    catalog_rows_max: Count = Field(default=10_000, ge=1, le=100_000)
    """Unannounced chunks; at this number, they are announced at once."""
    reconcile_every: Duration = Field(default=86_400.0, ge=1.0)
    """Period in which all objects are compared with the catalog, in the background, in slices."""
    ttl: Duration | None = Field(default=None, ge=1.0)
    """Age since it was written at which a chunk is deleted, such as "30d"."""
    size_max: Size | None = Field(default=None, ge=1)
    """Bytes of a namespace (a model); beyond them, the oldest chunks are deleted."""
    objects_max: Count | None = Field(default=None, ge=1)
    """Objects of a namespace; beyond them, the oldest chunks are deleted."""
    gc: CollectionSettings = Field(default_factory=CollectionSettings)
    prices: PriceSettings | None = None
    writes_inflight_max: Count = Field(default=4, ge=1, le=1024)
    """Objects written at the same time."""
    reads_inflight_max: Count = Field(default=16, ge=1, le=1024)
    """Objects read at the same time."""
    requests_per_second_max: Count | None = Field(default=None, ge=1, le=1_000_000)
    """Requests per second, retries included, evenly spread; null: no limit."""
    write_queue_max: Size = Field(default="4GiB", ge=1, validate_default=True)
    """Bytes queued for writing, in host memory; beyond them the oldest is not written."""
    breaker: BreakerSettings = Field(default_factory=BreakerSettings)
    recompute: Literal["when_sooner", "never"] = "when_sooner"
    """`when_sooner`: a prompt waits only while reading is expected to be faster than computing.
    `never`: it waits as long as `limits.lookup_wait` allows, to spare the GPU."""
    regret_max: Ratio = Field(default=0.04, ge=0, le=1)
    """Share of the time to compute prompts that may be lost by waiting for the store in vain."""
    deadline_seconds_max: Duration = Field(default=30.0, ge=0.01)
    """Longest that one request to the store may take, retries included."""
    retries_max: Count = Field(default=3, ge=0, le=100)
    """How often a request is retried after a transient error."""

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
    def _consistent(self) -> "StoreSettings":
        least = self.refresh_seconds + self.deadline_seconds_max
        if self.gc.grace <= least:
            raise ValueError(
                f"gc.grace={format_duration(self.gc.grace)}: a chunk may still be read "
                f"{format_duration(least)} after it was withdrawn (refresh_seconds and "
                "deadline_seconds_max together); raise gc.grace"
            )
        inflight = self.writes_inflight_max + self.reads_inflight_max
        if (rate := self.requests_per_second_max) is not None:
            turns = int(rate * self.deadline_seconds_max)
            if inflight > turns:
                raise ValueError(
                    f"requests_per_second_max={rate}: only {turns} requests begin within "
                    f"deadline_seconds_max={format_duration(self.deadline_seconds_max)}, so that "
                    f"the last of {inflight} in flight (writes_inflight_max and reads_inflight_max "
                    "together) would never be sent in time; lower these, or raise one of the others"
                )
        try:
            check(self.url, self, chosen_backend(self.url, self))
        except AccessError as error:
            raise ValueError(str(error)) from error
        return self

    def secrets(self) -> set[str]:
        """Every value that must not be shown."""
        found = super().secrets()
        masked(self.url, found)
        return found

    @property
    def capped(self) -> bool:
        """Whether namespaces have a limit."""
        return self.size_max is not None or self.objects_max is not None

    def has_room(self, num_bytes: int, objects: int) -> bool:
        """Whether a namespace may reach this size until the next collection."""
        beyond = 1 + BEYOND_SHARE
        if self.size_max is not None and num_bytes > beyond * self.size_max:
            return False
        return self.objects_max is None or objects <= beyond * self.objects_max

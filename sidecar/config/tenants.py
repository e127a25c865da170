"""The section `tenants`: names and quotas of tenants.

Invariant: no cache salt is in a `repr`, or in the output of `kvlake config show`.
"""

from __future__ import annotations

import re

from pydantic import Field, field_validator, model_validator

from sidecar.config.types import NAME_PATTERN, Count, Duration, Secret, Section, Size
from sidecar.core import tenants
from sidecar.core.tenants import OTHER, UNSALTED, TenantRules
from sidecar.protocol import tenant_id


class QuotaSettings(Section):
    """Limits of one tenant."""

    host_max: Size | None = Field(default=None, ge=1)
    """Host memory; at the limit, its least recently used chunks are evicted. null: no limit."""
    store_max: Size | None = Field(default=None, ge=1)
    """Bytes in a namespace of the object store; at the limit, nothing more is written."""
    store_objects_max: Count | None = Field(default=None, ge=1)
    """Objects in a namespace of the object store; at the limit, nothing more is written."""
    store_ttl: Duration | None = Field(default=None, ge=1.0)
    """Age at which its chunks are deleted from the object store, unless `store.ttl` is less."""

    def rule(self, default: QuotaSettings) -> tenants.Quota:
        """The quota of one tenant; limits that are null are those of `default`."""
        return tenants.Quota(
            host_bytes_max=self.host_max or default.host_max,
            store_bytes_max=self.store_max or default.store_max,
            store_objects_max=self.store_objects_max or default.store_objects_max,
            store_ttl_seconds=self.store_ttl or default.store_ttl,
        )


class NamedTenantSettings(QuotaSettings):
    """A tenant with a name in metrics, and limits of its own (null: the default's)."""

    salt: Secret | None = Field(default=None, min_length=1)
    """The cache salt of its requests. A secret: take it from the environment."""
    id: str | None = Field(default=None, pattern=r"^[0-9a-f]{16}$")
    """Instead of the salt: its id by `kvlake tenant id`, 16 hexadecimal digits."""

    @model_validator(mode="after")
    def _one_of_the_two(self) -> NamedTenantSettings:
        if (self.salt is None) == (self.id is None):
            raise ValueError("give either salt or id; `kvlake tenant id` prints the id of a salt")
        return self

    @property
    def tenant(self) -> bytes:
        """The tenant's id in messages."""
        if self.salt is not None:
            return tenant_id(self.salt.get_secret_value())
        return bytes.fromhex(self.id or "")


class TenantsSettings(Section):
    """Quotas. Requests with the same cache salt are one tenant."""

    default: QuotaSettings = Field(default_factory=QuotaSettings)
    """Limits of each tenant; all requests without a cache salt are one tenant."""
    named: dict[str, NamedTenantSettings] = Field(default_factory=dict[str, NamedTenantSettings])
    """Tenants by name. Metrics sum up the others as `other`."""

    @field_validator("named")
    @classmethod
    def _distinct(cls, value: dict[str, NamedTenantSettings]) -> dict[str, NamedTenantSettings]:
        owners: dict[bytes, str] = {}
        for name, tenant in value.items():
            if not re.match(NAME_PATTERN, name) or name in (UNSALTED, OTHER):
                raise ValueError(
                    f"{name!r} cannot name a tenant; use 1 to 64 letters, digits, '.', '_' or "
                    f"'-', other than {UNSALTED!r} and {OTHER!r}"
                )
            other = owners.setdefault(tenant.tenant, name)
            if other != name:
                raise ValueError(f"{other!r} and {name!r} are the same tenant; keep one of them")
        return value

    def rules(self) -> TenantRules:
        """The limits in the engine's form."""
        return TenantRules(
            default=self.default.rule(QuotaSettings()),
            named={one.tenant: (name, one.rule(self.default)) for name, one in self.named.items()},
        )

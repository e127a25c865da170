"""The section `tenants`: whose chunks may take how much, and what tenants are called.

Owns this section. Does not own the rules that the engine takes from it (`sidecar/core/tenants.py`).
Invariant: no cache salt is in a `repr`, or in what `kvlake config show` prints.
"""

from __future__ import annotations

import re
from typing import Final

from pydantic import Field, SecretStr, field_serializer, field_validator, model_validator

from sidecar.config.section import Section
from sidecar.config.types import Count, Duration, Size
from sidecar.config.yaml_file import MASK
from sidecar.core import tenants
from sidecar.core.tenants import OTHER, UNSALTED, TenantRules
from sidecar.protocol import tenant_id

_NAME: Final = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")


class QuotaSettings(Section):
    """What one tenant may hold."""

    host_max: Size | None = Field(default=None, ge=1)
    """Host memory; at it, the tenant's own least recently used chunks make room. null: no limit."""
    store_max: Size | None = Field(default=None, ge=1)
    """Bytes in a namespace of the object store; at it, its chunks are written no more."""
    store_objects_max: Count | None = Field(default=None, ge=1)
    """Objects in a namespace of the object store; at it, its chunks are written no more."""
    store_ttl: Duration | None = Field(default=None, ge=1.0)
    """Age at which its chunks are deleted from the object store, where `store.ttl` is not less."""

    def rule(self, default: QuotaSettings) -> tenants.Quota:
        """What holds for one tenant, with another's limits in place of those that are null."""
        return tenants.Quota(
            host_bytes_max=self.host_max or default.host_max,
            store_bytes_max=self.store_max or default.store_max,
            store_objects_max=self.store_objects_max or default.store_objects_max,
            store_ttl_seconds=self.store_ttl or default.store_ttl,
        )


class NamedTenantSettings(QuotaSettings):
    """A tenant that has a name in metrics and may have limits of its own (null: the default's)."""

    salt: SecretStr | None = Field(default=None, min_length=1)
    """The cache salt of its requests: a secret, so take it from the environment."""
    id: str | None = Field(default=None, pattern=r"^[0-9a-f]{16}$")
    """Instead of the salt: what `kvlake tenant id` prints for it, 16 hexadecimal digits."""

    @model_validator(mode="after")
    def _one_of_the_two(self) -> NamedTenantSettings:
        if (self.salt is None) == (self.id is None):
            raise ValueError("give either salt or id; `kvlake tenant id` makes an id of a salt")
        return self

    @field_serializer("salt", when_used="json")
    def _mask(self, value: SecretStr | None) -> str | None:
        return None if value is None else MASK

    @property
    def tenant(self) -> bytes:
        """What the tenant is called in messages."""
        if self.salt is not None:
            return tenant_id(self.salt.get_secret_value())
        return bytes.fromhex(self.id or "")


class TenantsSettings(Section):
    """Whose chunks may take how much. Requests with one cache salt are one tenant."""

    default: QuotaSettings = Field(default_factory=QuotaSettings)
    """Limits of each tenant; requests without a cache salt count as one tenant together."""
    named: dict[str, NamedTenantSettings] = Field(default_factory=dict[str, NamedTenantSettings])
    """Tenants by name. Those that are not here are told together, as `other`."""

    @field_validator("named")
    @classmethod
    def _distinct(cls, value: dict[str, NamedTenantSettings]) -> dict[str, NamedTenantSettings]:
        owners: dict[bytes, str] = {}
        for name, tenant in value.items():
            if not _NAME.match(name) or name in (UNSALTED, OTHER):
                raise ValueError(
                    f"{name!r} cannot name a tenant; use 1 to 64 letters, digits, '.', '_' or "
                    f"'-', other than {UNSALTED!r} and {OTHER!r}"
                )
            other = owners.setdefault(tenant.tenant, name)
            if other != name:
                raise ValueError(f"{other!r} and {name!r} are the same tenant; keep one of them")
        return value

    def rules(self) -> TenantRules:
        """The limits as the engine takes them."""
        return TenantRules(
            default=self.default.rule(QuotaSettings()),
            named={one.tenant: (name, one.rule(self.default)) for name, one in self.named.items()},
        )

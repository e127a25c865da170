"""What `du`, `ls` and `gc` share: the configured object store, its namespaces and its tenants."""

import re
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import anyio

from sidecar.catalog.garbage_collector import namespaces
from sidecar.cli.console import CommandError, NoAnswer
from sidecar.config.model import Config
from sidecar.core.tenants import Tenants
from sidecar.errors import StartError
from sidecar.service.store_stack import open_store
from tiers.catalog.names import NAMESPACE_CHARACTERS
from tiers.catalog.scan import Superseded
from tiers.catalog.usage import UNKNOWN_TENANT, word_of
from tiers.errors import TierError, TierUnavailable
from tiers.store.object_tier import ObjectTier

TENANTS_SHOWN_MAX: Final = 1000
"""Tenants of a namespace that a table names, the largest ones."""
_T = TypeVar("_T")


def run(config: Config, command: Callable[[ObjectTier], Awaitable[_T]]) -> _T:
    """Carry out a command on the configured store. Raises `CommandError`."""
    settings = config.store
    if settings is None:
        raise CommandError(
            "the built-in defaults have no store; give the sidecar's own file: --config FILE"
            if config.file is None
            else f"{config.file} has no section store; give the sidecar's own file with --config"
        )

    async def main() -> _T:
        store = open_store(settings)
        try:
            return await command(store)
        finally:
            with anyio.CancelScope(shield=True):
                await store.close()

    try:
        return anyio.run(main)
    except StartError as error:
        raise CommandError(str(error)) from error
    except (TierError, Superseded) as error:
        # Scripts try again, or do not, by the exit code.
        lasts = isinstance(error, TierUnavailable) and not error.retryable
        raise (CommandError if lasts else NoAnswer)(str(error)) from error


async def find_namespaces(store: ObjectTier, digits: str | None) -> list[str]:
    """Folders of all namespaces, or of the one whose name begins with `digits`.

    Raises `CommandError`.
    """
    found = await namespaces(store)
    prefixes = [one for one in found if namespace_of(one).startswith(digits or "")]
    if digits is not None and len(prefixes) != 1:
        known = ", ".join(map(namespace_of, found)) or "none at all"
        raise CommandError(
            f"namespace {digits!r}: {len(prefixes)} of the store's namespaces begin with it; "
            f"give one of them, up to {NAMESPACE_CHARACTERS} digits: {known}"
        )
    return prefixes


def namespace_of(prefix: str) -> str:
    """The name of a namespace by its folder."""
    return prefix.rpartition("/")[2]


class TenantNames:
    """Names of tenants by the configuration."""

    def __init__(self, config: Config) -> None:
        names = Tenants(config.tenants.rules()).names
        self._names = {word_of(UNKNOWN_TENANT): "unknown"}
        self._names |= {word_of(tenant): name for tenant, name in names.items()}

    def name(self, tenant: bytes) -> str:
        """The name of a tenant, or its id."""
        return self._names.get(word_of(tenant)) or tenant.hex()

    def word(self, name: str) -> int:
        """The number of the tenant with this name or id. Raises `CommandError`."""
        words = {known: word for word, known in self._names.items()}
        if name in words:
            return words[name]
        if not re.fullmatch("[0-9a-f]{16}", name):
            raise CommandError(
                f"tenant {name!r}: known names are {', '.join(sorted(words))}; give one of these, "
                "or an id of 16 hexadecimal digits"
            )
        return int(name, 16)

"""A real sidecar whose status says of every chunk in which tiers it is.

`python -m tests.e2e.telling_sidecar serve ...` is `kvlake serve ...`, but for one more entry of
`/status`: `directory`, with the group and name of each chunk by the medium that events call it by.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING
from unittest.mock import patch

from sidecar import cli
from sidecar.events.records import MEDIUM_CPU, MEDIUM_STORAGE, name_of
from sidecar.observe.status import SidecarStatus

if TYPE_CHECKING:
    from sidecar.service.dispatcher import Dispatcher


def directory_of(dispatcher: Dispatcher) -> dict[str, list[tuple[int | None, str]]]:
    """What each tier holds, as engines find it."""
    held: dict[str, list[tuple[int | None, str]]] = {MEDIUM_CPU: [], MEDIUM_STORAGE: []}
    for realm in dispatcher.engine.directory.realms.values():
        group = dispatcher.realms[realm.realm_id].group
        hosted = [name_of(key) for key in realm.chunks if realm.flags(key)[0]]
        stored = [name for name, _ in realm.stored.names() if realm.in_store(name)]
        held[MEDIUM_CPU] += [(group, name.hex()) for name in hosted]
        held[MEDIUM_STORAGE] += [(group, name.hex()) for name in stored]
    return held


def main() -> int:
    """Be `kvlake`."""
    document = SidecarStatus.document

    def told(self: SidecarStatus) -> dict[str, object]:
        return {**document(self), "directory": directory_of(self._dispatcher)}

    with patch.object(SidecarStatus, "document", told):
        return cli.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())

"""Where a connector looks for a sidecar that nobody named.

Owns the list. Does not own where a sidecar is (`runtime.directory`), nor looking.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

SERVICE_DIRECTORY: Final = "/run/kvlake"
"""`runtime.directory` of deploy/systemd/kvlake.service."""


def sockets_of(given: str | None) -> tuple[str, ...]:
    """Where the sidecar is looked for: the one place that is given, or the default ones in order.

    A sidecar of this user's own comes first: that of a login shell is in `XDG_RUNTIME_DIR`, which a
    service or a container may lack. Then that of a service manager, which serves several users.
    """
    if given:
        return (given,)
    bases = [f"/tmp/kvlake-{os.getuid()}", SERVICE_DIRECTORY]  # noqa: S108 (its owner is checked)
    own = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    if Path(own).is_dir():
        bases.insert(0, f"{own}/kvlake")
    return tuple(f"{base}/default/attach.sock" for base in bases)

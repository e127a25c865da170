"""Real object-store servers for tests: SeaweedFS and moto, on the loopback address.

They live in `sidecar.demo.servers`, because `kvlake demo` starts one too and a product imports no
tests. This is the name by which tests know them.
"""

from __future__ import annotations

from sidecar.demo.servers import (
    HOST,
    S3Server,
    ServerFailed,
    free_ports,
    moto_server,
    s3_server,
)

__all__ = ["HOST", "S3Server", "ServerFailed", "free_ports", "moto_server", "s3_server"]

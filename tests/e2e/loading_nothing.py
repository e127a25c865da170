"""A real sidecar whose loads copy nothing into poisoned memory, and are answered as if they had.

`python -m tests.e2e.loading_nothing serve ...` is `kvlake serve ...` otherwise. Memory that nobody
poisoned may hold what a load would bring: here it always does, for such a load copies.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING
from unittest.mock import patch

import numpy as np

from sidecar import cli
from sidecar.demo.engine import POISON
from tiers.kv.copy import CopyPlan, ignore

if TYPE_CHECKING:
    from tiers.kv.copy import BlockIds, Visit
    from tiers.kv.layout import Bytes

copy = CopyPlan.scatter


def scatter(
    plan: CopyPlan, memory: Bytes, block_ids: BlockIds, payload: Bytes, *, visit: Visit = ignore
) -> None:
    """Have the payload verified, and leave memory that is all poison as it is."""
    held = np.empty_like(payload)
    plan.gather(memory, block_ids, held)
    if (held == POISON).all():
        visit(payload.data)
    else:
        copy(plan, memory, block_ids, payload, visit=visit)


def main() -> int:
    """Be `kvlake`."""
    with patch.object(CopyPlan, "scatter", scatter):
        return cli.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())

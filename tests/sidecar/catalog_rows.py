"""Columns of the catalog's rows, made from single rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sidecar.core.stored_table import KEY_BYTES, ListedRow, ListedRows


def listed_rows(rows: Sequence[ListedRow]) -> ListedRows:
    """The columns of these rows."""
    masks = tuple(dict.fromkeys(row.mask for row in rows))
    number = {mask: index for index, mask in enumerate(masks)}
    joined = b"".join([row.key for row in rows])
    return ListedRows(
        keys=np.frombuffer(joined, dtype=np.uint8).reshape(len(rows), KEY_BYTES),
        masks=masks,
        mask_ids=np.array([number[row.mask] for row in rows], dtype=np.intp),
        written_at=np.array([row.written_at for row in rows], dtype=np.int64),
        withdrawn=np.array([row.withdrawn for row in rows], dtype=np.bool_),
    )

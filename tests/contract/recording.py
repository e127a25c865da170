"""The connector, with a word in a file for each call of a hook (`calls.py` says in which order).

`RecordingConnector` is loaded by an engine in place of `KVLakeConnector`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from connector.vllm import KVLakeConnector
from tests.contract.base import OVERRIDDEN
from tests.contract.calls import FOLDER

QUIET: Final = {
    # Asked at any time and any number of times.
    "__init__",
    "requires_kv_delivery",
    "has_pending_block_frees",
    "has_pending_push_work",
    "shutdown",
    "reset_cache",
}


class RecordingConnector(KVLakeConnector):
    """Writes down which hook is called; else the connector as it is."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        place = Path(os.environ[FOLDER]) / f"{role.name.lower()}-{os.getpid()}"
        # Unbuffered: the process may be killed.
        self._calls = place.open("ab", buffering=0)


def _recorded(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def call(self: RecordingConnector, *args: Any, **kwargs: Any) -> Any:
        self._calls.write(f"{name} ".encode())
        return hook(self, *args, **kwargs)

    return call


for _name in (*OVERRIDDEN, "request_finished_all_groups"):
    _hook = vars(KVLakeConnector).get(_name)
    if _name not in QUIET and callable(_hook):
        setattr(RecordingConnector, _name, _recorded(_name, _hook))

"""What a worker has loaded of LoRA adapters: a workaround, for vLLM says it to nobody.

vLLM 0.31 to 0.33 read an adapter's folder whenever it is needed and not in memory: for `add_lora`,
for the first request, after it made room for another (`max_cpu_loras`), in place for
`load_inplace`. `WorkerLoRAManager._load_adapter` is the one function that does, on all paths and in
both managers. It is wrapped, and the files are read beside it.

Owns what is known of the adapters of this process. An adapter whose files changed while vLLM read
them is one that nobody knows.
"""

from __future__ import annotations

import weakref
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

from connector.identity.adapters import files_identity
from connector.identity.weights import WeightsUnknown, read_adapter, same_adapter

if TYPE_CHECKING:
    from connector.identity.weights import AdapterFiles

UNKNOWN: Final = "unknown"
_watching: weakref.WeakSet[LoadedAdapters] = weakref.WeakSet()
_wrappers: weakref.WeakSet[Any] = weakref.WeakSet()
"""Functions of ours in vLLM's place."""


class LoadedAdapters:
    """Adapters of one worker, by vLLM's numbers for them."""

    def __init__(self) -> None:
        self._read: dict[str, AdapterFiles] = {}
        self._loaded: dict[int, str] = {}
        self._untold: dict[tuple[int, str, bool], int] = {}
        self._mixed: set[int] = set()
        """Numbers that were of other files before, though nobody said that they be replaced."""

    def watch(self) -> None:
        """Take in what vLLM loads in this process from now on."""
        _watching.add(self)
        _wrap()

    def begin(self, lora: Any) -> AdapterFiles | None:
        """The files of an adapter before vLLM reads them."""
        return self._files(lora)

    def note(self, lora: Any, before: AdapterFiles | None) -> None:
        """Take in that vLLM has read an adapter, whose files were these `before` it did."""
        number = int(lora.lora_int_id)
        after = self._files(lora)
        files = UNKNOWN
        if before is not None and after is not None and before.digest == after.digest:
            files = files_identity(after.digest, lora)
        known = self._loaded.get(number)
        if known == files != UNKNOWN:
            return
        if known is not None and not lora.load_inplace:
            self._mixed.add(number)
        self._loaded[number] = files
        for told in [one for one in self._untold if one[0] == number]:
            del self._untold[told]
        self._untold[number, UNKNOWN if number in self._mixed else files, lora.load_inplace] = 1

    def _files(self, lora: Any) -> AdapterFiles | None:
        path = str(lora.lora_path)
        try:
            known = self._read.get(path)
            if known is None or not same_adapter(known):
                known = self._read[path] = read_adapter(path)
        except (WeightsUnknown, OSError):
            return None
        return known

    def holds(self, number: int, files: str) -> bool:
        """Whether what is computed with this number is of these files; so it is without one."""
        return not number or (number not in self._mixed and self._loaded.get(number) == files)

    def take(self) -> dict[tuple[int, str, bool], int]:
        """What was loaded since the last call: number, files, whether in place; on this rank."""
        untold, self._untold = self._untold, {}
        return untold


def _wrap() -> None:
    # Not at import: vLLM imports the connector in processes that have no adapters.
    from vllm.lora.worker_manager import WorkerLoRAManager

    managers: Any = WorkerLoRAManager
    load = managers._load_adapter  # noqa: SLF001 (the one place that all loads pass)
    if load in _wrappers:
        return

    @wraps(load)
    def load_adapter(self: Any, lora_request: Any) -> Any:
        watching = [(one, one.begin(lora_request)) for one in _watching]
        adapter = load(self, lora_request)
        for one, before in watching:
            one.note(lora_request, before)
        return adapter

    _wrappers.add(load_adapter)
    managers._load_adapter = load_adapter  # noqa: SLF001 (see above)

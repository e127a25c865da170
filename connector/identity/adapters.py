"""LoRA adapters: which files a request's adapter has, and which files the workers loaded.

An adapter is what its files hold. The scheduler reads them when the first request arrives, workers
before that (`add_lora`), or again after vLLM dropped the adapter for others (`max_cpu_loras`). So
two things are checked: before each load the files must be those that the request's keys were made
of, and the workers must report that they loaded the same.

Invariants: nothing is loaded for a request before all ranks reported its adapter. If files change
under a `lora_int_id`, nothing of that number is cached any more, because vLLM continues from its
own KV of the old files.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from connector.identity.weights import AdapterFiles, WeightsUnknown, read_adapter

logger = logging.getLogger("vllm.kvlake")

REMEDY: Final = "give other weights another path and another lora_int_id, or load them in place"
UNKNOWN: Final = "unknown"
"""The digest of files that changed while vLLM read them."""


def files_identity(digest: str, lora: Any) -> str:
    """The files, and how vLLM is told to read them."""
    return digest + ",3d" * bool(lora.is_3d_lora_weight)


class Adapters:
    """The scheduler's side: the adapters of an engine, by `lora_int_id`.

    `void` makes requests of a number void, except those that have these files.
    """

    def __init__(self, world_size: int, void: Callable[[int, str], None]) -> None:
        self._world_size = world_size
        self._void = void
        self._read: dict[tuple[str, str, int], AdapterFiles] = {}
        self._refused: set[tuple[str, str, int]] = set()
        self._stopped: set[int] = set()
        self._expected: dict[int, str] = {}
        """The files that the next request of each number is computed with."""
        self._expected_ever: dict[int, set[str]] = {}
        self._loaded: dict[int, str] = {}
        """What all ranks loaded last for each number."""
        self._loaded_in_place: dict[int, str] = {}

    def of(self, lora: Any) -> str | None:
        """The files of an arriving request's adapter, "" without one; None: it is not cached."""
        if lora is None:
            return ""
        number = int(lora.lora_int_id)
        if number in self._stopped:
            return None
        try:
            files = self._files(lora)
        except (WeightsUnknown, OSError) as error:
            self._refuse(lora, str(error))
            return None
        if files is None:
            return None
        expected = self._expected.setdefault(number, files)
        if expected != files and not (lora.load_inplace or self._replaced(number, files)):
            # vLLM keeps using what it has, unless it dropped that for others.
            self._refuse(lora, f"lora_int_id {number} was another adapter's before")
            return None
        self._expected[number] = files
        self._expected_ever.setdefault(number, set()).add(files)
        loaded = self._loaded.get(number, files)
        if loaded != files and not lora.load_inplace:
            self._stop(number, f"vLLM loaded other files for adapter {lora.lora_name}")
            return None
        return files

    def unchanged(self, lora: Any, files: str) -> bool:
        """Whether the files of a request's adapter still are those that its keys were made of."""
        if lora is None:
            return True
        try:
            return lora.lora_int_id not in self._stopped and self._files(lora) == files
        except (WeightsUnknown, OSError):
            return False

    def confirmed(self, number: int, files: str) -> bool:
        """Whether all ranks reported these files, and no others, for this number."""
        return not number or self._loaded.get(number) == files

    def loaded(self, reports: Mapping[tuple[int, str, bool], int]) -> None:
        """Take in what ranks loaded: (number, files, whether in place), and on how many ranks."""
        for number in {number for number, _, _ in reports}:
            found = {key[1:]: ranks for key, ranks in reports.items() if key[0] == number}
            (files, in_place), ranks = next(iter(found.items()))
            if len(found) > 1 or ranks != self._world_size:
                # The KV of one rank belongs to other files than that of another.
                files, in_place = "", False
            self._loaded[number] = files
            if in_place:
                self._loaded_in_place[number] = files
                self._expected_ever.setdefault(number, set()).add(files)
            if number not in self._expected or number in self._stopped:
                continue
            if files not in self._expected_ever[number]:
                self._stop(number, f"vLLM loaded other files for lora_int_id {number}")
            elif files != self._expected[number]:
                self._void(number, files)

    def _files(self, lora: Any) -> str | None:
        """The files of an adapter as they are now; None if that ended its caching."""
        place = (lora.lora_name, lora.lora_path, int(lora.lora_int_id))
        if getattr(lora, "tensorizer_config_dict", None):
            raise WeightsUnknown("its tensors are streamed from elsewhere")
        known = self._read.get(place)
        found = self._read[place] = read_adapter(lora.lora_path, known)
        files = files_identity(found.digest, lora)
        unchanged = known is None or known.digest == found.digest
        if unchanged or lora.load_inplace or self._replaced(place[2], files):
            return files
        self._stop(place[2], f"files of adapter {lora.lora_name} in {lora.lora_path} were changed")
        return None

    def _replaced(self, number: int, files: str) -> bool:
        """Whether these files were loaded in place of others, and are what is loaded."""
        return self._loaded.get(number) == self._loaded_in_place.get(number) == files

    def _stop(self, number: int, reason: str) -> None:
        self._stopped.add(number)
        self._void(number, "")
        logger.warning(
            "kvlake: lora_int_id %d is not cached any more: %s; %s", number, reason, REMEDY
        )

    def _refuse(self, lora: Any, reason: str) -> None:
        place = (lora.lora_name, lora.lora_path, int(lora.lora_int_id))
        if place not in self._refused:
            self._refused.add(place)
            logger.warning("kvlake: adapter %s is not cached: %s", lora.lora_name, reason)


class LoadedAdapters:
    """The adapters that one worker loaded, by `lora_int_id`. Listens to `watch_adapter_loads`."""

    def __init__(self) -> None:
        self._read: dict[str, AdapterFiles] = {}
        self._loaded: dict[int, str] = {}
        self._unreported: dict[tuple[int, str, bool], int] = {}
        self._mixed: set[int] = set()
        """Numbers that had other files before, without `load_inplace`."""

    def begin(self, lora: Any) -> AdapterFiles | None:
        """The files of an adapter before vLLM reads them; None if they cannot be told."""
        path = str(lora.lora_path)
        try:
            found = self._read[path] = read_adapter(path, self._read.get(path))
        except (WeightsUnknown, OSError):
            return None
        return found

    def note(self, lora: Any, before: AdapterFiles | None) -> None:
        """Take in that vLLM has read an adapter; `before` is from `begin`."""
        number = int(lora.lora_int_id)
        after = self.begin(lora)
        files = UNKNOWN
        if before is not None and after is not None and before.digest == after.digest:
            files = files_identity(after.digest, lora)
        known = self._loaded.get(number)
        if known == files != UNKNOWN:
            return
        if known is not None and not lora.load_inplace:
            self._mixed.add(number)
        self._loaded[number] = files
        others = {key: ranks for key, ranks in self._unreported.items() if key[0] != number}
        reported = UNKNOWN if number in self._mixed else files
        self._unreported = others | {(number, reported, lora.load_inplace): 1}

    def holds(self, number: int, files: str) -> bool:
        """Whether this worker computes with these files; always true without an adapter."""
        return not number or (number not in self._mixed and self._loaded.get(number) == files)

    def take(self) -> dict[tuple[int, str, bool], int]:
        """What was loaded since the last call: (number, files, whether in place), on this rank."""
        unreported, self._unreported = self._unreported, {}
        return unreported

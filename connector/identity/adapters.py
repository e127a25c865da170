"""LoRA adapters as the scheduler role knows them: what tells one from others, and which are cached.

An adapter is what its files hold. The scheduler reads them when the first request comes, and vLLM's
workers read them at other times: before that request (`add_lora`), or again, once an adapter had to
make room for others. So two things are checked. Before each request the files must be those that
were read, and what the workers say that they loaded (`loaded_adapters.py`) must be the same.

Owns which numbers of vLLM's are cached. Does not own requests: it says which are void.

Invariants: nothing is loaded for a request before all ranks said that they have its adapter. Where
files changed under a number, nothing of that number is cached any more, for vLLM goes on from its
own KV of before.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from connector.identity.weights import WeightsUnknown, read_adapter, same_adapter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from connector.identity.weights import AdapterFiles

logger = logging.getLogger("vllm.kvlake")

REMEDY: Final = "give other weights another path and another lora_int_id, or load them in place"


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter of one request: `files` as workers know it, `identity` as keys do."""

    files: str = ""
    identity: str = ""


NO_ADAPTER: Final = Adapter()


def files_identity(digest: str, lora: Any) -> str:
    """What was loaded: the files, and how vLLM was told to read them."""
    return digest + ",3d" * bool(lora.is_3d_lora_weight)


class Adapters:
    """Which adapters there are, by vLLM's numbers for them.

    Args:
        settings: how adapters are applied, where that is not as always.
        world_size: ranks that say what they loaded.
        void: makes requests of a number void, but for those that have these files.
    """

    def __init__(self, settings: str, world_size: int, void: Callable[[int, str], None]) -> None:
        self._settings = settings
        self._world_size = world_size
        self._void = void
        self._read: dict[tuple[str, str, int], AdapterFiles] = {}
        self._refused: set[tuple[str, str, int]] = set()
        self._stopped: set[int] = set()
        self._expected: dict[int, str] = {}
        """Of each number, the files that its next request is computed with."""
        self._expected_ever: dict[int, set[str]] = {}
        self._loaded: dict[int, str] = {}
        """Of each number, what all ranks loaded last."""
        self._loaded_in_place: dict[int, str] = {}

    def of(self, lora: Any) -> Adapter | None:
        """The adapter of a request that arrives; None if it is not cached."""
        if lora is None:
            return NO_ADAPTER
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
            # vLLM goes on with what it has, unless it gave that up for others.
            self._refuse(lora, f"lora_int_id {number} was another's before")
            return None
        self._expected[number] = files
        self._expected_ever.setdefault(number, set()).add(files)
        loaded = self._loaded.get(number, files)
        if loaded != files and not lora.load_inplace:
            self._stop(number, f"vLLM loaded other files for adapter {lora.lora_name}")
            return None
        return Adapter(files, files + self._settings)

    def unchanged(self, lora: Any, files: str) -> bool:
        """Whether the files of a request's adapter still are those that its keys were made of."""
        if lora is None:
            return True
        try:
            return lora.lora_int_id not in self._stopped and self._files(lora) == files
        except (WeightsUnknown, OSError):
            return False

    def confirmed(self, number: int, files: str) -> bool:
        """Whether all ranks said that they loaded these files for this number, and no others."""
        return not number or self._loaded.get(number) == files

    def loaded(self, reports: Mapping[tuple[int, str, bool], int]) -> None:
        """Take in what ranks loaded: number, files, whether in place; and on how many ranks."""
        for number in {number for number, _, _ in reports}:
            found = {key[1:]: ranks for key, ranks in reports.items() if key[0] == number}
            (files, in_place), ranks = next(iter(found.items()))
            if len(found) > 1 or ranks != self._world_size:
                # What the KV of one rank goes with is not what that of another does.
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
        """The files of an adapter as they are now; None where that ended its caching."""
        place = (lora.lora_name, lora.lora_path, int(lora.lora_int_id))
        known = self._read.get(place)
        if known is not None and same_adapter(known):
            return files_identity(known.digest, lora)
        if getattr(lora, "tensorizer_config_dict", None):
            raise WeightsUnknown("its tensors are streamed from elsewhere")
        found = self._read[place] = read_adapter(lora.lora_path)
        files = files_identity(found.digest, lora)
        if (
            known is None
            or known.digest == found.digest
            or lora.load_inplace
            or self._replaced(place[2], files)
        ):
            return files
        self._stop(place[2], f"files of adapter {lora.lora_name} in {lora.lora_path} were changed")
        return None

    def _replaced(self, number: int, files: str) -> bool:
        """Whether these files came in place of others, and are what is loaded."""
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

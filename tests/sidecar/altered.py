"""`kvlake` with other constants, killed in the middle of what it does to its store, or counted.

`python -m tests.sidecar.altered COMMAND ...` is `kvlake COMMAND ...`, but for what variables of
the environment say:

* `KVLAKE_TEST_CONSTANTS`: a JSON object of the product's names and what they stand for here;
* `KVLAKE_TEST_KILL`: `VERB PART MOMENT`. The process kills itself (SIGKILL) at its first request to
  the store of this verb for a name with this part, `before` or `after` the store carried it out;
* `KVLAKE_TEST_DEADLINE`: the seconds that a request to the store may take, whatever the
  configuration says, which is only taken with a grace that is longer;
* `KVLAKE_TEST_OBJECTS`: a file that gets a line with the number of Python's objects, garbage aside,
  whenever the process gets `COUNT_SIGNAL`.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sidecar import cli
from tests import places
from tiers.store.middleware import Verb, Wrapper

if TYPE_CHECKING:
    from tiers.store.object_tier import ObjectTier

T = TypeVar("T")

MODULE = "tests.sidecar.altered"
CONSTANTS = "KVLAKE_TEST_CONSTANTS"
KILL = "KVLAKE_TEST_KILL"
DEADLINE = "KVLAKE_TEST_DEADLINE"
OBJECTS = "KVLAKE_TEST_OBJECTS"
COUNT_SIGNAL = signal.SIGRTMIN


class Killer(Wrapper):
    """Kills its process at one request."""

    def __init__(self, inner: ObjectTier, verb: str, part: str, moment: str) -> None:
        super().__init__(inner)
        self._verb = verb
        self._part = part
        self._moment = moment

    async def _around(self, verb: Verb, name: str, call: Callable[[], Awaitable[T]]) -> T:
        struck = verb == self._verb and self._part in name
        if struck and self._moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = await call()
        if struck:
            os.kill(os.getpid(), signal.SIGKILL)
        return result


def main() -> int:
    """The command."""
    for name, value in json.loads(os.environ.get(CONSTANTS, "{}")).items():
        places.replace(name, value)
    open_store: Any = places.find("open_store").value
    stage, seconds = os.environ.get(KILL), os.environ.get(DEADLINE)

    def opened(settings: Any, wrap_store: Any = None) -> Any:
        if seconds is not None:
            settings = settings.model_copy(update={"deadline_seconds_max": float(seconds)})
        if stage is None:
            return open_store(settings, wrap_store)
        assert wrap_store is None, "only one is put in between"
        return open_store(settings, lambda tier: Killer(tier, *stage.split()))

    places.replace("open_store", opened)
    if (path := os.environ.get(OBJECTS)) is not None:

        def count(*_: object) -> None:
            gc.collect()
            with Path(path).open("a") as file:
                file.write(f"{len(gc.get_objects())}\n")

        signal.signal(COUNT_SIGNAL, count)
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())

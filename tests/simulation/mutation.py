"""One promise of the code broken on purpose, while a life of the simulation lasts.

Owns putting a mutation into the running code: a function's source with one piece replaced, compiled
in the place of the function. Where the code has moved on so that the piece is not there, once, that
is an error: a mutation that changes nothing proves nothing. Does not own which promises there are
(`promises/`).
"""

from __future__ import annotations
import __future__

import contextlib
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests import places


@dataclass(frozen=True, slots=True)
class Mutation:
    """One promise broken: in `place` ("Class.function"), `old` becomes `new`.

    `often` names kinds of faults that bring it to light sooner, and `several groups` where models
    must have them. `seed` is a life in which it was noticed when this was written: where the code
    has moved on, others will do as well.
    """

    name: str
    place: str
    old: str
    new: str
    often: tuple[str, ...] = ()
    seed: int = 0

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """While this lasts, the code is mutated."""
        place = places.find(self.place)
        with places.patched(self.place, self._mutated(place)):
            yield

    def _mutated(self, place: places.Place) -> Any:
        original = vars(place.owner)[place.attribute]
        if not callable(original) and not isinstance(original, property | staticmethod):
            raise TypeError(f"{self.place} is no function: {original!r}")
        function: Any = original.fget if isinstance(original, property) else original
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
        if source.count(self.old) != 1:
            raise LookupError(
                f"mutation {self.name!r}: {self.place} has {self.old!r} {source.count(self.old)} "
                "times, not once; follow the code in tests/simulation/promises/"
            )
        code = compile(
            source.replace(self.old, self.new),
            f"<{self.name}>",
            "exec",
            flags=__future__.annotations.compiler_flag,
            dont_inherit=True,
        )
        made: dict[str, Any] = {}
        exec(code, vars(place.module), made)
        return made[place.attribute]

"""The simulation's own proof: the code with one promise broken on purpose must be noticed.

Owns the list of all mutations; they stand by what they break in `promises/`.
"""

from __future__ import annotations

from tests.simulation.mutation import Mutation
from tests.simulation.promises.clients import CLIENTS
from tests.simulation.promises.memory import MEMORY
from tests.simulation.promises.store import STORE
from tests.simulation.promises.work import WORK

MUTATIONS = (*MEMORY, *WORK, *STORE, *CLIENTS)


def named(name: str) -> Mutation:
    """The mutation of that name."""
    found = [mutation for mutation in MUTATIONS if mutation.name == name]
    if not found:
        raise ValueError(f"{name!r} is no mutation")
    return found[0]

"""The process that fuzzes one target, guided by coverage: `python -m tests.fuzz.guided NAME ...`.

What stands after the name goes to libFuzzer. The code under test is imported here and nowhere
before, because atheris counts branches in modules that it sees being imported.
"""

from __future__ import annotations

import random
import sys

import atheris

MODULES = ["sidecar", "tiers"]
"""An input that reaches something new in these is kept and built upon."""

with atheris.instrument_imports(include=MODULES):
    from tests.fuzz.targets import TARGETS


def main() -> None:
    """Fuzz; ends with libFuzzer's exit code, 0 if nothing was found."""
    target = TARGETS[sys.argv[1]]
    corpus = target.corpus()

    def mutate(data: bytes, bytes_max: int, seed: int) -> bytes:
        chooser = random.Random(seed)
        if chooser.random() < 0.5:
            return bytes(atheris.Mutate(data, bytes_max))
        return target.damage(data, chooser, corpus)[:bytes_max]

    atheris.Setup(sys.argv[1:], target.feed, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()

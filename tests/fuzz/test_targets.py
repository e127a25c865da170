"""Every target against its corpus, and against inputs that a fixed seed makes of it."""

from __future__ import annotations

import random
import resource
import time
from typing import Final

import pytest

from tests.fuzz.mutation import INPUT_BYTES_MAX, damage
from tests.fuzz.targets import TARGETS, Target
from tests.tiers.golden_images import CASES, NAMESPACE, image
from tiers.errors import ChunkCorrupt
from tiers.kv.slot_image import SlotTemplate, inspect_image

pytestmark = pytest.mark.promise("fuzz-targets")

SEED: Final = 20
INPUTS: Final = {"image": 1000, "slot": 1000, "catalog-folder": 400}
INPUTS_DEFAULT: Final = 2000
INPUT_SECONDS_MAX: Final = 20.0
"""Far more than an input takes on a busy machine, far less than one that hangs."""
MEMORY_BYTES_MAX: Final = 512 << 20
"""What all inputs of a target together may add to the process, far less than a bomb takes."""


def feed(target: Target, data: bytes, what: str) -> None:
    started = time.monotonic()
    try:
        target.feed(data)
    except Exception as error:
        raise AssertionError(
            f"{target.name}: {type(error).__name__}: {error}\n{what}: {data[:400]!r}"
        ) from error
    spent = time.monotonic() - started
    assert spent < INPUT_SECONDS_MAX, f"{target.name}: {spent:.0f} s for {what}: {data[:400]!r}"


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))
def test_seeds_and_corpus(target: Target) -> None:
    for number, data in enumerate(target.corpus()):
        feed(target, data, f"corpus input {number}")


@pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))
def test_inputs_made_of_the_corpus(target: Target) -> None:
    before = peak_bytes()
    corpus = target.corpus()
    for number in range(INPUTS.get(target.name, INPUTS_DEFAULT)):
        chooser = random.Random(f"{SEED}-{target.name}-{number}")
        data = target.damage(chooser.choice(corpus), chooser, corpus)
        feed(target, data, f"seed {SEED}-{target.name}-{number}")
        assert len(data) <= INPUT_BYTES_MAX + 4096
    assert peak_bytes() - before < MEMORY_BYTES_MAX


@pytest.mark.parametrize("name", CASES)
def test_a_thousand_corruptions_of_an_image_are_all_found(name: str) -> None:
    layout, num_blocks = CASES[name]
    template = SlotTemplate(layout, num_blocks, NAMESPACE)
    intact = image(name).tobytes()
    others = [image(other).tobytes() for other in CASES]
    tried = 0
    for number in range(1100):
        damaged = damage(intact, random.Random(f"{SEED}-{name}-{number}"), others)
        if damaged == intact:
            continue
        tried += 1
        assert inspect_image(damaged).error is not None, f"seed {SEED}-{name}-{number}"
        with pytest.raises(ChunkCorrupt):
            template.verify(damaged)
    assert tried >= 1000

"""A program that kills itself in the middle of using a pool, again and again, and looks after it.

Run by `test_pool_restart.py` as `python pool_killer.py lines|moments FOLDER SEED`. Children are
forked, so that each costs milliseconds:

* `lines`: the child dies at line number n of the pool's own code, for n = 1, 2, 3...;
* `moments`: the child works for ever and is killed from outside; the next one takes over.

What a slot holds is its tag, repeated. So the successor can tell a slot that is whole from one
that was being filled, without knowing what its predecessor did. A journal in shared memory says
what must be there: set after a slot was sealed, cleared before it is given up.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from tiers.pool import host_pool
from tiers.pool.host_pool import HostPool

PAGE = 4096
PAGES = 48
SIZES = (1, 2, 5)
JOURNAL = mmap.mmap(-1, PAGES)
LINES_STEP = 11
LIVES = 40
POOL_CODE = {str(path) for path in Path(host_pool.__file__).parent.glob("*.py")} | {__file__}


def fill(pool: HostPool, offset: int, pages: int, number: int) -> None:
    tag = number.to_bytes(8, "little") * 2
    pool.set_tag(offset, tag)
    slot = pool.memory[offset : offset + pages * PAGE]
    whole = np.frombuffer(tag * (slot.size // 16), dtype=np.uint8)
    for start in range(0, slot.size, PAGE // 2):
        slot[start : start + PAGE // 2] = whole[start : start + PAGE // 2]
    pool.seal(offset)
    JOURNAL[offset // PAGE] = 1


def give_up(pool: HostPool, offset: int, *, first_unseal: bool) -> None:
    JOURNAL[offset // PAGE] = 0
    if first_unseal:
        pool.unseal(offset)
        pool.memory[offset : offset + 64] = 0xEE
    pool.free(offset)


def look(pool: HostPool) -> dict[int, int]:
    """Check what came back: whole, and no less than the journal says. Offset to pages."""
    found = pool.recovered
    if pool.emptied:
        # Its maker died before it was a pool.
        assert not any(JOURNAL[:]), f"lost everything: {pool.emptied}"
        return {}
    offsets: list[int] = found.offsets.tolist()
    for offset, slot_bytes, tag in zip(offsets, found.slot_bytes.tolist(), found.tags, strict=True):
        slot = pool.memory[offset : offset + slot_bytes].reshape(-1, 16)
        # The last four bits count uses.
        tag[-1] &= 0x0F
        assert (slot == tag).all(), f"the slot at {offset} is torn"
    promised = {place * PAGE for place in range(PAGES) if JOURNAL[place]}
    assert promised <= set(offsets), f"lost {promised - set(offsets)}"
    assert (found.sealed <= found.used).all()
    assert len(set(found.used.tolist())) == len(found), "two slots were used at one moment"
    return dict(zip(offsets, (found.slot_bytes // PAGE).tolist(), strict=True))


def work(pool: HostPool, held: dict[int, int], rng: random.Random, steps: int) -> None:
    classes = {pages: pool.register_class(pages * PAGE) for pages in SIZES}
    for _ in range(steps):
        pages = rng.choice(SIZES)
        offset = pool.allocate(classes[pages])
        while offset is None and held:
            victim = rng.choice(list(held))
            del held[victim]
            give_up(pool, victim, first_unseal=rng.random() < 0.5)
            offset = pool.allocate(classes[pages])
        if offset is None:
            continue
        if rng.random() < 0.1:
            pool.free(offset)
            continue
        fill(pool, offset, pages, rng.getrandbits(60))
        held[offset] = pages
        pool.touch(rng.choice(list(held)), rng.randrange(16))


class LineKiller:
    """Ends the process at the n-th line of the pool's code that runs."""

    def __init__(self, lines: int) -> None:
        self.left = lines

    def __call__(self, frame: FrameType, event: str, arg: Any) -> LineKiller | None:
        if frame.f_code.co_filename not in POOL_CODE:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return self


def child(path: Path, rng: random.Random, lines: int, steps: int) -> None:
    """One life, in a process of its own. Exits with 0 if nothing killed it."""
    code = 1
    try:
        if lines:
            sys.settrace(LineKiller(lines))
        pool = HostPool.open(path, PAGES * PAGE, prefault=False)
        sys.settrace(None)
        held = look(pool)
        if lines:
            sys.settrace(LineKiller(lines))
        work(pool, held, rng, steps)
        code = 0
    except BaseException:
        # Nobody sees what leaves this function.
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def life(path: Path, rng: random.Random, *, lines: int = 0, seconds: float = 0, steps: int) -> bool:
    """Fork one life and see it end. False if it came to its end alive."""
    pid = os.fork()
    if pid == 0:
        child(path, rng, lines, steps)
    if seconds:
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, f"the child failed: {status}"
    return os.WIFSIGNALED(status)


def take_over_and_remove(path: Path) -> None:
    pool = HostPool.open(path, PAGES * PAGE, prefault=False)
    for offset in look(pool):
        pool.free(offset)
    # The books are right: every page can be had again.
    pages = [pool.allocate(pool.register_class(PAGE)) for _ in range(PAGES)]
    assert None not in pages
    pool.close()
    assert not list(path.parent.iterdir())
    JOURNAL[:] = bytes(PAGES)


def by_lines(folder: Path, seed: int) -> int:
    lines, killed = 1 + seed % LINES_STEP, 0
    while life(folder / "pool", random.Random(seed), lines=lines, steps=16):
        take_over_and_remove(folder / "pool")
        lines += LINES_STEP
        killed += 1
    take_over_and_remove(folder / "pool")
    return killed


def by_moments(folder: Path, seed: int) -> int:
    rng = random.Random(seed)
    # Alive long enough once, so that the later ones find something.
    for number in range(LIVES):
        life(
            folder / "pool",
            random.Random(rng.getrandbits(32)),
            seconds=rng.uniform(0.001, 0.03),
            steps=1 << 30,
        )
        if number % 10 == 9:
            take_over_and_remove(folder / "pool")
    return LIVES


if __name__ == "__main__":
    mode = {"lines": by_lines, "moments": by_moments}[sys.argv[1]]
    print(mode(Path(sys.argv[2]), int(sys.argv[3])))

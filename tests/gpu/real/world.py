"""Where the tests and benchmarks of a device run: a machine, its sizes, a sidecar, engines.

Owns the processes. `Gpu` is a machine with a device and torch; `Rehearsal` is the double of
libcuda, with small sizes, on which the same code runs so that it is right when a device is there.
What a rehearsal measures means nothing and is never kept.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, Self

from tests.gpu.child import Child, Process, start
from tests.gpu.double.control import Double
from tests.gpu.layouts import layout_in
from tests.gpu.sidecars import SidecarProcess
from tiers.kv.layout import KVLayout

ANSWER_SECONDS_MAX: Final = 120.0
ENGINE: Final = "from tests.gpu.real import engine"
WATCHER: Final = "from tests.gpu.real.caches import Watcher\nwatcher = Watcher()"
EXPANDABLE: Final = {
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}


@dataclass(frozen=True)
class Sizes:
    """How much is done."""

    fence_rounds: int
    control_rounds: int
    """At most: a control ends with the first round that it tears."""
    kills: int
    copying_seconds: float
    """How long copies run before somebody is killed."""
    seconds_back_max: float
    """Within which a killed worker's memory is back."""
    slack_bytes: int
    """Device memory that may come and go for other reasons meanwhile."""
    pool: str
    cache: dict[str, int] = field(default_factory=dict)
    small_cache: dict[str, int] = field(default_factory=dict)
    """Fits into one piece of an expandable segment."""
    large_cache: dict[str, int] = field(default_factory=dict)
    """Takes many, and time to copy."""
    ranks: int = 8
    """Workers that copy at once, each with a cache of this shape."""
    rank_rounds: int = 3
    rank_cache: dict[str, int] = field(default_factory=dict)
    shapes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Caches of models, by name."""


SHAPES: Final[dict[str, dict[str, Any]]] = {
    "8 KV heads of 128 in bfloat16": {
        "order": "BLHNC", "layers": 32, "heads": 8, "content_bytes": 512, "dtype": "bfloat16",
    },
    "the same, layers outermost": {
        "order": "LBHNC", "layers": 32, "heads": 8, "content_bytes": 512, "dtype": "bfloat16",
    },
    "the same, tokens before heads": {
        "order": "LBNHC", "layers": 32, "heads": 8, "content_bytes": 512, "dtype": "bfloat16",
    },
    "8 KV heads of 128 in fp8": {
        "order": "BLHNC", "layers": 32, "heads": 8, "content_bytes": 256, "dtype": "float8_e4m3fn",
    },
    "MLA of 576 in bfloat16": {
        "order": "BLHNC", "layers": 61, "heads": 1, "content_bytes": 1152, "dtype": "bfloat16",
    },
    "MLA of 576 in fp8 with its scales": {
        "order": "LBHNC", "layers": 61, "heads": 1, "content_bytes": 656, "tokens": 64,
        "dtype": "uint8",
    },
    "2 KV heads of 256, padded": {
        "order": "LBHNC", "layers": 10, "heads": 2, "content_bytes": 1024, "dtype": "bfloat16",
        "padding_bytes": 12_288,
    },
}  # fmt: skip
"""Blocks of 16 tokens, but for the one of 64."""

FULL: Final = Sizes(
    fence_rounds=10_000,
    control_rounds=1_000,
    kills=3,
    copying_seconds=1.0,
    seconds_back_max=1.0,
    slack_bytes=64 << 20,
    pool="4GiB",
    cache={"layers": 8, "blocks": 256, "heads": 8, "content_bytes": 256},
    small_cache={"layers": 4, "blocks": 24, "heads": 8, "content_bytes": 256},
    large_cache={"layers": 32, "blocks": 2048, "heads": 8, "content_bytes": 512},
    rank_cache={"layers": 32, "blocks": 256, "heads": 1, "content_bytes": 512},
    shapes=SHAPES,
)
SMALL: Final = Sizes(
    fence_rounds=25,
    control_rounds=200,
    kills=1,
    copying_seconds=0.3,
    seconds_back_max=60.0,
    slack_bytes=0,
    pool="16MiB",
    cache={"layers": 3, "blocks": 24},
    small_cache={"layers": 3, "blocks": 24},
    large_cache={"layers": 4, "blocks": 512},
    ranks=2,
    rank_rounds=1,
    rank_cache={"layers": 3, "blocks": 24, "heads": 1},
    shapes={
        name: shape | {"layers": 3, "heads": min(2, shape["heads"])}
        for name, shape in SHAPES.items()
    },
)


class Place(Protocol):
    """A machine, and how much to do on it."""

    sizes: Sizes
    kind: str
    """How caches are made: torch or bare."""
    real: bool
    size_multiple: int
    """Device memory comes in multiples of it."""

    def env(self, *, first_device: int = 0) -> dict[str, str]:
        """The environment of a process."""

    def start(
        self,
        module: str,
        arguments: Sequence[str | int],
        environment: dict[str, str],
        *,
        piped: bool = False,
    ) -> Process:
        """Start the `main` of a module (`tests.gpu.child.start`)."""

    def slow(self, microseconds_max: int) -> None:
        """Let streams take their time, where there are no kernels to do so."""


class Gpu:
    """This machine's own device."""

    sizes = FULL
    kind = "torch"
    real = True
    size_multiple = 2 << 20
    start: Callable[..., Process] = staticmethod(start)

    def env(self, *, first_device: int = 0) -> dict[str, str]:
        """As it is; the first device is the one that is used."""
        assert first_device == 0
        return dict(os.environ)

    def slow(self, microseconds_max: int) -> None:
        """It takes its time by itself."""


class Apart(Gpu):
    """The same device, each process in namespaces of its own, as in a container.

    The first process has the id `first_pid` in its namespace, the others those after it.
    """

    def __init__(self, first_pid: int) -> None:
        self._pids = itertools.count(first_pid)
        self.start = self._start

    def _start(
        self,
        module: str,
        arguments: Sequence[str | int],
        environment: dict[str, str],
        *,
        piped: bool = False,
    ) -> Process:
        """Start the `main` of a module there."""
        # Text: a number is a descriptor.
        command = [str(next(self._pids)), module, *arguments]
        return start("tests.gpu.real.apart", command, environment, piped=piped)


class Rehearsal:
    """The double."""

    sizes = SMALL
    kind = "bare"
    real = False
    size_multiple = 1 << 16

    def __init__(self, double: Double) -> None:
        self._double = double
        self.start: Callable[..., Process] = double.start

    def env(self, *, first_device: int = 0) -> dict[str, str]:
        """With the double as libcuda."""
        return self._double.env(first_device=first_device)

    def slow(self, microseconds_max: int) -> None:
        """Delay each operation of a stream."""
        self._double.page.delay_us_max = microseconds_max


class World:
    """A machine with a sidecar and engines on it. `with` ends all of them."""

    def __init__(self, place: Place, **sections: dict[str, Any]) -> None:
        self.place = place
        self.sizes = place.sizes
        self._sections = sections
        self._stack = contextlib.ExitStack()
        self._sidecar: SidecarProcess | None = None
        self._pool: Path | None = None
        self._number = 0
        self._idle: dict[frozenset[tuple[str, str]], Child] = {}

    @property
    def sidecar(self) -> SidecarProcess:
        """The sidecar that runs; a new one where none does."""
        if self._sidecar is None or self._sidecar.process.poll() is not None:
            self._sidecar = self._start()
        return self._sidecar

    @property
    def socket(self) -> str:
        """Where workers attach."""
        return str(self.sidecar.socket)

    def _start(self) -> SidecarProcess:
        # A Unix socket's path has at most 107 bytes; a pool must be in memory to be pinned.
        directory = Path(tempfile.mkdtemp(prefix="kvl-", dir="/tmp"))
        if self._pool is not None:
            # Pool of a killed sidecar: nobody takes it over, and there is not room for many.
            shutil.rmtree(self._pool)
        pool = self._pool = Path(tempfile.mkdtemp(prefix="kvl-", dir="/dev/shm"))
        for folder in (directory, pool):
            self._stack.callback(shutil.rmtree, folder, ignore_errors=True)
        host = {"size": self.sizes.pool, "directory": str(pool), "prefault": True}
        host |= self._sections.get("host", {})
        sections: dict[str, Any] = {"copy": {"threads": 4}, **self._sections, "host": host}
        return self._stack.enter_context(SidecarProcess(self.place, directory, **sections))

    def layout(self, order: str, sizes: dict[str, Any]) -> KVLayout:
        """A cache of `sizes`, with its axes in `order`."""
        return layout_in(order, lead_bytes=0, size_multiple=self.place.size_multiple, **sizes)

    @contextlib.contextmanager
    def engine(
        self, layout: KVLayout, place: str = "malloc", variables: dict[str, str] | None = None
    ) -> Iterator[Child]:
        """An engine in a process of its own, not attached.

        The process serves the next engine, unless something was raised: to start one takes long.
        """
        key = frozenset((variables or {}).items())
        child = self._idle.pop(key, None) or self.child(ENGINE, variables)
        try:
            child.call("engine.start", kind=self.place.kind, layout=layout, place=place)
            yield child
            if child.alive:
                child.call("engine.stop")
                self._idle.setdefault(key, child)
        finally:
            if self._idle.get(key) is not child:
                child.close()

    @contextlib.contextmanager
    def children(self, count: int, setup: str = ENGINE) -> Iterator[list[Child]]:
        """Several processes at once. They are started side by side: each takes long."""
        with contextlib.ExitStack() as stack, ThreadPoolExecutor(count) as threads:
            starting = [threads.submit(self.child, setup) for _ in range(count)]
            wait(starting)
            yield [stack.enter_context(one.result()) for one in starting]

    @contextlib.contextmanager
    def watcher(self) -> Iterator[Child]:
        """A process that looks at the device's memory."""
        with self.child(WATCHER) as child:
            yield child

    def child(self, setup: str, variables: dict[str, str] | None = None) -> Child:
        """A process with the device. A device that hangs must not take all the time there is."""
        return Child(
            self.place, setup=setup, variables=variables, answer_seconds_max=ANSWER_SECONDS_MAX
        )

    def name(self) -> str:
        """A new engine's."""
        self._number += 1
        return f"engine-{self._number}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._idle:
            self._idle.popitem()[1].close()
        self._stack.close()

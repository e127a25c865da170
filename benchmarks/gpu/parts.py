"""The benchmarks of a GPU, one function each: from a machine to figures.

Every ratio is taken within one run, beside a plain copy of as many bytes in the same direction.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any, Final, Self

from benchmarks.gpu.effort import LOADS, PIECES_BYTES, STORES, Effort
from benchmarks.gpu.figures import Figure
from tests.gpu.real.cases import settled
from tests.gpu.real.world import World

if TYPE_CHECKING:
    from tests.gpu.child import Child
    from tests.gpu.real.world import Place

TRAFFIC: Final = "from benchmarks.gpu import traffic"
COPIER: Final = "from benchmarks.gpu import copier"
PARTS: Final = (
    "copies",
    "through_the_sidecar",
    "costs",
    "threads",
    "ranks",
    "beside_computing",
    "beside_reads",
)
"""Methods of `Bench`, the most wanted first: time may run out."""
RATIO: Final = "of a plain copy"
DIRECTIONS: Final = (("to host", False), ("to device", True))


def asked_of(piece_bytes: int, *, to_device: bool) -> float | None:
    """The least ratio that was asked of copies in such pieces."""
    if piece_bytes >= 1 << 20:
        return 0.95
    if piece_bytes == 64 << 10:
        return 0.75 if to_device else 0.85
    return 0.65 if piece_bytes == 32 << 10 else None


def _named(piece_bytes: int) -> str:
    return f"{piece_bytes >> 20} MiB" if piece_bytes >= 1 << 20 else f"{piece_bytes >> 10} KiB"


def percentile(values: list[float], part: float) -> float:
    """The value that so large a part of them does not exceed."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


class Bench:
    """What all parts run on: an engine, and a process that copies by itself.

    Both live on from part to part, for starting them takes long; `with` ends them. After an error
    the next part has new ones.
    """

    def __init__(self, place: Place, effort: Effort) -> None:
        self.place = place
        self.effort = effort
        self._home = World(place)
        self._worker_child: Child | None = None
        self._copier_child: Child | None = None
        self._pin_seconds = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # What reads the engine's memory goes before it.
        for child in (self._copier_child, self._worker_child):
            if child is not None:
                child.close()
        self._copier_child = self._worker_child = None

    @property
    def worker(self) -> Child:
        """An engine with its cache."""
        if self._worker_child is None:
            self._worker_child = self._home.child(TRAFFIC)
            layout = self.effort.layout(PIECES_BYTES[0])
            self._worker_child.call("traffic.start", kind=self.place.kind, layout=layout)
        return self._worker_child

    @property
    def copier(self) -> Child:
        """Copies of that cache without a sidecar."""
        if self._copier_child is None:
            shared, layout = self.worker.call("traffic.described")
            self._copier_child = self._home.child(COPIER)
            self._pin_seconds = self._copier_child.call(
                "copier.start", shared=shared, layout=layout, pool_bytes=self._copier_pool_bytes
            )
        return self._copier_child

    @property
    def _copier_pool_bytes(self) -> int:
        return 2 * self.effort.round_bytes

    def run(self, part: str) -> list[Figure]:
        """One of `PARTS`."""
        try:
            found: list[Figure] = getattr(self, part)()
        except BaseException:
            self.__exit__()
            raise
        return found

    def _world(self, **sections: dict[str, Any]) -> World:
        return World(self.place, host={"size": self.effort.pool}, **sections)

    def _jobs(self) -> dict[str, int]:
        effort = self.effort
        return {
            "blocks_per_chunk": effort.blocks_per_chunk,
            "job_bytes": effort.job_bytes,
            "waiting_bytes": effort.waiting_bytes,
            "round_bytes": effort.round_bytes // 2,
        }

    def _plain(
        self, copier: Child, num_bytes: int, *, to_device: bool, shared: bool = False
    ) -> float:
        seconds = copier.call(
            "copier.copier.plain", num_bytes=num_bytes, to_device=to_device, shared=shared
        )
        assert isinstance(seconds, float)
        return seconds

    # --- the parts -----------------------------------------------------------------------------

    def copies(self) -> list[Figure]:
        """Copies in pieces, as the sidecar makes them but without it; and pinning."""
        part, effort = "copies alone", self.effort
        copier, gibibytes = self.copier, self._copier_pool_bytes / (1 << 30)
        found = [
            Figure(part, "pinning", self._pin_seconds / gibibytes, "s per GiB"),
            Figure(part, "batches", float(copier.call("copier.copier.batches")), "",
                   beside=f"1: used, 0: not; {copier.call('copier.copier.ways')}"),
        ]  # fmt: skip
        for name, to_device in DIRECTIONS:
            seconds = statistics.median(
                self._plain(copier, effort.round_bytes, to_device=to_device)
                for _ in range(effort.rounds)
            )
            rate = effort.round_bytes / seconds / 1e9
            found.append(Figure(part, f"a plain copy {name}", rate, "GB/s"))
            shared = statistics.median(
                self._plain(copier, effort.round_bytes, to_device=to_device, shared=True)
                for _ in range(effort.rounds)
            )
            about = f"a plain copy {name} with memory as the pool's"
            found.append(Figure(part, about, seconds / shared, RATIO))
        one_way: list[float] = []
        for piece_bytes in PIECES_BYTES:
            for name, to_device in DIRECTIONS:
                ratio, seconds = self._ratio(copier, piece_bytes, to_device=to_device)
                found.append(
                    Figure(
                        part, f"{_named(piece_bytes)} {name}", ratio, RATIO,
                        at_least=asked_of(piece_bytes, to_device=to_device),
                    )
                )  # fmt: skip
                if piece_bytes == 1 << 20:
                    one_way.append(seconds)
        both = self._both(copier) / min(one_way)
        found.append(Figure(part, "1 MiB both ways at once", 2 / both, "of one way", at_least=1.5))
        return found

    def _ours(self, copier: Child, piece_bytes: int, *, to_device: bool, to_host: bool) -> float:
        seconds = copier.call(
            "copier.copier.ours",
            layout=self.effort.layout(piece_bytes),
            blocks_per_chunk=self.effort.blocks_per_chunk,
            num_bytes=self.effort.round_bytes,
            to_device=to_device,
            to_host=to_host,
        )
        assert isinstance(seconds, float)
        return seconds

    def _ratio(self, copier: Child, piece_bytes: int, *, to_device: bool) -> tuple[float, float]:
        """Rate over that of a plain copy, in turn; and the median seconds."""
        plain, ours = list[float](), list[float]()
        self._ours(copier, piece_bytes, to_device=to_device, to_host=not to_device)
        for _ in range(self.effort.rounds):
            plain.append(self._plain(copier, self.effort.round_bytes, to_device=to_device))
            ours.append(self._ours(copier, piece_bytes, to_device=to_device, to_host=not to_device))
        return statistics.median(plain) / statistics.median(ours), statistics.median(ours)

    def _both(self, copier: Child) -> float:
        return statistics.median(
            self._ours(copier, 1 << 20, to_device=True, to_host=True)
            for _ in range(self.effort.rounds)
        )

    def through_the_sidecar(self) -> list[Figure]:
        """The same pieces by jobs of a worker: fence, message, slots, checksums, answers."""
        part, effort, found = "through the sidecar", self.effort, list[Figure]()
        num_bytes = effort.sidecar_rounds * effort.round_bytes
        one_way: list[float] = []
        worker, copier = self.worker, self.copier

        def measure(world: World, piece_bytes: int, ways: list[str]) -> float:
            layout = effort.layout(piece_bytes)
            worker.call(
                "traffic.attach",
                socket=world.socket, layout=layout, ways=ways, **self._jobs(),
            )  # fmt: skip
            worker.call("traffic.seconds", num_bytes=effort.round_bytes)
            seconds = worker.call("traffic.seconds", num_bytes=num_bytes)
            worker.call("traffic.detach")
            assert isinstance(seconds, float)
            return seconds

        for piece_bytes in PIECES_BYTES:
            # Each has its own host memory. In one that slots of another size fill, what is to be
            # loaded may be evicted.
            with self._world() as world:
                for name, to_device in DIRECTIONS:
                    ways = [LOADS] if to_device else [STORES]
                    plain = [self._plain(copier, effort.round_bytes, to_device=to_device)]
                    seconds = measure(world, piece_bytes, ways)
                    plain.append(self._plain(copier, effort.round_bytes, to_device=to_device))
                    ratio = statistics.median(plain) * effort.sidecar_rounds / seconds
                    found.append(
                        Figure(
                            part, f"{_named(piece_bytes)} {name}", ratio, RATIO,
                            at_least=asked_of(piece_bytes, to_device=to_device),
                        )
                    )  # fmt: skip
                    if piece_bytes == 1 << 20:
                        one_way.append(seconds)
        with self._world() as world:
            both = measure(world, 1 << 20, [STORES, LOADS])
        found.append(
            Figure(part, "1 MiB both ways at once", min(one_way) / both, "of one way", at_least=1.5)
        )
        return found

    def threads(self) -> list[Figure]:
        """What more copy threads bring, and what hashing costs."""
        effort, found = self.effort, list[Figure]()
        kinds: list[tuple[int, str, dict[str, dict[str, Any]]]] = [
            *((count, way, {}) for count in effort.threads for way in (STORES, LOADS)),
            (effort.threads[0], LOADS, {"integrity": {"verify_loads": 0}}),
        ]
        for count, way, sections in kinds:
            with self._world(copy={"threads": count}, **sections) as world:
                self.worker.call(
                    "traffic.attach", socket=world.socket, layout=effort.layout(1 << 20),
                    ways=[way], **self._jobs(),
                )  # fmt: skip
                self.worker.call("traffic.seconds", num_bytes=effort.round_bytes)
                seconds = self.worker.call("traffic.seconds", num_bytes=4 * effort.round_bytes)
                self.worker.call("traffic.detach")
            name = f"{count} threads, 1 MiB, {way}" + (", not verified" if sections else "")
            found.append(Figure("threads", name, 4 * effort.round_bytes / seconds / 1e9, "GB/s"))
        return found

    def ranks(self) -> list[Figure]:
        """Several workers at once, as the ranks of an engine, by one sidecar on one device."""
        part, effort, found = "ranks at once", self.effort, list[Figure]()
        layout = effort.rank_layout()
        with self._home.children(effort.ranks, TRAFFIC) as workers, self._world() as world:
            for worker in workers:
                worker.call("traffic.start", kind=self.place.kind, layout=layout)
            for way, (name, to_device) in zip((STORES, LOADS), DIRECTIONS, strict=True):
                plain = self._plain(self.copier, effort.round_bytes, to_device=to_device)
                for count in (1, effort.ranks):
                    jobs = self._jobs()
                    for worker in workers[:count]:
                        worker.call(
                            "traffic.attach", socket=world.socket, layout=layout, ways=[way],
                            **jobs | {
                                key: jobs[key] // effort.ranks
                                for key in ("waiting_bytes", "round_bytes")
                            },
                        )  # fmt: skip
                    num_bytes = effort.round_bytes // count
                    began = time.perf_counter()
                    for worker in workers[:count]:
                        worker.start("result = traffic.seconds(num_bytes)", num_bytes=num_bytes)
                    for worker in workers[:count]:
                        worker.finish()
                    seconds = time.perf_counter() - began
                    for worker in workers[:count]:
                        worker.call("traffic.detach")
                    ratio = plain * num_bytes * count / effort.round_bytes / seconds
                    found.append(Figure(part, f"{count}, 1 MiB {name}", ratio, RATIO))
        return found

    def beside_computing(self) -> list[Figure]:
        """A loop of matrix products in bfloat16, with copies at full rate and without."""
        part, effort, found = "beside matrix products", self.effort, list[Figure]()
        worker = self.worker
        with self._world() as world:
            for name, ways in (
                ("stores", [STORES]), ("loads", [LOADS]), ("both", [STORES, LOADS]),
            ):  # fmt: skip
                worker.call(
                    "traffic.attach", socket=world.socket,
                    layout=effort.layout(1 << 20), ways=ways, **self._jobs(),
                )  # fmt: skip
                alone, beside, copied = list[float](), list[float](), list[float]()
                # Libraries load and clocks rise.
                worker.call(
                    "traffic.computing", window_seconds=effort.window_seconds, copying=False
                )
                for _ in range(effort.windows):
                    for copying, into in ((False, alone), (True, beside)):
                        steps, rate = worker.call(
                            "traffic.computing",
                            window_seconds=effort.window_seconds, copying=copying,
                        )  # fmt: skip
                        into.append(steps)
                        if copying:
                            copied.append(rate)
                worker.call("traffic.detach")
                loss = 100 * (1 - statistics.median(beside) / statistics.median(alone))
                rate = statistics.median(copied) / 1e9
                found.append(
                    Figure(part, f"{name}, loss", loss, "%", at_most=2.0,
                           beside=f"{rate:.1f} GB/s copied meanwhile")
                )  # fmt: skip
        return found

    def beside_reads(self) -> list[Figure]:
        """A read of four bytes, with this many bytes in flight and with none."""
        part, effort, found = "a read of 4 bytes", self.effort, list[Figure]()
        worker, reads = self.worker, {"reads": effort.reads, "warm_up": effort.warm_up}
        for limit_bytes in effort.limits_bytes:
            gpu = {"loads_inflight_max": limit_bytes, "stores_inflight_max": limit_bytes}
            with self._world(gpu=gpu) as world:
                for name, ways in (("stores", [STORES]), ("loads", [LOADS])):
                    worker.call(
                        "traffic.attach", socket=world.socket,
                        layout=effort.layout(1 << 20), ways=ways, **self._jobs(),
                    )  # fmt: skip
                    alone, _ = worker.call("traffic.reading", copying=False, **reads)
                    beside, rate = worker.call("traffic.reading", copying=True, **reads)
                    worker.call("traffic.detach")
                    more = percentile(beside, 0.99) - percentile(alone, 0.99)
                    found.append(
                        Figure(
                            part, f"{name}, {limit_bytes >> 20} MiB in flight, p99", more,
                            "µs more", at_most=100.0,
                            beside=f"{percentile(alone, 0.99):.0f} µs alone, "
                            f"{rate / 1e9:.1f} GB/s copied",
                        )
                    )  # fmt: skip
        return found

    def costs(self) -> list[Figure]:
        """What a step with jobs costs the engine's thread, and the sidecar the device."""
        part, effort = "costs", self.effort
        worker = self.worker
        with self._home.watcher() as watcher, self._world() as world:
            _ = world.socket  # the sidecar runs, and has met no device yet
            # What looking at the cache so takes of the device is the engine's.
            worker.run("traffic.engine.cache.view(layout)", layout=effort.layout(1 << 20))
            before = settled(watcher)
            worker.call(
                "traffic.attach", socket=world.socket,
                layout=effort.layout(1 << 20), ways=[STORES], **self._jobs(),
            )  # fmt: skip
            taken = before - settled(watcher)
            cost, writes, launches = worker.call(
                "traffic.steps_with_jobs", steps=effort.steps, warm_up=effort.warm_up
            )
            worker.call("traffic.detach")
        return [
            Figure(part, "device memory of the sidecar", taken / (1 << 20), "MiB"),
            Figure(
                part, "fence and message of a step with a store and a load, p99",
                percentile(cost, 0.99), "µs", at_most=20.0,
                beside=f"p50 {percentile(cost, 0.5):.1f} µs",
            ),
            Figure(
                part, "of that, the fence's write, p50", percentile(writes, 0.5), "µs",
                beside=f"a small kernel's launch: {percentile(launches, 0.5):.1f} µs",
            ),
        ]  # fmt: skip

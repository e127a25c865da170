"""A small engine around the real roles of the connector: scheduler, prefix cache, workers.

Real: `SchedulerRole` and `WorkerRole` with their fence pages. Mirrored, as small as it goes: of
vLLM 0.32 `v1/core/sched/scheduler.py` (waiting, running, preemption, remote loads, delayed frees),
`KVOutputAggregator`, and the order of the worker hooks; its block pool is in `blocks.py`, the
tables of its requests, in one or several KV cache groups, in `tables.py`.
`tests/connector/engine.py` runs the same roles under vLLM's own scheduler.

The forward pass reads the KV of every token before those that it computes, and compares it with
what it must be. Blocks are overwritten the moment that they get a new owner, and nobody may be
copying from or to them then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from connector.client import Attempt
from connector.identity.groups import CachedGroup
from connector.plan import Load, StepPlan, StepReport, Store
from connector.scheduler.requests import Settings
from connector.scheduler.role import SchedulerRole
from connector.scheduler.stores import Part
from connector.worker import TransferResults
from sidecar.protocol import LoadChunk, LoadJob, Role
from tests.simulation.blocks import Block, BlockPool, Request
from tests.simulation.clock import Violation, World
from tests.simulation.content import BLOCK_TOKENS, POISON, Model, TokenDigests, owner_of
from tests.simulation.ranks import Rank, attach_message
from tests.simulation.tables import Tables
from tests.simulation.wire import Node, Wire

if TYPE_CHECKING:
    from tests.simulation.checks import Checks

STEP_TOKENS_MAX = 48
RUNNING_MAX = 4
IDLE_SECONDS = 0.01


class SimEngine:
    """One engine, from its start to its end."""

    def __init__(
        self,
        world: World,
        node: Node,
        checks: Checks,
        name: str,
        model: Model,
        *,
        num_blocks: int,
        late_fences: bool,
        want_events: bool,
    ) -> None:
        self.world = world
        self.node = node
        self.checks = checks
        self.name = name
        self.model = model
        self.groups = model.groups
        self.num_blocks = num_blocks * len(self.groups)
        self.tokens_max = (num_blocks - 1) * BLOCK_TOKENS
        """Tokens of a request that fits into it when nothing else is there."""
        self.late_fences = late_fences
        self.weights = 0
        self.dead = False
        self.stall_seconds = 0.0
        self.late_rank_seconds = 0.0
        """How much later than the first rank's the fences of the others come, in the next step."""
        self.pool = BlockPool(self.num_blocks, has_null=len(self.groups) > 1)
        self.tables = Tables(self.pool, [group.window for group in self.groups])
        self.requests: dict[str, Request] = {}
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._stepping = False
        self._aborted: list[str] = []
        self._loaded: Counter[str] = Counter()
        self._failed: set[str] = set()
        self._freed_late: dict[str, list[Block]] = {}
        self.ranks = [Rank(self, rank) for rank in range(model.ranks)]
        attach = attach_message(self, Role.SCHEDULER, 0, want_events=want_events)
        self.wire = Wire(node, f"{name}.s", lambda: Attempt(attach))
        self.role = SchedulerRole(
            self.wire.as_client(),
            [CachedGroup(group.digest, group.geometry) for group in self.groups],
            Settings(reads=True, writes=True, world_size=model.ranks, load_tokens_min=BLOCK_TOKENS),
            self.pool,
            clock=world.clock,
        )
        self._really_plan_store: Callable[..., Store | None] = self.role.stores.plan
        setattr(self.role.stores, "plan", self._plan_store)  # noqa: B010 (mypy)
        checks.images.engines.append(self)

    # --- requests ------------------------------------------------------------------------------

    def add(self, request_id: str, prompt: list[int], max_tokens: int, salt: str | None) -> None:
        """A user asks."""
        owners = [owner_of(group, salt or "", self.weights) for group in self.groups]
        digests = [TokenDigests(owner) for owner in owners]
        request = Request(request_id, prompt, max_tokens, salt, digests, tables=self.tables.empty())
        self.requests[request_id] = request
        self._waiting.append(request)
        self.role.new_request(request)
        self._wake()

    def abort(self, request_id: str) -> None:
        """The user is gone."""
        # As vLLM's engine core does: between two steps, never within one.
        self._aborted.append(request_id)

    def _end_aborted(self) -> None:
        for request_id in self._aborted:
            request = self.requests.get(request_id)
            if request is not None:
                self.world.saw("abort while loading" if request.loading else "abort")
                self._finish(request)
        self._aborted.clear()

    @property
    def busy(self) -> bool:
        """Whether there is a reason to step."""
        return bool(self.requests or self.role.stores.jobs or self._freed_late)

    def _wake(self) -> None:
        if not self._stepping and not self.dead:
            self._stepping = True
            self.world.after(0.0, self._step)

    # --- a step --------------------------------------------------------------------------------

    def _step(self) -> None:
        if self.dead:
            return
        self._end_aborted()
        if not self.busy:
            self._stepping = False
            return
        scheduled = self._schedule()
        plan = self.role.build_plan(
            {request.request_id: count for request, count in scheduled.items()},
            lambda request_id: self.requests[request_id].block_ids(),
        )
        plan.idle = not scheduled
        seconds = IDLE_SECONDS
        if scheduled:
            seconds = self.world.random.uniform(0.01, 0.05)
        seconds += self.stall_seconds
        self.stall_seconds = 0.0
        results: list[TransferResults] = []
        if self.late_fences:
            # The work is queued on the device: jobs go out now, their fences come with the work.
            self._transfer(plan, results)
            self.world.after(seconds, lambda: self._device(scheduled, results))
        else:
            self.world.after(seconds, lambda: self._host(scheduled, plan, results))

    def _device(self, scheduled: dict[Request, int], results: list[TransferResults]) -> None:
        if self.dead:
            return
        self._forward(scheduled)
        late, self.late_rank_seconds = self.late_rank_seconds, 0.0
        for rank in self.ranks[: 1 if late else None]:
            rank.device_done()
        self.world.after(late, lambda: self._synchronized(scheduled, results))

    def _synchronized(self, scheduled: dict[Request, int], results: list[TransferResults]) -> None:
        if self.dead:
            return
        for rank in self.ranks:
            rank.device_done()
        self._update(scheduled, results)

    def _host(
        self, scheduled: dict[Request, int], plan: StepPlan, results: list[TransferResults]
    ) -> None:
        if self.dead:
            return
        self._forward(scheduled)
        self._transfer(plan, results)
        self._update(scheduled, results)

    def _transfer(self, plan: StepPlan, results: list[TransferResults]) -> None:
        for rank in self.ranks:
            rank.role.submit(plan)
            results.append(rank.role.collect())

    def _schedule(self) -> dict[Request, int]:
        scheduled: dict[Request, int] = {}
        budget = self._schedule_running(scheduled, STEP_TOKENS_MAX)
        # Who has its KV goes first, or requests that wait for blocks would wait for each other.
        for request in sorted(self._waiting, key=lambda request: not request.loaded):
            if budget <= 0 or len(self._running) >= RUNNING_MAX:
                break
            if request.loading:
                continue
            external = 0
            if not request.loaded:
                found = self._match(request)
                if found is None:
                    self.world.saw("request waits for the store")
                    continue
                external = found
            start = request.local_tokens + external
            if request.loaded:
                start = request.num_computed_tokens
            count = 0 if external else min(budget, request.num_tokens - start)
            if not self._grow(request, start, start + count):
                if not request.loaded:
                    self.tables.give_back(request)
                elif not self._running and not scheduled:
                    self._make_way(request)
                break
            request.num_computed_tokens = start
            self.role.allocated(request, request.block_ids, external)
            if external:
                request.loading = True
                continue
            self._waiting.remove(request)
            self._running.append(request)
            scheduled[request] = count
            budget -= count
        return scheduled

    def _schedule_running(self, scheduled: dict[Request, int], budget: int) -> int:
        index = 0
        while index < len(self._running) and budget > 0:
            request = self._running[index]
            count = min(budget, request.num_tokens - request.num_computed_tokens)
            computed = request.num_computed_tokens
            if self._grow(request, computed, computed + count):
                scheduled[request] = count
                budget -= count
                index += 1
            elif self.role.stores.blocks_coming_back():
                self.world.saw("waits for blocks of stores")
                index += 1
            else:
                self._preempt(self._running[-1])
        return budget

    def _match(self, request: Request) -> int | None:
        """Hit in the engine's own cache, whose blocks it then has, and beyond it."""
        local = self.tables.cached(request)
        request.local_tokens = len(local[0]) * BLOCK_TOKENS
        external = self.role.matched_tokens(request, request.local_tokens)
        if external is not None:
            for table in local:
                self.pool.touch(table)
            request.tables = local
        return external

    def _grow(self, request: Request, computed_tokens: int, num_tokens: int) -> bool:
        fresh = self.tables.grow(request, computed_tokens, num_tokens)
        if fresh is None:
            return False
        if any(block.is_null for block in request.blocks):
            self.world.saw("several groups: a window moved on")
        if fresh:
            self.checks.copying.blocks_taken(self, [block.block_id for block in fresh])
            for rank in self.ranks:
                rank.kv[[block.block_id for block in fresh]] = POISON
        return True

    def _preempt(self, request: Request) -> None:
        self.world.saw("preemption")
        self._running.remove(request)
        self._start_over(request)
        self._waiting.insert(0, request)

    def _start_over(self, request: Request) -> None:
        self.tables.give_back(request)
        request.num_computed_tokens = request.local_tokens = 0
        request.loaded = False

    def _make_way(self, request: Request) -> None:
        """Requests that were loaded hold blocks while they wait; all of them cannot wait so."""
        others = [other for other in self._waiting if other.loaded and other is not request]
        if others:
            self._start_over(others[-1])

    def _plan_store(self, session: Any, state: Any, parts: list[Part], *rest: Any) -> Store | None:
        """Note what the keys of a planned store must hold, from the tokens."""
        store = self._really_plan_store(session, state, parts, *rest)
        if store is None:
            return None
        request: Request = state.request
        places = {part.key: part for part in parts}
        for chunk in store.job.chunks:
            part, model = places[chunk.key], self.groups[chunk.group]
            owner = owner_of(model, request.cache_salt or "", self.weights)
            digests = request.digests[chunk.group](request.all_token_ids)
            start = part.chunk * model.geometry.chunk_tokens
            held = digests[start : start + part.blocks * BLOCK_TOKENS]
            self.checks.truth.learn(chunk.key, owner, chunk.parent, chunk.token_ids, held)
        return store

    # --- the model -----------------------------------------------------------------------------

    def _forward(self, scheduled: dict[Request, int]) -> None:
        for request, count in scheduled.items():
            if request.finished or not count:
                continue
            end = request.num_computed_tokens + count
            self._compute(request, request.num_computed_tokens, end)

    def _compute(self, request: Request, start: int, end: int) -> None:
        for group, table in enumerate(request.block_ids()):
            digests = request.digests[group](request.all_token_ids[:end])
            for rank in self.ranks:
                rank.compute(group, digests, table, start, request.request_id)
            self.checks.copying.blocks_taken(self, table[start // BLOCK_TOKENS :])

    def _update(self, scheduled: dict[Request, int], results: list[TransferResults]) -> None:
        """As `Scheduler.update_from_output`."""
        report = StepReport()
        for result in results:
            # A set of names has another order in each process.
            self._loaded.update(sorted(result.loaded))
            self._failed.update(result.failed)
            report = report.add(result.report)
        ended = [name for name, ranks in self._loaded.items() if ranks >= len(self.ranks)]
        failed = self._failed.intersection(ended)
        for name in ended:
            if self._loaded.pop(name) > len(self.ranks):
                raise Violation("every load ends once for each rank", name)
        self._failed.difference_update(ended)
        self.role.loads_ended(ended, failed)
        for name in ended:
            self._load_ended(name, failed=name in failed)
        self.role.stores_ended(report)
        for request, count in scheduled.items():
            if not request.finished:
                self._advance(request, count)
        self.role.take_stats()
        self.world.after(0.0, self._step)

    def _load_ended(self, request_id: str, *, failed: bool) -> None:
        late = self._freed_late.pop(request_id, None)
        if late is not None:
            self.pool.free_blocks(reversed(late))
            return
        request = self.requests[request_id]
        if not request.loading:
            raise Violation("a load ends once", request_id)
        request.loading, request.loaded = False, True
        self.world.saw("load failed" if failed else "load ok")
        if failed and len(self.groups) > 1:
            # Blocks of a window lie behind what failed: it starts again, and loads nothing.
            self._start_over(request)
            return
        if failed:
            request.num_computed_tokens = request.local_tokens
            return
        self.tables.cache(request)
        if request.num_computed_tokens == request.num_tokens:
            request.num_computed_tokens -= 1

    def _advance(self, request: Request, count: int) -> None:
        if request not in self._running:
            return
        request.num_computed_tokens += count
        self.tables.cache(request)
        if request.num_computed_tokens < request.num_tokens:
            return
        generated = request.num_tokens - request.num_prompt_tokens
        if generated >= request.max_tokens:
            self.world.saw("request finished")
            self._finish(request)
            return
        request.all_token_ids.append((sum(request.all_token_ids) + generated) % 50)
        request.hash_blocks()

    def _finish(self, request: Request) -> None:
        request.finished = True
        self.role.request_finished(request, request.block_ids())
        self._is_forgotten(request)
        del self.requests[request.request_id]
        for queue in (self._waiting, self._running):
            if request in queue:
                queue.remove(request)
        if request.loading:
            self._freed_late[request.request_id] = request.blocks
        else:
            self.tables.give_back(request)

    def _is_forgotten(self, request: Request) -> None:
        """Nothing waits for an answer on behalf of a request that is over."""
        role: Any = self.role
        lookups = role.pending.lookups
        asked = [number for number, state in lookups.items() if state.request is request]
        if asked or role.requests.get(request.request_id) is not None:
            raise Violation("a request is forgotten at its end", f"{request.request_id}: {asked}")

    # --- what may happen to it -----------------------------------------------------------------

    def group_of(self, owner: str) -> int | None:
        """The KV cache group that a key is of, by whose it is; None: of another model."""
        for number, model in enumerate(self.groups):
            if owner.startswith(f"{model.name}/"):
                return number
        return None

    def load_unasked(self, key: bytes, group: int, num_blocks: int, times: int) -> None:
        """Load a chunk that no lookup offered and no lease pins, as after a race."""
        for _ in range(times):
            if num_blocks > self.pool.num_free:
                break
            # Each has blocks of its own: nobody fills a block from two loads at a time.
            blocks = self.pool.allocate(num_blocks)
            ids = [block.block_id for block in blocks]
            self.checks.copying.blocks_taken(self, ids)
            job_id = self.role.new_id()
            self._freed_late[f"load {job_id}"] = blocks
            job = LoadJob(job_id, [LoadChunk(key, 0, ids, group)])
            self.role.plan.loads.append(Load(f"load {job_id}", job))
        self._wake()

    def can_reset(self) -> bool:
        """Whether vLLM could: nothing runs, loads or is held."""
        return not self.busy

    def reset(self) -> None:
        """New weights: everything computed so far is void."""
        self.world.saw("reset")
        self.weights += 1
        self.pool.reset()
        self.role.reset()

    def die(self) -> None:
        """The engine's processes are gone, one after the other."""
        self.dead = True
        self.wire.die()
        for rank in self.ranks:
            rank.close()

    def __str__(self) -> str:
        requests = [
            f"{request.request_id}: {request.num_computed_tokens}/{request.num_tokens} tokens, "
            f"{len(request.blocks)} blocks"
            + " loading" * request.loading
            + " loaded" * request.loaded
            + " running" * (request in self._running)
            for request in self.requests.values()
        ]
        return (
            f"{self.name} ({self.pool.num_free} of {self.num_blocks} blocks free, "
            f"{len(self.role.stores.jobs)} stores): {'; '.join(requests)}"
        )

    def check_idle(self) -> None:
        """Nothing of ours is left in a living engine without requests."""
        role: Any = self.role
        held = [block.block_id for block in self.pool.blocks if block.ref_cnt]
        if held or self.pool.num_free != self.pool.num_usable:
            raise Violation("every block comes back", f"{self.name} holds {held}")
        if self.pool.null.is_null and any((rank.kv[0] != POISON).any() for rank in self.ranks):
            raise Violation("nothing is written to the null block", self.name)
        left = (
            role.stores.jobs,
            role.stores.keys,
            role.requests,
            role.pending.lookups,
            role.loading,
        )
        if any(left) or self._waiting or self._running or self._freed_late:
            raise Violation("the connector is idle at the end", f"{self.name}: {left}")

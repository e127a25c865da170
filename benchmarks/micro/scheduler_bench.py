"""What the connector costs vLLM's scheduler thread: every call on it, at prompts of 16,384 tokens.

The index is a real one with a million slots, half of them taken; requests and the block pool are
vLLM's own; the client is one that sends to nobody. Prints one JSON object; times are microseconds
except `hash_ms`, which a request pays once, when it arrives. The times are those of this machine
at this moment; compare only numbers taken side by side.

    python -m benchmarks.micro.scheduler_bench [--tokens 16384] [--rounds 300] [--slots 1048576]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request

from connector.client import Client, SidecarSession
from connector.identity.groups import CachedGroup, Geometry
from connector.plan import StepReport
from connector.scheduler.requests import Settings
from connector.scheduler.role import SchedulerRole
from sidecar.protocol import ClientMessage, Limits, ServerMessage
from sidecar.protocol.codec import encode
from tiers.kv.index import FLAG_HOST, IndexReader, IndexWriter, tag_of
from tiers.kv.keys import KeyChain, root_key

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK_TOKENS: Final = 16
CHUNK_TOKENS: Final = 256
RUNNING: Final = 256
"""Requests that decode beside, one token each per step."""
NAMESPACE: Final = bytes(range(32))
SALT: Final = bytes(range(16))

R = TypeVar("R")


class SilentClient:
    """Encodes what it is given, as the real one does, and delivers nothing."""

    def __init__(self, session: SidecarSession) -> None:
        self.session = session

    def send(self, session: SidecarSession, message: ClientMessage) -> bool:
        """Encode and forget."""
        encode(message)
        return session is self.session

    def poll(self, of: SidecarSession | None = None) -> list[ServerMessage]:
        """Nothing ever comes."""
        return []


class Timer:
    """Durations by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def __call__(self, name: str, call: Callable[[], R]) -> R:
        started = time.perf_counter()
        result = call()
        self.seconds.setdefault(name, []).append(time.perf_counter() - started)
        return result

    def percentile(self, name: str, percent: int) -> float:
        """Seconds that this many percent of the calls stayed under."""
        taken = sorted(self.seconds[name])
        return taken[len(taken) * percent // 100]


class Bench:
    """One scheduler role over an index, and the blocks of an engine."""

    def __init__(self, slots: int, tokens: int) -> None:
        self.random = random.Random(1)
        self.tokens = tokens
        self.writer = IndexWriter(slots // 2)
        for _ in range(self.writer.capacity_entries * 9 // 10):
            self.writer.set(self.random.randbytes(16), FLAG_HOST)
        reader = IndexReader(os.dup(self.writer.fd), self.writer.size_bytes)
        limits = Limits(
            lookup_wait_ms_max=500,
            load_deadline_ms_max=5_000,
            store_deadline_ms_max=10_000,
            jobs_inflight_max=256,
            lease_ttl_ms_max=10_000,
        )
        session = SidecarSession(1, b"t" * 16, "inproc://nobody", limits, SALT, reader)
        self.pool = BlockPool(4 * tokens // BLOCK_TOKENS, True, BLOCK_TOKENS)
        self.role = SchedulerRole(
            cast("Client", SilentClient(session)),
            [CachedGroup(NAMESPACE, Geometry(BLOCK_TOKENS, CHUNK_TOKENS))],
            Settings(reads=True, writes=True, world_size=1),
            self.pool,
        )
        self.time = Timer()
        self.serial = 0

    def request(self, tokens: int) -> Request:
        """A prompt that nobody had before."""
        self.serial += 1
        prompt = self.random.choices(range(32_000), k=tokens)
        return Request(f"r{self.serial}", prompt, SamplingParams(max_tokens=64), None)

    def new(self, request: Request) -> None:
        """Hash the prompt, timed by itself, and let the role do it again untimed."""
        chain = KeyChain(root_key(NAMESPACE), CHUNK_TOKENS, BLOCK_TOKENS)
        self.time("hash", lambda: chain.extend(request.all_token_ids[:]))
        self.role.new_request(request)

    def end_stores(self, plan: Any) -> None:
        """Every rank copied everything."""
        self.role.stores_ended(StepReport({store.job.job_id: 1 for store in plan.stores}))

    def hit(self) -> None:
        """A prompt of which everything is in host memory."""
        request = self.request(self.tokens)
        chain = KeyChain(root_key(NAMESPACE), CHUNK_TOKENS, BLOCK_TOKENS)
        chain.extend(request.all_token_ids[:])
        for key in chain.keys:
            self.writer.set(tag_of(key, SALT), FLAG_HOST)
        self.new(request)
        matched = self.time("matched_tokens", lambda: self.role.matched_tokens(request, 0))
        again = self.time("matched_tokens_again", lambda: self.role.matched_tokens(request, 0))
        if matched != again or matched != len(chain.keys) * CHUNK_TOKENS:
            raise RuntimeError(f"{matched} and {again} of {self.tokens} tokens were found")
        blocks = self.pool.get_new_blocks(self.tokens // BLOCK_TOKENS)
        ids = [block.block_id for block in blocks]
        self.time("allocated", lambda: self.role.allocated(request, lambda: [ids], matched))
        self.time("build_plan_load", lambda: self.role.build_plan({}, lambda _: [[]]))
        self.role.loads_ended([request.request_id], [])
        self.role.request_finished(request, [[]])
        self.pool.free_blocks(reversed(blocks))
        for key in chain.keys:
            self.writer.set(tag_of(key, SALT), 0)

    def miss(self) -> None:
        """A prompt of which nothing is known: it is computed in one step, and stored."""
        request = self.request(self.tokens + BLOCK_TOKENS)
        self.new(request)
        missed = self.time("matched_tokens_miss", lambda: self.role.matched_tokens(request, 0))
        if missed:
            raise RuntimeError(f"{missed} tokens of a random prompt were found")
        blocks = self.pool.get_new_blocks(request.num_tokens // BLOCK_TOKENS)
        ids = [block.block_id for block in blocks]
        self.time("allocated_miss", lambda: self.role.allocated(request, lambda: [ids], 0))
        scheduled = {request.request_id: request.num_tokens}
        plan = self.time(
            "build_plan_store", lambda: self.role.build_plan(scheduled, lambda _: [ids])
        )
        self.time("stores_ended", lambda: self.end_stores(plan))
        request.num_computed_tokens = request.num_tokens
        self.time("request_finished", lambda: self.role.request_finished(request, [ids]))
        self.end_stores(self.role.build_plan({}, lambda _: [[]]))
        self.pool.free_blocks(reversed(blocks))

    def decode(self, rounds: int) -> None:
        """Steps in which many requests decode and none completes a chunk."""
        requests = [self.request(100) for _ in range(RUNNING)]
        for request in requests:
            self.role.new_request(request)
            request.num_computed_tokens = request.num_tokens
            self.role.requests[request.request_id].prompt_tail_done = True
        scheduled = {request.request_id: 1 for request in requests}
        name = f"build_plan_decode_{RUNNING}"
        for _ in range(rounds):
            self.time(name, lambda: self.role.build_plan(scheduled, lambda _: [[]]))
        for request in requests:
            self.role.request_finished(request, [[]])
        self.end_stores(self.role.build_plan({}, lambda _: [[]]))


def measure(slots: int, tokens: int, rounds: int) -> dict[str, object]:
    """Run all rounds and give the percentiles of each call."""
    bench = Bench(slots, tokens)
    for _ in range(rounds):
        bench.hit()
        bench.miss()
    bench.decode(rounds)
    timer = bench.time
    result: dict[str, object] = {"tokens": tokens, "slots": bench.writer.slots, "rounds": rounds}
    result["hash_ms"] = round(timer.percentile("hash", 50) * 1e3, 3)
    for name in timer.seconds:
        if name != "hash":
            result[f"{name}_p50_us"] = round(timer.percentile(name, 50) * 1e6, 1)
            result[f"{name}_p99_us"] = round(timer.percentile(name, 99) * 1e6, 1)
    return result


def main() -> None:
    """Parse the options, measure, print."""
    parser = argparse.ArgumentParser(description="micro-benchmark of connector/scheduler/role.py")
    parser.add_argument("--slots", type=int, default=1 << 20)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=300)
    options = parser.parse_args()
    print(json.dumps(measure(options.slots, options.tokens, options.rounds)))


if __name__ == "__main__":
    main()

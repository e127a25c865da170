"""Scenarios in which something ends: the engine, the cache, a node; and what comes after."""

from __future__ import annotations

import contextlib
import shutil
import time
from typing import TYPE_CHECKING, Final

from benchmarks.compare.peers.arms import LIMIT
from benchmarks.compare.peers.client import complete, get, reset_prefix_cache
from benchmarks.compare.peers.metrics import counts_of, parse, total
from benchmarks.compare.peers.one_by_one import ANSWER_TOKENS, ask_in_turn
from benchmarks.compare.peers.rows import Row, row_of
from benchmarks.compare.peers.tools import (
    ToolFailed,
    bench_command,
    bench_load,
    finish_tool,
    start_tool,
    stop_tool,
)
from benchmarks.compare.peers.turns import (
    SETTLE_SECONDS,
    all_running,
    attempt,
    count_since,
    measured,
    revive,
    say,
    start_all,
    turn,
)
from benchmarks.compare.peers.under_load import not_measured, prefix_options

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.compare.peers.arms import Arm
    from benchmarks.compare.peers.client import Answer
    from benchmarks.compare.peers.turns import Comparison

PROMPT_TOKENS: Final = 2048
SILENCE_SECONDS_MAX: Final = 30.0
"""A request that gets nothing for so long after a restart has failed."""
HITS_SECONDS_MAX: Final = 40.0
"""How long after its restart a cache may take to serve a hit again."""
TRIAL_SECONDS: Final = 0.5
WRITTEN_SECONDS_MAX: Final = 30.0
KILLED_SECONDS_MAX: Final = 420
"""How long the load may then take. LMCache's engine waits 300 s for an answer of its server."""
KILLED_SECONDS_MAX_QUICK: Final = 120
KILLED_AT_PROMPTS: Final = 8
"""The cache is killed when the engine has begun that many prompts of the load."""
NO_PROCESS: Final = "has no cache process"


def restart_engine(comparison: Comparison) -> list[Row]:
    """Engines are restarted, but for the limit's; then they get prompts that they had before."""
    prompts = [comparison.tokens(PROMPT_TOKENS) for _ in range(comparison.size(8, 4))]
    ask_in_turn(comparison, prompts)
    with all_running(comparison.active):
        restarted_arms = [arm for arm in comparison.active if arm.name != LIMIT]
        for arm in restarted_arms:
            arm.engine.end()
        for arm in restarted_arms:
            arm.engine.start()
        for arm in restarted_arms:
            attempt(arm, arm.wait)
    # Whatever runs for the first time, before it counts.
    ask_in_turn(comparison, [comparison.tokens(PROMPT_TOKENS // 2)])
    return measured(comparison, "restart-engine", lambda: ask_in_turn(comparison, prompts))


def restart_cache(comparison: Comparison) -> list[Row]:
    """The cache's process ends in order and starts again, while its engine runs on."""
    rows: list[Row] = []
    for arm in comparison.arms:
        if arm.trouble or arm.cache is None:
            rows.append(Row("restart-cache", arm.name, note=arm.trouble or NO_PROCESS))
            continue
        with turn(arm):
            try:
                row = restarted(comparison, arm)
            except OSError as error:
                row = Row("restart-cache", arm.name, failures=1, note=f"no answer: {error}")
        rows.append(row)
        if row.failures and not arm.trouble:
            row.note += "; the engine had to be started again"
            revive(comparison, arm)
    return rows


def restarted(comparison: Comparison, arm: Arm) -> Row:
    """Restart the cache of one arm; ask what it had, and then until it serves a hit."""
    assert arm.cache is not None, "the caller's"
    known = [comparison.tokens(PROMPT_TOKENS) for _ in range(comparison.size(6, 3))]
    for prompt in known:
        complete(arm.url, prompt, ANSWER_TOKENS)
        time.sleep(SETTLE_SECONDS)
    before = counts_of(arm)
    began = time.monotonic()
    arm.cache.server.end()
    if not attempt(arm, lambda: arm.cache and arm.cache.server.start().wait()):
        return Row("restart-cache", arm.name, note=arm.trouble)
    down = time.monotonic() - began
    reset_prefix_cache(arm.url)
    answers: list[Answer] = []
    for prompt in known:
        answers.append(complete(arm.url, prompt, ANSWER_TOKENS, SILENCE_SECONDS_MAX))
        if answers[-1].failure:
            break
    row = row_of("restart-cache", arm.name, answers)
    if row.failures:
        row.note = f"down {down:.1f} s; {row.note}"
        return row
    row.count(counts_of(arm).since(before), has_process=True)
    kept = sum(answer.cached_tokens > 0 for answer in answers)
    back = seconds_to_hit(comparison, arm, answers)
    hits = "never" if back is None else f"{back:.1f} s after it served"
    row.note = f"down {down:.1f} s; {kept} of {len(known)} kept; hits again {hits}"
    return row


def seconds_to_hit(comparison: Comparison, arm: Arm, answers: list[Answer]) -> float | None:
    """Seconds until a prompt is stored and loaded again; None if that takes too long."""
    if any(answer.cached_tokens for answer in answers):
        return 0.0
    began = time.monotonic()
    while time.monotonic() - began < HITS_SECONDS_MAX:
        prompt = comparison.tokens(PROMPT_TOKENS // 2)
        if complete(arm.url, prompt, 1, SILENCE_SECONDS_MAX).failure:
            return None
        time.sleep(TRIAL_SECONDS)
        reset_prefix_cache(arm.url)
        if complete(arm.url, prompt, 1, SILENCE_SECONDS_MAX).cached_tokens:
            return time.monotonic() - began
    return None


def second_node(comparison: Comparison) -> list[Row]:
    """A second engine with a second cache, which has only the store of the first."""
    prompts = [comparison.tokens(PROMPT_TOKENS) for _ in range(comparison.size(8, 4))]
    rows: list[Row] = []
    for arm in comparison.arms:
        if arm.trouble or arm.name == "vllm":
            rows.append(Row("second-node", arm.name, note=arm.trouble or "no"))
            continue
        if arm.name == LIMIT:
            rows.append(own_hits(arm, prompts))
            continue
        try:
            rows.append(on_second_node(comparison, arm.name, prompts))
        except OSError as error:
            rows.append(Row("second-node", arm.name, note=f"not measured: {error}"[:200]))
    return rows


def own_hits(arm: Arm, prompts: list[list[int]]) -> Row:
    """What a second node would take that finds all of these prompts in its engine's own cache."""
    with turn(arm):
        for prompt in prompts:
            complete(arm.url, prompt, ANSWER_TOKENS)
        before = counts_of(arm)
        answers = [complete(arm.url, prompt, ANSWER_TOKENS) for prompt in prompts]
        row = row_of("second-node", arm.name, answers)
        count_since(row, arm, before, has_process=False)
        return row


def on_second_node(comparison: Comparison, name: str, prompts: list[list[int]]) -> Row:
    """Store prompts on one node, and ask the other one for them.

    The first of them is not measured: a node's first hit from its store takes longer.
    """
    first_hit = comparison.tokens(PROMPT_TOKENS)
    store = comparison.folder / f"store-{name}"
    nodes = [comparison.factory.make(name, node=node, store=store) for node in ("first", "second")]
    first, second = nodes
    try:
        start_all(nodes)
        for node in nodes:
            if node.trouble:
                return Row("second-node", name, note=node.trouble)
        with turn(first):
            complete(first.url, comparison.tokens(PROMPT_TOKENS // 2), 1)
            for prompt in (first_hit, *prompts):
                complete(first.url, prompt, ANSWER_TOKENS)
            wait_written(store)
        first.end()
        with turn(second):
            complete(second.url, comparison.tokens(PROMPT_TOKENS // 2), 1)
            # A sidecar learns of objects from its catalog, every 200 ms here.
            time.sleep(1.0)
            complete(second.url, first_hit, ANSWER_TOKENS)
            before = counts_of(second)
            answers = [complete(second.url, prompt, ANSWER_TOKENS) for prompt in prompts]
            row = row_of("second-node", name, answers)
            count_since(row, second, before, has_process=second.cache is not None)
        return row
    finally:
        for node in nodes:
            node.end()
        shutil.rmtree(store)


def wait_written(store: Path) -> None:
    """Wait until a store has files and their size has not changed for two seconds."""
    deadline = time.monotonic() + WRITTEN_SECONDS_MAX
    size, since = -1, time.monotonic()
    while time.monotonic() < deadline:
        now = sum(path.stat().st_size for path in store.rglob("*") if path.is_file())
        if now != size:
            size, since = now, time.monotonic()
        if size > 0 and time.monotonic() - since > 2:
            return
        time.sleep(0.1)


def kill_cache(comparison: Comparison) -> list[Row]:
    """SIGKILL for the cache's process while a tool sends requests; nobody starts it again."""
    rows: list[Row] = []
    seed = comparison.chooser.randrange(1 << 20)
    for arm in comparison.arms:
        if arm.trouble or arm.cache is None:
            rows.append(Row("kill-cache", arm.name, note=arm.trouble or NO_PROCESS))
            continue
        with turn(arm):
            try:
                rows.append(killed(comparison, arm, seed))
            except (ToolFailed, OSError) as error:
                say(f"kill-cache, {arm.name}: {error}")
                rows.append(Row("kill-cache", arm.name, note=not_measured("the tool", error)))
    return rows


def killed(comparison: Comparison, arm: Arm, seed: int) -> Row:
    """Kill the cache of one arm under load. Raises `ToolFailed`."""
    assert arm.cache is not None, "the caller's"
    result = comparison.folder / f"kill-cache-{arm.name}.json"
    log = result.with_suffix(".log")
    options = prefix_options(comparison.size(12, 8), comparison.size(48, 24))
    before = counts_of(arm)
    begun = prompts_of(arm)
    process = start_tool(bench_command(arm.url, comparison.model, result, options, seed=seed), log)
    try:
        # An engine that has ended by itself fails the requests, which the tool counts.
        with contextlib.suppress(OSError):
            while process.poll() is None and prompts_of(arm) < begun + KILLED_AT_PROMPTS:
                time.sleep(0.1)
        arm.cache.server.kill()
        seconds = comparison.size(KILLED_SECONDS_MAX, KILLED_SECONDS_MAX_QUICK)
        load = bench_load(finish_tool(process, log, result, seconds))
    finally:
        stop_tool(process)
    row = load.row("kill-cache", arm.name)
    # What the dead process took is not known.
    count_since(row, arm, before, has_process=False)
    if load.ttfts:
        longest = f"longest TTFT {max(load.ttfts):.1f} s"
        row.note = f"{longest}; {row.note}" if row.note else longest
    return row


def prompts_of(arm: Arm) -> float:
    """Prompts that the engine has prefilled."""
    return total(parse(get(f"{arm.url}/metrics")), "vllm:request_prompt_tokens_count")

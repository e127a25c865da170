"""Scenarios of requests one by one, which the arms answer in turn: hits without a queue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from benchmarks.compare.peers.client import complete, reset_prefix_cache
from benchmarks.compare.peers.turns import REFERENCE, measured, turn

if TYPE_CHECKING:
    from benchmarks.compare.peers.client import Answer
    from benchmarks.compare.peers.rows import Row
    from benchmarks.compare.peers.turns import Comparison

DOCUMENT_TOKENS: Final = 4096
"""Whole chunks, so that the engine's own cache and all others hit the same tokens."""
QUESTION_TOKENS: Final = 48
ANSWER_TOKENS: Final = 16
SYSTEM_TOKENS: Final = 1024
MESSAGE_TOKENS: Final = 480


def ask_in_turn(comparison: Comparison, prompts: list[list[int]]) -> dict[str, list[Answer]]:
    """Every arm answers every prompt; which one comes first changes."""
    answers: dict[str, list[Answer]] = {arm.name: [] for arm in comparison.active}
    for number, prompt in enumerate(prompts):
        for arm in comparison.in_turn(number):
            with turn(arm):
                answers[arm.name].append(complete(arm.url, prompt, ANSWER_TOKENS))
    return answers


def documents(comparison: Comparison) -> list[Row]:
    """Questions about long documents, of which the engine's own cache holds only some.

    The documents are read once before; that is the row `documents-first`.
    """
    texts = [comparison.tokens(DOCUMENT_TOKENS) for _ in range(comparison.size(8, 5))]
    first = [[*text, *comparison.tokens(QUESTION_TOKENS)] for text in texts]
    rounds = comparison.size(4, 2)
    later = [[*text, *comparison.tokens(QUESTION_TOKENS)] for _ in range(rounds) for text in texts]
    answers: dict[str, list[Answer]] = {}

    def ask() -> dict[str, list[Answer]]:
        answers.update(ask_in_turn(comparison, later))
        return answers

    rows = measured(comparison, "documents-first", lambda: ask_in_turn(comparison, first))
    again = measured(comparison, "documents", ask)
    compare_equal_hits(comparison, rounds * first, later, answers, again)
    return [*rows, *again]


def compare_equal_hits(
    comparison: Comparison,
    earlier: list[list[int]],
    prompts: list[list[int]],
    answers: dict[str, list[Answer]],
    rows: list[Row],
) -> None:
    """Count answers that are not those of vLLM alone with as many tokens in its own cache.

    It gets the `earlier` prompt just before each prompt, so that it computes the same in the same
    steps as an arm whose cache has the document. Where it hits another number of tokens than an
    arm did, it is no reference for that arm.
    """
    plain = next((arm for arm in comparison.active if arm.name == REFERENCE), None)
    if plain is None:
        return
    reference: list[Answer] = []
    with turn(plain):
        for first, prompt in zip(earlier, prompts, strict=True):
            reset_prefix_cache(plain.url)
            complete(plain.url, first, 1)
            reference.append(complete(plain.url, prompt, ANSWER_TOKENS))
    for row in rows:
        pairs = zip(answers.get(row.arm, []), reference, strict=False)
        equal = [(own, other) for own, other in pairs if own.cached_tokens == other.cached_tokens]
        if equal:
            row.differ_equal_hit = sum(own.text != other.text for own, other in equal)


def conversations(comparison: Comparison) -> list[Row]:
    """Conversations that share a system prompt; every prompt has all turns before it."""
    system = comparison.tokens(SYSTEM_TOKENS)
    users, turns = comparison.size(12, 9), 4
    messages = [[comparison.tokens(MESSAGE_TOKENS) for _ in range(turns)] for _ in range(users)]

    def ask() -> dict[str, list[Answer]]:
        answers: dict[str, list[Answer]] = {arm.name: [] for arm in comparison.active}
        histories = {arm.name: [list(system) for _ in range(users)] for arm in comparison.active}
        number = 0
        for at in range(turns):
            for user in range(users):
                for arm in comparison.in_turn(number):
                    history = histories[arm.name][user]
                    history += messages[user][at]
                    with turn(arm):
                        answer = complete(arm.url, history, ANSWER_TOKENS)
                    history += answer.token_ids
                    answers[arm.name].append(answer)
                number += 1
        return answers

    return measured(comparison, "conversations", ask)

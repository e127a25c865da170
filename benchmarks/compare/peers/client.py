"""Requests one by one through the engine's OpenAI interface, timed by a clock of our own."""

from __future__ import annotations

import http.client
import json
import time
import urllib.request
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from benchmarks.compare.peers.arms import MODEL_NAME

ANSWER_SECONDS_MAX: Final = 60.0


@dataclass
class Answer:
    """The result of one request; times in seconds."""

    text: str = ""
    ttft: float = 0.0
    total: float = 0.0
    tokens: int = 0
    cached_tokens: int = 0
    """Tokens of the prompt that came from any cache."""
    token_ids: list[int] = field(default_factory=list[int])
    failure: str = ""
    stamps: list[float] = field(default_factory=list[float])
    """When each piece of the answer came."""

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first one."""
        if self.failure or self.tokens < 2:
            return None
        return (self.total - self.ttft) / (self.tokens - 1)


def complete(
    url: str, prompt: list[int], max_tokens: int, seconds: float = ANSWER_SECONDS_MAX
) -> Answer:
    """Send one greedy request and stream its answer. A failure is in the answer, never raised.

    Silence for `seconds` is a failure.
    """
    where = urlsplit(url)
    answer = Answer()
    body = {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=seconds)
    started = time.perf_counter()
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != http.client.OK:
            answer.failure = f"{response.status} {response.read(300)!r}"
            return answer
        for line in response:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            take(answer, json.loads(line[6:]), time.perf_counter() - started)
        if not answer.tokens:
            answer.failure = "the answer has no usage"
    except (OSError, http.client.HTTPException, ValueError) as error:
        answer.failure = f"{type(error).__name__}: {error}"
    finally:
        connection.close()
    return answer


def take(answer: Answer, event: dict[str, Any], now: float) -> None:
    """Add one event of a stream to an answer."""
    if "error" in event:
        answer.failure = str(event["error"])[:300]
    for choice in event.get("choices", []):
        if not answer.stamps:
            answer.ttft = now
        answer.text += choice.get("text", "")
        answer.total = now
        answer.stamps.append(now)
        answer.token_ids += choice.get("token_ids") or []
    if usage := event.get("usage"):
        answer.tokens = int(usage["completion_tokens"])
        details = usage.get("prompt_tokens_details") or {}
        answer.cached_tokens = int(details.get("cached_tokens") or 0)


def reset_prefix_cache(url: str) -> None:
    """Empty the engine's own prefix cache; its connector's stays."""
    request = urllib.request.Request(f"{url}/reset_prefix_cache", method="POST")
    with urllib.request.urlopen(request, timeout=ANSWER_SECONDS_MAX):
        pass


def get(url: str) -> str:
    """The body of a page."""
    with urllib.request.urlopen(url, timeout=ANSWER_SECONDS_MAX) as answer:
        return str(answer.read().decode())

"""`kvlake explain`: where the tokens of prompts came from or are, and why some were computed.

`kvlake record` writes down which chunks prompts have, for `make replay`: each prompt once, in the
order in which they came, or counted as lost. Those that a sidecar still had when it ended are
neither.

Does not own the figures: schedulers report them (`connector/scheduler/outcomes.py`), the sidecar
keeps the last ones (`limits.prompts_kept`), looks prompts up (`observe/prompt_match.py`), and
keeps their chunks (`service/uses.py`).
"""

import http.client
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import IO, Any, Final, cast

from sidecar.cli.client import SidecarClient, client_of, get_list
from sidecar.cli.console import CommandError, Document, NoAnswer, Options, duration, show, table
from sidecar.observe.benefit import MEANINGS
from sidecar.sessions.model_names import printable

TOKENS_MAX: Final = 1 << 20
PROMPTS_MAX: Final = 1000
"""As in `observe/prompts.py`, where a document has no more."""
ANSWER_BYTES_MAX: Final = 16 << 20
SAID_CHARACTERS_MAX: Final = 400
NOT_FOR_TOKENS: Final = ("stream", "stream_options", "max_tokens", "max_completion_tokens")
POLL_SECONDS: Final = 1.0
SHORT: Final = 24
"""Characters of a value that is shown."""
_PLACES: Final = {"host": "in host memory", "store": "in the object store"}


def main(options: Options) -> None:
    """Explain one request, the last ones, or what is cached of a prompt; or record prompts."""
    if options.action == "record":
        _record(options)
        return
    if options.prompt:
        if options.request_id is not None:
            raise CommandError("give either --prompt or REQUEST_ID, not both")
        question = read_question(options.prompt, options.engine, options.timeout)
        document = client_of(options).get("/match", question)
        if not isinstance(document.get("realms"), list):
            raise NoAnswer("the sidecar answered something else; restart it with this release")
        show(document, render_match, as_json=options.json)
        return
    if not 1 <= options.last <= PROMPTS_MAX:
        raise CommandError(f"--last {options.last}: give a number from 1 to {PROMPTS_MAX:,}")
    query = {"last": str(options.last)}
    if options.request_id is not None:
        if not options.request_id:
            raise CommandError(
                "REQUEST_ID '': it is empty; give vLLM's id of a request, or leave it out for the "
                "last prompt"
            )
        query["request"] = options.request_id
    document = get_list(client_of(options), "/prompts", "prompts", **query)
    if options.request_id and not document["prompts"]:
        raise NoAnswer(
            f"no prompt of request {options.request_id!r} is known: the sidecar keeps the last "
            "ones (limits.prompts_kept) of its engines, by vLLM's request id; `kvlake explain` "
            "lists them"
        )
    show(document, render, as_json=options.json)


def render(document: Document) -> str:
    """The prompts as text, the newest last."""
    prompts: list[Document] = document["prompts"]
    if not prompts:
        return str(document.get("off", "no prompt was reported yet"))
    return "\n\n".join(_prompt(one) for one in reversed(prompts))


def _prompt(one: Document) -> str:
    tokens: dict[str, int] = one.get("tokens", {})
    total = sum(tokens.values())
    ago = duration(one.get("seconds_ago", 0))
    engine = f"{one.get('model') or '?'} on {one.get('engine_id', '?')}"
    lines = [f"{one.get('request_id', '?')}  {total:,} tokens, {ago} ago, {engine}"]
    runs: list[Document] = one.get("runs", [])
    if runs:
        lines.append(_runs(runs, total))
    if not runs or runs[-1]["end_tokens"] < total:
        rows: list[Sequence[object]] = [("TOKENS", "", "")]
        for outcome, meaning in MEANINGS.items():
            if count := tokens.get(outcome, 0):
                rows.append((f"{count:,}", f"{100 * count / total:.0f}%", meaning))
        lines.append(table(rows))
    if one.get("missed"):
        gone, reason = one.get("missed_gone_seconds"), one.get("missed_reason") or "computed"
        when = "" if gone is None else f" {duration(gone)} before"
        lines.append(
            f"the first chunk that was not loaded, from token {one['missed_token']:,} on: "
            f"{reason}{when} (chunk {one['missed']})"
        )
    if (limit := one.get("late_limit_ms", 0)) and tokens.get("late"):
        waited = one["late_ms"]
        why = ""
        if waited < limit:
            why = "; the sidecar ended the wait: computing had become faster (store.recompute)"
        lines.append(f"late: {waited:,.0f} of {limit:,.0f} ms{why}")
    lines.append(
        "time: "
        f"lookups {one.get('lookup_ms', 0):.1f} ms, waiting for the store "
        f"{one.get('read_ms', 0):.0f} ms, load {one.get('load_ms', 0):.0f} ms; computing what was "
        f"loaded would have taken {one.get('saved_ms', 0):.0f} ms"
    )
    return "\n".join(lines)


def _runs(runs: Sequence[Document], total: int) -> str:
    """The tokens of a prompt in their order."""
    rows: list[Sequence[object]] = [("FROM", "TO", "", "", "")]
    begin = 0
    for run in runs:
        end, outcome = int(run["end_tokens"]), str(run["outcome"])
        share = f"{100 * (end - begin) / total:.0f}%"
        rows.append((f"{begin:,}", f"{end:,}", share, outcome, MEANINGS.get(outcome, "")))
        begin = end
    if begin < total:
        rows.append(
            (f"{begin:,}", f"{total:,}", "", "", "more runs than are reported; all tokens:")
        )
    return table(rows)


def render_match(document: Document) -> str:
    """What each realm has of a prompt, as text."""
    realms: list[Document] = document["realms"]
    total: int = document["tokens"]
    if not realms:
        return f"{total:,} tokens; no engine has attached yet, so nothing is cached"
    # The one that is used now, or else has most of it, is what the others differ from.
    first = next((one for one in realms if one["attached"]), realms[0])
    others = [one for one in realms if one is not first and one["model"] == first["model"]]
    parts = [_match(first, total)]
    for one in others:
        part = _match(one, total)
        if one["home"] != first["home"]:
            # Else it is another KV cache group of the same engine.
            unlike = _differences(first["about"], one["about"]) or ["topology"]
            part += f"\nit differs from the first in {', '.join(unlike)}"
        parts.append(part)
    return "\n\n".join(parts)


def _match(one: Document, total: int) -> str:
    attached = "attached" if one["attached"] else "no engine attached"
    layers = f", {one['layers']}" if one.get("layers") else ""
    cached = f"{one['found_tokens']:,} of {total:,} tokens cached"
    lines = [f"{one['model']}{layers}  {cached}, namespace {one['namespace']}, {attached}"]
    rows: list[Sequence[object]] = [("FROM", "TO", "")]
    begin = 0
    for run in one["runs"]:
        where = str(run["where"])
        rows.append((f"{begin:,}", f"{run['end_tokens']:,}", _PLACES.get(where, MEANINGS[where])))
        begin = run["end_tokens"]
    if begin < total:
        rows.append((f"{begin:,}", f"{total:,}", MEANINGS["tail"]))
    lines.append(table(rows))
    if one.get("missed_gone_seconds") is not None:
        lines.append(f"the first one left the cache {duration(one['missed_gone_seconds'])} ago")
    if one.get("differs_at") is not None:
        lines.append(
            f"the prompt differs from a cached one at token {one['differs_at']:,} (chunk "
            f"{one['nearest'][:32]} begins as it does)"
        )
    elif one.get("nearest"):
        lines.append(
            "the same tokens are cached under another key: another adapter or image "
            f"(chunk {one['nearest'][:32]})"
        )
    return "\n".join(lines)


def _differences(first: Document, other: Document) -> list[str]:
    """Names of the settings that differ, with both values where they are short."""
    found: list[str] = []
    for name in sorted({*first, *other}):
        values = first.get(name), other.get(name)
        if values[0] != values[1]:
            texts = [json.dumps(value) for value in values]
            short = all(len(text) <= SHORT for text in texts)
            found.append(f"{name} ({texts[0]}, {texts[1]})" if short else name)
    return found


def read_question(place: str, engine: str, seconds_max: float) -> Document:
    """The prompt in a file, as the sidecar's `/match` takes it. Raises `CommandError`."""
    try:
        text = sys.stdin.read() if place == "-" else Path(place).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"--prompt {place}: {error}; give a readable file in UTF-8") from error
    try:
        given: object = json.loads(text)
    except ValueError:
        given = text
    if isinstance(given, dict):
        body = cast("dict[str, Any]", given)
    elif isinstance(given, list):
        body = {"prompt": cast("list[object]", given)}
    else:
        body = {"prompt": text}
    salt: object = body.get("cache_salt") or ""
    if not isinstance(salt, str):
        raise CommandError(f"--prompt {place}: cache_salt={salt!r}; it must be text")
    tokens = body.get("prompt")
    if not isinstance(tokens, list):
        if not body.get("messages") and not tokens:
            raise CommandError(
                f"--prompt {place}: there is no prompt in it; give text, a list of token ids, or "
                "the body of a request with prompt or messages"
            )
        tokens = _tokens_of(body, engine, seconds_max)
    return {"tokens": _checked(cast("list[object]", tokens), place), "cache_salt": salt}


def _checked(tokens: list[object], place: str) -> list[object]:
    wrong = next((one for one in tokens if type(one) is not int or not 0 <= one < 1 << 31), None)
    if wrong is not None:
        raise CommandError(f"--prompt {place}: {wrong!r} is no token id; they are whole numbers")
    if not 0 < len(tokens) <= TOKENS_MAX:
        raise CommandError(
            f"--prompt {place}: it has {len(tokens):,} tokens; give between 1 and {TOKENS_MAX:,}"
        )
    return tokens


def _tokens_of(body: Mapping[str, Any], engine: str, seconds_max: float) -> list[object]:
    """Ask vLLM. Raises `NoAnswer`."""
    url = f"{engine.rstrip('/')}/tokenize"
    asked = {name: value for name, value in body.items() if name not in NOT_FOR_TOKENS}
    request = urllib.request.Request(  # noqa: S310 (the option's type takes http and https alone)
        url, json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=seconds_max) as answer:
            document: Any = json.loads(answer.read(ANSWER_BYTES_MAX))
        tokens = document["tokens"]
    except urllib.error.HTTPError as error:
        with error:
            said = printable(
                error.read(ANSWER_BYTES_MAX).decode(errors="replace"), SAID_CHARACTERS_MAX
            )
        raise NoAnswer(f"{url} answered {error.code}: {said}") from error
    except OSError as error:
        raise NoAnswer(
            f"no answer from {url}: {error}; text needs the vLLM server that serves the model "
            "(--engine), a list of token ids does not"
        ) from error
    except (ValueError, KeyError, TypeError, http.client.HTTPException) as error:
        raise NoAnswer(f"{url} answered without tokens; is that a vLLM server?") from error
    return cast("list[object]", tokens)


def _record(options: Options) -> None:
    """Write prompts down until the time is over, or until Ctrl-C."""
    client = client_of(options)
    recording = Recording(client)
    # Before a file is made: without a sidecar there is nothing to record.
    answer = recording.ask()
    if off := answer.get("off"):
        raise CommandError(off)
    try:
        with _opened(options.file) as file, suppress(KeyboardInterrupt):
            recording.run(file, options.seconds, answer)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CommandError(f"{options.file}: {error.strerror}; name a new file") from error
    sys.stderr.write(f"{recording.summary(options.file)}\n")


def _opened(name: str) -> AbstractContextManager[IO[str]]:
    return nullcontext(sys.stdout) if name == "-" else Path(name).open("x")


class Recording:
    """What was written, and what could not be."""

    def __init__(self, client: SidecarClient) -> None:
        self._client = client
        self._epoch = 0
        self._last = 0
        self.prompts = 0
        self.lost = 0
        self.restarts = 0
        """How often the sidecar was another one."""

    def run(self, file: IO[str], seconds: float, first: Document) -> None:
        """Write what comes in this time, and what the sidecar still has from before.

        `first`: an answer of `ask`.
        """
        ends = time.monotonic() + seconds
        answer: Document | None = first
        while True:
            # A sidecar that restarts answers again.
            with suppress(NoAnswer):
                self.poll(file, answer)
            answer = None
            left = ends - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, POLL_SECONDS))

    def ask(self) -> Document:
        """The prompts since the last one written, or the first of them. Raises `NoAnswer`."""
        answer = self._client.get(f"/uses?after={self._last}")
        if self._epoch not in (0, answer["epoch"]):
            # Another sidecar: it counts from 1 again.
            answer = self._client.get("/uses?after=0")
            self._last = 0
            self.restarts += 1
        self._epoch = answer["epoch"]
        return answer

    def poll(self, file: IO[str], answer: Document | None = None) -> None:
        """Write the prompts since the last call. `answer`: one of `ask`, if there is one."""
        answer = answer or self.ask()
        self._write(file, answer["uses"])
        while answer["more"]:
            answer = self.ask()
            self._write(file, answer["uses"])

    def _write(self, file: IO[str], prompts: list[Document]) -> None:
        for one in prompts:
            # Those before the first are lost if that sidecar began while it was recorded.
            if self._last or self.restarts:
                self.lost += one["number"] - self._last - 1
            self._last = one["number"]
            line = {
                "time": one["at"],
                "model": one["model"],
                "keys": one["keys"],
                "tokens": one["tokens"],
                "tokens_per_key": one["tokens_per_key"],
            }
            file.write(json.dumps(line) + "\n")
            self.prompts += 1
        file.flush()

    def summary(self, name: str) -> str:
        """How many prompts there were."""
        text = f"{self.prompts} prompts are in {name}"
        if self.lost:
            text += f", {self.lost} came too fast to be recorded: raise limits.prompts_kept"
        if self.restarts:
            text += (
                f"; the sidecar restarted ({self.restarts}), and its last prompts may be missing"
            )
        return text

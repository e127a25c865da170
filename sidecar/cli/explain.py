"""`kvlake explain`: where the tokens of the last prompts came from, and why some were computed.

Does not own the figures: schedulers report them (`connector/scheduler/outcomes.py`), the sidecar
keeps the last ones (`limits.prompts_kept`).
"""

from collections.abc import Sequence

from sidecar.cli.client import client_of, get_list
from sidecar.cli.console import Document, NoAnswer, Options, duration, show, table
from sidecar.observe.benefit import MEANINGS


def main(options: Options) -> None:
    """Explain one request, or the last ones."""
    query = {"last": str(options.last)}
    if options.request_id:
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
        return "no prompt was reported yet"
    return "\n\n".join(_prompt(one) for one in reversed(prompts))


def _prompt(one: Document) -> str:
    tokens: dict[str, int] = one.get("tokens", {})
    total = sum(tokens.values())
    ago = duration(one.get("seconds_ago", 0))
    engine = f"{one.get('model') or '?'} on {one.get('engine_id', '?')}"
    lines = [f"{one.get('request_id', '?')}  {total:,} tokens, {ago} ago, {engine}"]
    rows: list[Sequence[object]] = [("TOKENS", "", "")]
    for outcome, meaning in MEANINGS.items():
        if count := tokens.get(outcome, 0):
            rows.append((f"{count:,}", f"{100 * count / total:.0f}%", meaning))
    lines.append(table(rows))
    if one.get("missed"):
        gone = one.get("missed_gone_seconds")
        when = "" if gone is None else f"; it left the cache {duration(gone)} before"
        lines.append(
            f"the first chunk that was not loaded begins at token {one['missed_token']:,}{when} "
            f"(chunk {one['missed']})"
        )
    lines.append(
        "time: "
        f"lookups {one.get('lookup_ms', 0):.1f} ms, waiting for the store "
        f"{one.get('read_ms', 0):.0f} ms, load {one.get('load_ms', 0):.0f} ms; computing what was "
        f"loaded would have taken {one.get('saved_ms', 0):.0f} ms"
    )
    return "\n".join(lines)

"""What people call the model of a namespace.

Owns reading the name out of a namespace's JSON, where an engine may have said less than that. Does
not own the namespace (`connector/identity/namespace.py`, `connector/offloading/keys.py`).

Invariant: whatever the JSON is, there is a name, of printable characters and bounded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

from sidecar.protocol.limits import MODEL_CHARACTERS_MAX

if TYPE_CHECKING:
    from collections.abc import Mapping

UNKNOWN: Final = "-"
_DIGITS_SHOWN: Final = 12


def model_name(namespace: Mapping[str, Any], served_as: str = "") -> str:
    """The model's name: of its hub, else as its engine serves it, else its files' first digits.

    Args:
        namespace: the JSON of an engine's namespace.
        served_as: what the engine calls a model that is files; it says nothing of their content.
    """
    model: object = namespace.get("model")
    identity: object = namespace.get("identity")
    if not model and isinstance(identity, dict):
        # Of vLLM's own offloading: what its tier is not told lies one level deeper.
        model = cast("dict[str, Any]", identity).get("model")
    if isinstance(model, str):
        return printable(model or served_as) or UNKNOWN
    known = cast("dict[str, Any]", model) if isinstance(model, dict) else {}
    if name := known.get("name") or served_as:
        return printable(str(name))
    files = known.get("digest") or known.get("sampled")
    return f"files {printable(str(files))[:_DIGITS_SHOWN]}" if files else UNKNOWN


def layers_of(namespace: Mapping[str, Any]) -> str:
    """Which part of the model it is: "5 of 30 layers", empty where it is all of it."""
    group: object = namespace.get("group")
    if not isinstance(group, list) or not group:
        return ""
    return f"{len(cast('list[object]', group))} of {namespace.get('layers', '?')} layers"


def printable(text: str, characters_max: int = MODEL_CHARACTERS_MAX) -> str:
    """A text that may be shown: it comes from an engine, from the store, or from who answers."""
    shown = text[:characters_max]
    return "".join(one if one.isprintable() else "?" for one in shown)

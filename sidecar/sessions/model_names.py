"""The model's name, to show to people, from a namespace's JSON.

Does not own the namespace (`connector/identity/namespace.py`, `connector/offloading/keys.py`).

Invariant: for any JSON the name has printable characters only, and a bounded number of them.
"""

from collections.abc import Mapping
from typing import Any, Final, cast

from sidecar.protocol import MODEL_CHARACTERS_MAX

UNKNOWN: Final = "-"
MODELS_MAX: Final = 64
"""Models that metrics tell apart."""
OTHER_MODELS: Final = "other"
_DIGITS_SHOWN: Final = 12


def model_name(namespace: Mapping[str, Any], served_as: str = "") -> str:
    """The model's name on its hub, else `served_as`, else the first digits of its files' digest.

    Args:
        namespace: the JSON of an engine's namespace.
        served_as: the engine's own name of a model that is files; it does not identify them.
    """
    model: object = namespace.get("model")
    identity: object = namespace.get("identity")
    if not model and isinstance(identity, dict):
        # vLLM's own offloading nests it one level deeper.
        model = cast("dict[str, Any]", identity).get("model")
    if isinstance(model, str):
        return printable(model or served_as) or UNKNOWN
    known = cast("dict[str, Any]", model) if isinstance(model, dict) else {}
    if name := known.get("name") or served_as:
        return printable(str(name))
    files = known.get("digest") or known.get("sampled")
    return f"files {printable(str(files))[:_DIGITS_SHOWN]}" if files else UNKNOWN


def layers_of(namespace: Mapping[str, Any]) -> str:
    """Which part of the model a namespace is: "5 of 30 layers", empty where it is all."""
    group: object = namespace.get("group")
    if not isinstance(group, list) or not group:
        return ""
    layers = printable(str(namespace.get("layers", "?")))
    return f"{len(cast('list[object]', group))} of {layers} layers"


def printable(text: str, characters_max: int = MODEL_CHARACTERS_MAX) -> str:
    """Untrusted text with `?` in place of unprintable characters, cut to a length."""
    shown = text[:characters_max]
    return "".join(one if one.isprintable() else "?" for one in shown)


class ModelLabels:
    """Names of models as labels of metrics: the first `MODELS_MAX`, then `OTHER_MODELS`."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def of(self, name: str) -> str:
        """The label of a model."""
        if name not in self._known:
            if len(self._known) >= MODELS_MAX:
                return OTHER_MODELS
            self._known.add(name)
        return name

"""Masking secrets in all output of this process.

Owns the list of this process' secrets. Does not own where secrets come from (`config/model.py`),
nor the outputs that are masked (`logs.py`, `observe/http.py`).

The first line of defence is that messages contain no secrets. But the error of a library may repeat
the URL or the options that it was given.

Invariant: a concealed secret stays concealed until the process ends.
"""

from __future__ import annotations

import json
import urllib.parse
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

MASK: Final = "***"
SECRET_CHARACTERS_MIN: Final = 6
"""Shorter ones are not masked: they occur in ordinary words."""


class Redactor:
    """A list of secrets, and masking them. A process has one; a test makes its own."""

    def __init__(self) -> None:
        self._known: list[str] = []
        """The longest first: one may be a part of another."""

    def conceal(self, secrets: Iterable[str]) -> None:
        """Mask these from now on, also as they look in a URL, in JSON and in a Python literal."""
        for secret in secrets:
            if len(secret) < SECRET_CHARACTERS_MIN:
                continue
            forms = {
                secret,
                urllib.parse.quote(secret, safe=""),
                urllib.parse.quote(secret),
                urllib.parse.unquote(secret),
                json.dumps(secret)[1:-1],
                repr(secret)[1:-1],
            }
            self._known.extend(forms.difference(self._known))
        self._known.sort(key=len, reverse=True)

    def redacted(self, text: str) -> str:
        """The text with every known secret masked."""
        for secret in self._known:
            if secret in text:
                text = text.replace(secret, MASK)
        return text


_process: Final = Redactor()
conceal: Final = _process.conceal
redacted: Final = _process.redacted

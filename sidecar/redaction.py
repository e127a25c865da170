"""The last line before a secret gets out: known secrets are masked in every text that leaves.

Owns the list of this process' secrets, and masking them. Does not own where secrets come from
(`config/model.py` says what they are) nor the outputs that are masked (`logs.py`,
`observe/http.py`).

The first line is that secrets are not put into messages at all; but errors of libraries say what
they like, and a store's error may well repeat the URL or the options that it was given.

Invariant: what was concealed stays concealed for the life of the process.
"""

from __future__ import annotations

import json
import urllib.parse
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

MASK: Final = "***"
SECRET_CHARACTERS_MIN: Final = 6
"""A shorter one is in every other word, and no secret."""


class Redactor:
    """A list of secrets, and the masking of them. A process has one; a test makes its own."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._ordered: list[str] = []

    def conceal(self, secrets: Iterable[str]) -> None:
        """Mask these from now on, also as they look in a URL, in JSON and in a Python literal."""
        for secret in secrets:
            if len(secret) < SECRET_CHARACTERS_MIN:
                continue
            self._known.update(
                (
                    secret,
                    urllib.parse.quote(secret, safe=""),
                    urllib.parse.quote(secret),
                    urllib.parse.unquote(secret),
                    json.dumps(secret)[1:-1],
                    repr(secret)[1:-1],
                )
            )
        # The longest first: one may be a part of another.
        self._ordered = sorted(self._known, key=len, reverse=True)

    def redacted(self, text: str) -> str:
        """The text with every known secret masked."""
        for secret in self._ordered:
            if secret in text:
                text = text.replace(secret, MASK)
        return text


_process: Final = Redactor()


def conceal(secrets: Iterable[str]) -> None:
    """Mask these from now on in all that this process writes."""
    _process.conceal(secrets)


def redacted(text: str) -> str:
    """The text with every secret of this process masked."""
    return _process.redacted(text)

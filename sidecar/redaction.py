"""The last line before a secret gets out: known secrets are masked in every text that leaves.

Owns the list of this process' secrets, and masking them. Does not own where secrets come from
(`config.py` says what they are) nor the outputs that are masked (`logs.py`, `http.py`).

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

_known: set[str] = set()
_ordered: list[str] = []


def conceal(secrets: Iterable[str]) -> None:
    """Mask these from now on, also as they look in a URL, in JSON and in a Python literal."""
    for secret in secrets:
        if len(secret) < SECRET_CHARACTERS_MIN:
            continue
        _known.update(
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
    _ordered[:] = sorted(_known, key=len, reverse=True)


def redacted(text: str) -> str:
    """The text with every known secret masked."""
    for secret in _ordered:
        if secret in text:
            text = text.replace(secret, MASK)
    return text

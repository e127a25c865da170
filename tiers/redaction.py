"""Masking secrets in all output of this process, in URLs and in options of clients.

Owns the list of this process' secrets, and which parts of a URL or of options are secret: those
whose name looks like one. Does not own where secrets come from (`sidecar/config/model.py`), nor the
outputs that are masked (`sidecar/logs.py`, `sidecar/observe/http.py`, `tiers/store/errors.py`).

The first line of defence is that messages contain no secrets. But the error of a library may repeat
the URL or the options that it was given.

Invariant: a concealed secret stays concealed until the process ends.
"""

import json
import re
import urllib.parse
from collections.abc import Iterable
from typing import Final, cast

MASK: Final = "***"
SECRET_CHARACTERS_MIN: Final = 6
"""Shorter ones are not masked: they occur in ordinary words."""
_SECRET_NAME: Final = re.compile(
    r"key|secret|token|pass|cred|private|session|signature|sas|auth|connection_string",
    re.IGNORECASE,
)
# Bounded: without a limit, long texts without "://" take time with the square of their length.
_USERINFO: Final = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]{0,31}://)(?P<user>[^/\s]*)@")
_QUERY: Final = re.compile(r"\?.*$", re.DOTALL)
"""It may be a signature (Azure)."""
_QUERY_IN_TEXT: Final = re.compile(r"(?<=://)([^\s?]{1,2048})\?[^\s)\"']+")


class Redactor:
    """A list of secrets, and masking them: one of the process, and one of each store."""

    def __init__(
        self, secrets: Iterable[str] = (), characters_min: int = SECRET_CHARACTERS_MIN
    ) -> None:
        self._characters_min = characters_min
        self._known: list[str] = []
        """The longest first: one may be a part of another."""
        self.conceal(secrets)

    def conceal(self, secrets: Iterable[str]) -> None:
        """Mask these from now on, also as they look in a URL, in JSON and in a Python literal."""
        for secret in secrets:
            if len(secret) < self._characters_min:
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
            text = text.replace(secret, MASK)
        return text


_process: Final = Redactor()
conceal: Final = _process.conceal
redacted: Final = _process.redacted


def redacted_texts(value: object) -> object:
    """A copy of plain values, with every known secret masked in the texts among them.

    Names and numbers stay as they are: a secret may look like a part of one.
    """
    if isinstance(value, dict):
        items = cast("dict[str, object]", value).items()
        return {name: redacted_texts(item) for name, item in items}
    if isinstance(value, (list, tuple)):
        return [redacted_texts(item) for item in cast("list[object]", value)]
    return redacted(value) if isinstance(value, str) else value


def mask_url(url: str) -> str:
    """A URL without its user, password and query."""
    return _QUERY.sub(f"?{MASK}", _USERINFO.sub(_user_masked, url)) if "://" in url else url


def mask_urls(text: str) -> str:
    """A text whose URLs have no user, password and query."""
    return _QUERY_IN_TEXT.sub(rf"\1?{MASK}", _USERINFO.sub(_user_masked, text))


def _user_masked(match: re.Match[str]) -> str:
    # abfs://container@account is Azure's way to write a place, not a user.
    plain = match["scheme"].startswith(("abfs", "wasb")) and ":" not in match["user"]
    return match[0] if plain else f"{match['scheme']}{MASK}@"


def masked(value: object, found: set[str] | None = None, name: str = "") -> object:
    """A copy of plain values with every secret replaced, at any depth, and added to `found`."""
    found = set() if found is None else found
    if isinstance(value, dict):
        # Below a secret name everything is secret: `auth: {inner: ...}`.
        return {
            key: masked(item, found, name if _SECRET_NAME.search(name) else key)
            for key, item in cast("dict[str, object]", value).items()
        }
    if isinstance(value, list):
        return [masked(item, found, name) for item in cast("list[object]", value)]
    if isinstance(value, bool) or value is None:
        return value
    if _SECRET_NAME.search(name):
        found.add(str(value))
        return MASK
    if not isinstance(value, str) or (shown := mask_url(value)) == value:
        return value
    users = {part for match in _USERINFO.finditer(value) for part in match["user"].split(":", 1)}
    query = value.partition("?")[2].split("&")
    found |= (users | {part.partition("=")[2] for part in query}) - {""}
    return shown

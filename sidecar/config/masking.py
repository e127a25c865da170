"""Secrets in URLs and in options of clients: finding them, and values that are fit to be shown.

An option is a secret if its name looks like one. What a name cannot tell is in the types of the
settings (`types.py`).
"""

from __future__ import annotations

import re
from typing import Final, cast

from sidecar.redaction import MASK

_SECRET_NAME: Final = re.compile(
    r"secret|token|passw|credential|private|signature|sas|auth|connection_string|(^|_|-)keys?($|_|-)",
    re.IGNORECASE,
)
_USERINFO: Final = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)(?P<user>[^/\s]*)@")
_QUERY: Final = re.compile(r"\?.*$", re.DOTALL)


def mask_url(url: str) -> str:
    """A URL without its user, password and query, which may be a SAS signature."""
    if "://" not in url:
        return url

    def replace(match: re.Match[str]) -> str:
        # abfs://container@account is Azure's way to write a place, not a user.
        plain = match["scheme"].startswith(("abfs", "wasb")) and ":" not in match["user"]
        return match[0] if plain else f"{match['scheme']}{MASK}@"

    return _QUERY.sub(f"?{MASK}", _USERINFO.sub(replace, url))


def secrets_of_url(url: str) -> set[str]:
    """What `mask_url` leaves out: user, password and the values of the query."""
    if mask_url(url) == url:
        return set()
    found = {part for match in _USERINFO.finditer(url) for part in match["user"].split(":", 1)}
    _, _, query = url.partition("?")
    found.update(part.partition("=")[2] for part in query.split("&"))
    return found - {""}


def secrets_in(value: object, name: str = "") -> set[str]:
    """Every text in `value`, at any depth, that `masked` leaves out."""
    if isinstance(value, dict):
        items = cast("dict[str, object]", value).items()
        return {one for key, item in items for one in secrets_in(item, _inherited(name, key))}
    if isinstance(value, list):
        return {one for item in cast("list[object]", value) for one in secrets_in(item, name)}
    if isinstance(value, bool) or value is None:
        return set()
    if _SECRET_NAME.search(name):
        return {str(value)}
    return secrets_of_url(value) if isinstance(value, str) else set()


def masked(value: object, name: str = "") -> object:
    """A copy of plain values with every secret replaced, at any depth."""
    if isinstance(value, dict):
        items = cast("dict[str, object]", value).items()
        return {key: masked(item, _inherited(name, key)) for key, item in items}
    if isinstance(value, list):
        return [masked(item, name) for item in cast("list[object]", value)]
    if isinstance(value, bool) or value is None:
        return value
    if _SECRET_NAME.search(name):
        return MASK
    return mask_url(value) if isinstance(value, str) else value


def _inherited(name: str, key: str) -> str:
    """Below a secret name everything is secret: `auth: {inner: ...}`."""
    return name if _SECRET_NAME.search(name) else key

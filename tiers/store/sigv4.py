"""AWS Signature Version 4 of a GET: the header fields that say who asks.

Owns the canonical request, the string to sign and the key that is derived for a day. Does not own
credentials (`aws_credentials.py`), the clock, nor any I/O.

Source: https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html, whose example
is a test.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import datetime as dt

_ALGORITHM: Final = "AWS4-HMAC-SHA256"
_NO_BODY: Final = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True)
class Keys:
    """Who asks. `token` belongs to temporary keys."""

    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    token: str | None = field(default=None, repr=False)


def sign_get(
    fields: dict[str, str], path: str, *, keys: Keys, region: str, now: dt.datetime
) -> dict[str, str]:
    """`fields` and those that sign them, together.

    Args:
        fields: names in lower case, `host` among them; all are signed.
        path: as it is sent, percent-encoded; there is no query.
        keys: who asks.
        region: the bucket's.
        now: in UTC; servers refuse what is more than a quarter of an hour off.
    """
    moment = now.strftime("%Y%m%dT%H%M%SZ")
    signed = {**fields, "x-amz-content-sha256": _NO_BODY, "x-amz-date": moment}
    if keys.token is not None:
        signed["x-amz-security-token"] = keys.token
    names = sorted(signed)
    lines = [f"{name}:{signed[name]}" for name in names]
    request = "\n".join(["GET", path, "", *lines, "", ";".join(names), _NO_BODY])
    scope = f"{moment[:8]}/{region}/s3/aws4_request"
    digest = hashlib.sha256(request.encode()).hexdigest()
    text = "\n".join([_ALGORITHM, moment, scope, digest])
    key = _signing_key(keys.secret_key, moment[:8], region)
    signature = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
    signed["authorization"] = (
        f"{_ALGORITHM} Credential={keys.access_key}/{scope}, "
        f"SignedHeaders={';'.join(names)}, Signature={signature}"
    )
    return signed


@functools.lru_cache(maxsize=4)
def _signing_key(secret: str, day: str, region: str) -> bytes:
    key = f"AWS4{secret}".encode()
    for part in (day, region, "s3", "aws4_request"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    return key

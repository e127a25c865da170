"""The page at `/`: one HTML file that draws the documents of this server, without a build.

Owns the file and the headers with which it is sent. The page has no figures of its own, so it needs
no token; what it asks for does.

Invariants: the browser loads nothing from elsewhere and runs no script but the page's own, which
its Content-Security-Policy names by their hashes; nobody may frame it.
"""

import base64
import hashlib
import re
from pathlib import Path
from typing import Final

_BLOCK: Final = r"<{0}>(.*?)</{0}>"


def load() -> tuple[str, dict[str, str]]:
    """The text of the page, and its headers."""
    text = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    style, script = (_hashes(text, name) for name in ("style", "script"))
    policy = (
        f"default-src 'none'; connect-src 'self'; script-src {script}; style-src {style}; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text, {
        "Content-Security-Policy": policy,
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }


def _hashes(text: str, name: str) -> str:
    blocks = re.findall(_BLOCK.format(name), text, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in blocks)
    return " ".join(f"'sha256-{digest}'" for digest in digests)

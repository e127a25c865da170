"""A real browser without a window for the tests of the page: Chromium, driven by Playwright.

Playwright would download its own browser from elsewhere. Chromium comes from npm instead, packed
with the libraries and fonts that it needs: `make setup` unpacks it into the environment, with
`python -m tests.browser`.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import brotli

if TYPE_CHECKING:
    from collections.abc import Generator

    from playwright.sync_api import Browser

PACKED: Final = Path(sys.prefix) / "node/node_modules/@sparticuz/chromium/bin"
FOLDER: Final = Path(sys.prefix) / "chromium"
PROGRAM: Final = "chromium"
LIBRARIES: Final = "al2023.tar.br"
FONTS: Final = "fonts.tar.br"
FONTS_CONFIG: Final = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>{0}/fonts</dir><cachedir>{0}/font-cache</cachedir></fontconfig>
"""
QUIET: Final = (
    # As root, Chromium's own sandbox does not start. It opens pages of the tests only.
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)


def unpack() -> None:
    """Unpack the browser, beside the place first."""
    new = FOLDER.with_name("chromium.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    (new / PROGRAM).write_bytes(_unpacked("chromium.br"))
    (new / PROGRAM).chmod(0o755)
    for name in (LIBRARIES, FONTS):
        with tarfile.open(fileobj=io.BytesIO(_unpacked(name))) as archive:
            archive.extractall(new, filter="data")
    (new / "fonts.conf").write_text(FONTS_CONFIG.format(FOLDER))
    shutil.rmtree(FOLDER, ignore_errors=True)
    new.rename(FOLDER)


def _unpacked(name: str) -> bytes:
    unpacked: bytes = brotli.decompress((PACKED / name).read_bytes())
    return unpacked


@contextlib.contextmanager
def browser() -> Generator[Browser]:
    """A browser that has seen nothing yet."""
    from playwright.sync_api import sync_playwright

    assert (FOLDER / PROGRAM).exists(), f"{FOLDER} is not there; `make setup` gets it from npm"
    environment: dict[str, str | float | bool] = {
        **os.environ,
        "LD_LIBRARY_PATH": str(FOLDER / "lib"),
        "FONTCONFIG_PATH": str(FOLDER),
    }
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=FOLDER / PROGRAM, args=list(QUIET), env=environment
        )
        try:
            yield launched
        finally:
            launched.close()


if __name__ == "__main__":
    unpack()
    print(f"Chromium is in {FOLDER}")

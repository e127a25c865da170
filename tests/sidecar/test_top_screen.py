"""`kvlake top` in a terminal: its keys, and whole pictures of 80 by 24."""

from __future__ import annotations

import codecs
import copy
import fcntl
import json
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.sidecar.client import WAIT_SECONDS_MAX, RunningSidecar
from tests.sidecar.prompt_records import reporting_sidecar, standing_in

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.promise("prompt-tokens")

WIDTH, HEIGHT = 80, 24
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
FOOTER = "1 help  2 health  3 contents  s sort: health  p pause  q quit"
PICTURES = Path(__file__).parent / "pictures"


@pytest.fixture
def sidecar(short_directory: Path) -> Iterator[RunningSidecar]:
    with reporting_sidecar(short_directory) as sidecar:
        yield sidecar


class Terminal:
    """A terminal of 80 by 24 with a process in it."""

    def __init__(self, *command: str, kind: str = "xterm-256color") -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
        self.before = termios.tcgetattr(slave)
        self._slave = slave
        environment = {**os.environ, "TERM": kind}
        # Bars look different without colors.
        environment.pop("NO_COLOR", None)
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment
        )
        self._read = ""
        # A character may arrive in two parts.
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def until(self, text: str) -> str:
        """What was drawn until this text was, from the last time on."""
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while text not in CONTROL.sub("", self._read):
            assert time.monotonic() < deadline, self._read
            if select.select([self._master], [], [], 0.1)[0]:
                self._read += self._decoder.decode(os.read(self._master, 65536))
        shown, self._read = self._read, ""
        return shown

    def rest(self) -> str:
        """What was drawn since then."""
        while select.select([self._master], [], [], 0.0)[0]:
            self._read += self._decoder.decode(os.read(self._master, 65536))
        shown, self._read = self._read, ""
        return shown

    def press(self, key: str) -> None:
        os.write(self._master, key.encode())

    def hang_up(self) -> None:
        os.close(self._slave)
        os.close(self._master)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.hang_up()

    @property
    def settings(self) -> list[object]:
        return termios.tcgetattr(self._slave)


def known_status(sidecar: RunningSidecar) -> dict[str, Any]:
    """What a sidecar answers, with numbers that are the same in each run."""
    status = copy.deepcopy(sidecar.status())
    status |= {"version": "1.2.3", "uptime_seconds": 4000.0}
    for seconds, window in zip((10, 60, 3600), status["prompts"]["last"].values(), strict=True):
        window["seconds"] = seconds
    status["rates"]["bytes_per_second"] = {"stored": 2e6, "loaded": 3e6, "written": 0, "read": 0}
    return status


def picture(status: dict[str, Any]) -> list[str]:
    """The lines of `top` in a real terminal of 80 by 24, beside a stand-in with this status."""
    server = standing_in(json.dumps(status).encode())
    url = f"http://127.0.0.1:{server.server_address[1]}"
    terminal = Terminal(sys.executable, "-P", "-m", "sidecar.cli", "top", "--url", url)
    try:
        shown = "".join(map(terminal.until, ("does it help?", FOOTER, FOOTER)))
    finally:
        terminal.close()
        server.shutdown()
        server.server_close()
    # The last may not have ended.
    pictures = [CONTROL.sub("", one) for one in shown.split("\x1b[H")[:-1]]
    whole = next(one for one in reversed(pictures) if FOOTER in one)
    text = whole.replace(url, "http://127.0.0.1:9400").rstrip()
    return [line.rstrip() for line in text.splitlines()]


def test_a_whole_picture(sidecar: RunningSidecar) -> None:
    """Its figures are those of `/metrics` (`test_top.py`)."""
    assert picture(known_status(sidecar)) == (PICTURES / "top-well.txt").read_text().splitlines()


def test_a_picture_of_much_trouble(sidecar: RunningSidecar) -> None:
    """It had 28 lines, so that the rates, the clients and the footer were cut off."""
    status = known_status(sidecar)
    status["problems"] = [
        {"code": f"code_{number}", "reason": "a reason as long as they are " * 4}
        for number in range(5)
    ]
    status["prompts"]["last"]["1min"]["tokens"] = {
        **dict.fromkeys(("local", "host", "evicted"), 200),
        "late": 100,
        "too_short": 50,
        "new": 10,
    }
    status["tiers"]["host"]["expected_hit_ratio"] = {"0.5x": 0.1, "1x": 0.2, "2x": 0.3, "4x": 0.4}
    shown = picture(status)
    assert len(shown) == HEIGHT
    assert shown == (PICTURES / "top-troubled.txt").read_text().splitlines()


def test_keys_in_a_terminal(sidecar: RunningSidecar) -> None:
    command = (sys.executable, "-P", "-m", "sidecar.cli", "top", "--url", sidecar.info.http_url)
    terminal = Terminal(*command)
    try:
        terminal.until("does it help?")
        terminal.press("3")
        terminal.until("what is in it?")
        terminal.press("p")
        terminal.until("paused")
        terminal.press("s")
        terminal.until("s sort: hits")
        terminal.press("q")
        assert terminal.process.wait(WAIT_SECONDS_MAX) == 0
        assert terminal.settings == terminal.before
    finally:
        terminal.close()


def test_keys_act_at_once_after_an_arrow(sidecar: RunningSidecar) -> None:
    """Each later one acted when two others had been pressed."""
    command = (sys.executable, "-P", "-m", "sidecar.cli", "top", "--url", sidecar.info.http_url)
    terminal = Terminal(*command)
    try:
        terminal.until("does it help?")
        terminal.press("\x1b[A")
        # Drawn after the arrow was read.
        terminal.until("does it help?")
        terminal.until("does it help?")
        terminal.press("3")
        terminal.until("what is in it?")
        terminal.press("sp")
        assert "s sort: hits" in terminal.until("paused")
        terminal.press("q")
        assert terminal.process.wait(WAIT_SECONDS_MAX) == 0
    finally:
        terminal.close()


def test_a_signal_to_end_leaves_the_terminal_as_it_was(sidecar: RunningSidecar) -> None:
    """It stayed on the other screen, and showed no key."""
    command = (sys.executable, "-P", "-m", "sidecar.cli", "top", "--url", sidecar.info.http_url)
    terminal = Terminal(*command)
    try:
        terminal.until("does it help?")
        assert terminal.settings != terminal.before
        terminal.process.terminate()
        assert terminal.process.wait(WAIT_SECONDS_MAX) == 128 + signal.SIGTERM
        assert terminal.settings == terminal.before
        shown = terminal.rest()
        assert "\x1b[?1049l" in shown
        assert "Traceback" not in shown
    finally:
        terminal.close()


@pytest.mark.parametrize("kind", ["dumb", "unknown"])
def test_a_terminal_that_only_prints_is_none(kind: str) -> None:
    """Nothing was shown, for ever."""
    command = (sys.executable, "-P", "-m", "sidecar.cli", "top", "--url", "http://127.0.0.1:9")
    terminal = Terminal(*command, kind=kind)
    try:
        terminal.until("top draws on a terminal; use --once, or --json, without one")
        assert terminal.process.wait(WAIT_SECONDS_MAX) == 2
    finally:
        terminal.close()


def test_it_ends_with_its_terminal(sidecar: RunningSidecar) -> None:
    command = (sys.executable, "-P", "-m", "sidecar.cli", "top", "--url", sidecar.info.http_url)
    terminal = Terminal(*command)
    try:
        terminal.until("does it help?")
        terminal.hang_up()
        terminal.process.wait(WAIT_SECONDS_MAX)
    finally:
        terminal.process.kill()
        terminal.process.wait()


def test_a_sidecar_that_hangs_does_not_hold_up_the_keys() -> None:
    """`q` took until the timeout."""
    with socket.create_server(("127.0.0.1", 0)) as hung:
        url = f"http://127.0.0.1:{hung.getsockname()[1]}"
        command = (sys.executable, "-P", "-m", "sidecar.cli", "top", "--timeout", "600")
        terminal = Terminal(*command, "--url", url)
        try:
            terminal.until("asking")
            terminal.press("q")
            assert terminal.process.wait(WAIT_SECONDS_MAX) == 0
        finally:
            terminal.close()

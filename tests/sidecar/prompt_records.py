"""A sidecar to which a scheduler has reported two prompts, and stand-ins that answer its status."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING

from sidecar.protocol.prompts import PromptOutcome, PromptRecord, Prompts
from tests.sidecar.client import RunningSidecar, Scheduler, config_in

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

RECORDS = [
    PromptRecord(
        "cmpl-1",
        {PromptOutcome.HOST: 600, PromptOutcome.EVICTED: 200, PromptOutcome.TAIL: 10},
        bytes(32),
        600,
        load_us=10_000,
        saved_us=2_010_000,
    ),
    PromptRecord("cmpl-2", {PromptOutcome.LOCAL: 100, PromptOutcome.NEW: 100}),
]


@contextmanager
def reporting_sidecar(folder: Path) -> Generator[RunningSidecar]:
    """It has a price of GPUs, and the scheduler is still attached."""
    config = config_in(folder, gpu={"hour_price": 3600, "currency": "EUR"})
    with RunningSidecar(config) as sidecar, Scheduler(sidecar.path) as scheduler:
        scheduler.send(Prompts(scheduler.epoch, RECORDS))
        sidecar.wait_until(lambda status: status["prompts"]["prompts"] == len(RECORDS))
        yield sidecar


def standing_in(body: bytes, status: int = 200) -> HTTPServer:
    """Answers each request with this document, until it is shut down and closed."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # (http.server's name)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    return server

"""A sink of OpenTelemetry spans, which a traced engine sends over HTTP."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Final

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

if TYPE_CHECKING:
    from collections.abc import Generator

ENVIRONMENT: Final = {
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
    "OTEL_BSP_SCHEDULE_DELAY": "100",
}
"""What an engine needs in its environment to send its spans here, and soon."""
SECONDS_MAX: Final = 30.0


@dataclass(frozen=True, slots=True)
class Span:
    """A span that has ended; times are nanoseconds since 1970."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    begin: int
    end: int
    attributes: dict[str, Any]


class SpanSink:
    """What came in so far."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._spans: list[Span] = []
        self._more = threading.Condition()

    def take(self, body: bytes) -> None:
        """Take what an exporter sends."""
        found = [
            Span(
                span.name,
                span.trace_id.hex(),
                span.span_id.hex(),
                span.parent_span_id.hex(),
                span.start_time_unix_nano,
                span.end_time_unix_nano,
                {
                    one.key: getattr(one.value, str(one.value.WhichOneof("value")))
                    for one in span.attributes
                },
            )
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        with self._more:
            self._spans += found
            self._more.notify_all()

    def of(self, trace_id: str, *names: str) -> dict[str, Span]:
        """The spans of a trace by name, once there is one of each of `names`."""
        deadline = time.monotonic() + SECONDS_MAX
        with self._more:
            while True:
                spans = {span.name: span for span in self._spans if span.trace_id == trace_id}
                if set(names) <= spans.keys():
                    return spans
                if not self._more.wait(deadline - time.monotonic()):
                    raise TimeoutError(f"of {names} only {sorted(spans)} came")


@contextlib.contextmanager
def span_sink() -> Generator[SpanSink]:
    """A sink on a port of its own."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sink.take(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing: exporters post all the time."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        sink = SpanSink(f"http://127.0.0.1:{server.server_port}/v1/traces")
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield sink
        finally:
            server.shutdown()
            thread.join()

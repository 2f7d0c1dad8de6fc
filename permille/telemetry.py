"""Logs and traces of the service and its workers. One id connects a request with the process that does
its job.

The id is the trace id of W3C trace context. It comes from the request's `traceparent` header. A request
without this header gets a new id. The response has it in the header `X-Request-ID`, the job's row in the
database stores it, and every log line contains it. Spans are exported only if `OTEL_EXPORTER_OTLP_ENDPOINT`
is set. The exporter is that of OpenTelemetry, in the extra `telemetry`.
"""

import logging
import os
import re
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from permille.errors import OperatorError, PermilleError
from permille.extras import install_line
from permille.plain_text import printable

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext, Tracer

ENDPOINT: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"
_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})", re.ASCII)
_FIELDS: Final = "%(asctime)s %(levelname)s %(name)s %(message)s %(request_id)s %(job_id)s"
# Messages and tracebacks may quote text of strangers. Replace control characters, so that such a text cannot
# forge a second log line or send codes to a terminal.
_PLAIN: Final = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code != ord("\t")}
_PLAIN[ord("\n")] = "\n    "
_QUIET: Final = ("alembic", "botocore", "opentelemetry", "tuf")


class LogFormat(StrEnum):
    """Form of log lines."""

    TEXT = "text"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class Trace:
    """The position of a span: the trace's id, the parent span's id, and whether the trace is sampled."""

    trace_id: str
    span_id: str
    sampled: bool = False

    @classmethod
    def new(cls) -> "Trace":
        """Return a new trace."""
        return cls(secrets.token_hex(16), secrets.token_hex(8))

    @classmethod
    def parse(cls, traceparent: str | None) -> "Trace | None":
        """Parse a `traceparent` header, or return None if it is invalid.

        Example:
            >>> str(Trace.parse("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"))
            '00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01'
            >>> Trace.parse("none") is None
            True
        """
        match = _TRACEPARENT.fullmatch(traceparent or "")
        # In W3C trace context, an id of zeros is invalid.
        if match is None or not int(match[1], 16) or not int(match[2], 16):
            return None
        # Bit 0 of the flags means that the trace is sampled.
        return cls(match[1], match[2], sampled=bool(int(match[3], 16) & 1))

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{int(self.sampled):02x}"


current: Final[ContextVar[Trace | None]] = ContextVar("permille_trace", default=None)
current_job: Final[ContextVar[str | None]] = ContextVar("permille_job", default=None)


def configure_logging(form: LogFormat) -> None:
    """Log to standard error, as text or as one JSON object per line.

    Raises:
        OperatorError: the library for JSON is not installed.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_add_ids)
    handler.setFormatter(_json_formatter() if form is LogFormat.JSON else _TextFormatter())
    # `force` replaces handlers that a library or a test runner has installed.
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    # These libraries log each of their requests at level INFO.
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)


def start_tracing(program: str) -> None:
    """Export spans if `OTEL_EXPORTER_OTLP_ENDPOINT` is set.

    Raises:
        OperatorError: the variable is set, but the extra `telemetry` is not installed.
    """
    if not os.environ.get(ENDPOINT):
        return
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as exc:
        raise OperatorError(
            f"{ENDPOINT} needs {exc.name}, which is not installed. Run {install_line('telemetry')}."
        ) from exc
    provider = TracerProvider(resource=Resource.create({"service.name": program}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)


def stop_tracing() -> None:
    """Export the remaining spans. This waits some seconds for a collector that does not answer."""
    if os.environ.get(ENDPOINT):
        from opentelemetry import trace

        # Without an SDK, the provider has no `shutdown`.
        shutdown = getattr(trace.get_tracer_provider(), "shutdown", None)
        if shutdown is not None:
            shutdown()


@dataclass(slots=True)
class Outage:
    """Log when an operation begins to fail, when the reason changes, and when it works again.

    This is for operations that are repeated every few seconds.

    Attributes:
        log: the log.
        what: the failure in words.
        level: the level of the messages about a failure.

    Example:

        outage = Outage(log, "the database cannot be reached")
        outage.note(error)  # logs a warning once
        outage.note(None)  # logs once that it is over
    """

    log: logging.Logger
    what: str
    level: int = logging.WARNING
    _reason: str | None = None

    def note(self, failed: Exception | str | None) -> None:
        """Record the result of the last try: an error, or None for success."""
        if failed is None:
            if self._reason is not None:
                self.log.info("over: %s", self.what)
            self._reason = None
            return
        # Messages of a database contain changing values, so compare only the type of its errors.
        reason = str(failed) if isinstance(failed, (str, PermilleError)) else type(failed).__name__
        if reason != self._reason:
            self.log.log(self.level, "%s: %s", self.what, failed)
        self._reason = reason


@contextmanager
def span(name: str, above: Trace | None, attributes: Mapping[str, str | int]) -> Iterator[Trace]:
    """Record a span for the block, below `above` or as the root of a trace.

    The log lines of the block contain the trace id.
    """
    tracer = _tracer()
    if tracer is None:
        here = above or Trace.new()
        with _within(here):
            yield here
        return
    from opentelemetry import trace

    parent = None
    if above is not None:
        flags = trace.TraceFlags(int(above.sampled))
        context = trace.SpanContext(
            int(above.trace_id, 16), int(above.span_id, 16), is_remote=True, trace_flags=flags
        )
        parent = trace.set_span_in_context(trace.NonRecordingSpan(context))
    with tracer.start_as_current_span(name, context=parent, attributes=dict(attributes)) as opened:
        here = _trace_of(opened.get_span_context())
        with _within(here):
            yield here


@contextmanager
def request(above: Trace | None) -> Iterator[Trace]:
    """Set the trace of a request for the block.

    If spans are exported, FastAPI's instrumentation has already started a span, and its trace is used.
    """
    here = above or Trace.new()
    if _tracer() is not None:
        from opentelemetry import trace

        made = trace.get_current_span().get_span_context()
        here = _trace_of(made) if made.is_valid else here
    with _within(here):
        yield here


@contextmanager
def watching(job_id: str, above: Trace | None) -> Iterator[None]:
    """Add the ids of a job to the log lines of this block, while another process does the job."""
    token = current_job.set(job_id)
    try:
        with _within(above):
            yield
    finally:
        current_job.reset(token)


@contextmanager
def _within(here: Trace | None) -> Iterator[None]:
    # `current` is a context variable, so each thread and each task has its own trace.
    token = current.set(here)
    try:
        yield
    finally:
        current.reset(token)


def _trace_of(made: "SpanContext") -> Trace:
    return Trace(f"{made.trace_id:032x}", f"{made.span_id:016x}", sampled=made.trace_flags.sampled)


def _tracer() -> "Tracer | None":
    if not os.environ.get(ENDPOINT):
        return None
    from opentelemetry import trace

    return trace.get_tracer("permille")


def _add_ids(record: logging.LogRecord) -> bool:
    here = current.get()
    record.request_id = here.trace_id if here else None
    record.job_id = current_job.get()
    return True


class _TextFormatter(logging.Formatter):
    """A formatter for people. It writes the ids at the end of a line."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(name)s %(levelname)s %(message)s%(ids)s")

    def format(self, record: logging.LogRecord) -> str:
        found = (getattr(record, "job_id", None), getattr(record, "request_id", None))
        record.ids = "".join(f" [{one}]" for one in found if one)
        return super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's own name
        """Format the message without control characters."""
        record.message = printable(record.message.translate(_PLAIN))
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802 - logging's own name
        """Format a traceback without control characters. Its lines are indented."""
        return "    " + printable(super().formatException(ei).translate(_PLAIN))


def _json_formatter() -> logging.Formatter:
    try:
        from pythonjsonlogger.json import JsonFormatter
    except ModuleNotFoundError as exc:
        raise OperatorError("Logs as JSON need python-json-logger: pip install python-json-logger") from exc
    names = {"asctime": "time", "levelname": "level", "name": "logger"}
    return JsonFormatter(_FIELDS, rename_fields=names)

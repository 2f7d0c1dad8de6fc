"""Metrics, logs and traces of real processes, and their orderly stop."""

import gzip
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError

from permille.store import rows
from permille.telemetry import Trace, current
from permille_service import problems
from tests.api_service import running_api
from tests.ports import free_port
from tests.running_service import running_service
from tests.tiny_model import write_model

TOKEN = "scraper"
PARENT = f"00-{'ab' * 16}-{'cd' * 8}-01"


@pytest.mark.slow
def test_one_id_leads_from_a_request_to_the_process_that_does_its_job(tmp_path: Path) -> None:
    port = free_port()
    with _collector() as (endpoint, spans):
        settings = {
            "PERMILLE_LOG_FORMAT": "json",
            "PERMILLE_METRICS_TOKEN": TOKEN,
            "PERMILLE_METRICS_PORT": str(port),
            "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
        }
        with running_service(tmp_path, **settings) as running:
            write_model(running.data_dir / "models" / "tiny")
            with running.client() as client:
                body = {"name": "tiny", "source": {"kind": "folder", "path": "tiny"}}
                model = client.post("/v1/models", json=body).raise_for_status().json()
                ask = {"model_id": model["id"], "method": "random", "density": 0.01}
                made = client.post("/v1/masks", json=ask, headers={"traceparent": PARENT})
                assert made.status_code == 202, made.text
                job = made.json()
                assert made.headers["X-Request-ID"] == "ab" * 16
                path = f"/v1/jobs/{job['id']}"
                _wait_until(lambda: client.get(path).json()["state"] == "succeeded")
                assert client.get("/v1/nothing").headers["X-Request-ID"] not in ("", "ab" * 16)
                for name in ("MADE", "UP"):
                    assert client.request(name, "/v1/masks").status_code == 405
                api = _numbers(client.get("/metrics", headers={"Authorization": f"Bearer {TOKEN}"}).text)
                assert client.get("/metrics").status_code == 401  # an operator's token does not give access
            assert not [labels for name, labels in api if name == "permille_jobs"]  # no job is unfinished
            assert api["permille_request_seconds_count", "method=POST,route=/v1/masks,status=202"] == 1
            assert api["permille_request_seconds_count", "method=GET,route=other,status=404"] == 1
            assert api["permille_request_seconds_count", "method=other,route=/v1/masks,status=405"] == 2
            assert api["permille_queue_age_longest_seconds", ""] == 0
            attempts = ("permille_attempt_seconds_count", "kind=mask,state=succeeded")
            _wait_until(
                lambda: (
                    _numbers(httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=60.0).text).get(attempts)
                    == 1
                )
            )
    asked = next(span for span in spans if span["name"] == "POST /v1/masks")
    done = next(span for span in spans if span["name"] == "job mask")
    assert asked["trace"] == done["trace"] == "ab" * 16
    assert asked["parent"] == "cd" * 8
    assert done["parent"] == asked["id"]
    assert done["job"] == job["id"]
    lines = [json.loads(line) for line in (tmp_path / "up.log").read_text().splitlines() if line[:1] == "{"]
    assert {line["level"] for line in lines} <= {"INFO", "WARNING"}
    assert any(line["job_id"] == job["id"] and line["request_id"] == "ab" * 16 for line in lines)


def test_streams_end_and_nothing_is_cut_off_when_the_process_stops(tmp_path: Path) -> None:
    with running_service(tmp_path, "--no-worker") as running:
        write_model(running.data_dir / "models" / "tiny")
        with running.client() as client:
            assert client.get("/livez").json()["status"] == "ok"
            assert client.get("/readyz").json()["status"] == "ok"
            assert client.get("/metrics").status_code == 404  # no token is set
            body = {"name": "tiny", "source": {"kind": "folder", "path": "tiny"}}
            model = client.post("/v1/models", json=body).raise_for_status().json()
            job = client.post("/v1/masks", json={"model_id": model["id"], "method": "random"}).json()
            with client.stream("GET", f"/v1/jobs/{job['id']}/events/stream") as events:
                lines = events.iter_lines()
                assert next(lines) == "retry: 1000"
                running.process.send_signal(signal.SIGTERM)
                assert any(line.startswith("event: state") for line in lines)  # and no ReadError
        assert running.process.wait(60) == 0
    log = (tmp_path / "up.log").read_text()
    assert "Traceback" not in log
    assert "Cancel" not in log


def test_an_empty_metrics_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="metrics_token"), running_api(tmp_path, metrics_token=""):
        pass


def test_an_unexpected_error_has_an_id_and_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[Trace | None] = []
    monkeypatch.setattr(problems.logger, "error", lambda *_, **__: logged.append(current.get()))
    with running_api(tmp_path, metrics_token=TOKEN) as api:
        monkeypatch.delattr(rows, "list_all")
        answer = api.get("/v1/models")
        numbers = _numbers(api.get("/metrics", TOKEN).text)
    assert answer.status_code == 500
    assert [trace and trace.trace_id for trace in logged] == [answer.headers["X-Request-ID"]]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["connection"] == "close"  # uvicorn closes it, and the next request would be lost
    assert numbers["permille_request_seconds_count", "method=GET,route=/v1/models,status=500"] == 1


def test_a_message_is_no_second_line_of_the_log() -> None:
    code = (
        "import logging; from permille import telemetry; telemetry.configure_logging('text'); "
        "logging.getLogger('tuf.api').info('No signature for keyid'); "
        "logging.error('GET /x\\n2026-11-23 root ERROR forged\\r\\x1b[2J')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = done.stderr.splitlines()
    assert first.endswith("root ERROR GET /x")
    assert second == "    2026-11-23 root ERROR forged\\x0d\\x1b[2J"


def test_the_message_of_an_exception_is_no_line_of_the_log() -> None:
    code = (
        "import logging; from permille import telemetry; telemetry.configure_logging('text')\n"
        "try: raise ValueError('weight\\n2026-11-23 root ERROR forged\\x1b[2J')\n"
        "except ValueError: logging.exception('failed')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, *others = done.stderr.splitlines()
    assert first.endswith("root ERROR failed")
    assert others[0] == "    Traceback (most recent call last):"
    assert others[-2:] == ["    ValueError: weight", "    2026-11-23 root ERROR forged\\x1b[2J"]


def test_a_damaged_traceparent_is_none() -> None:
    assert str(Trace.parse(PARENT)) == PARENT
    for wrong in (
        None,
        "",
        "00",
        PARENT.upper(),
        f"01{PARENT[2:]}",
        f"00-{'0' * 32}-{'cd' * 8}-01",
        PARENT + "-x",
    ):
        assert Trace.parse(wrong) is None


def _numbers(text: str) -> dict[tuple[str, str], float]:
    """Return the samples by name and labels."""
    return {
        (
            sample.name,
            ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items())),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@contextmanager
def _collector() -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Run a server that receives spans from OpenTelemetry's exporter. Yield its URL and the list of spans."""
    spans: list[dict[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            spans.extend(_spans(ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            return

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", spans
    finally:
        server.shutdown()
        server.server_close()


def _spans(request: Any) -> Iterator[dict[str, str]]:
    for resource in request.resource_spans:
        for scope in resource.scope_spans:
            for span in scope.spans:
                told = {item.key: item.value.string_value for item in span.attributes}
                yield {
                    "name": span.name,
                    "trace": span.trace_id.hex(),
                    "id": span.span_id.hex(),
                    "parent": span.parent_span_id.hex(),
                    "job": told.get("permille.job_id", ""),
                }


def _wait_until(holds: Callable[[], bool], timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)

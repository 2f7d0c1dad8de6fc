"""nginx with our configuration in front of the API: requests and headers of a client mislead neither."""

import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.acceptance.test_deploy import nginx_of
from tests.api_service import Api, running_api

TOKEN = "numbers"
HSTS = "strict-transport-security"


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    with running_api(tmp_path, downloads="accel", metrics_token=TOKEN) as running:
        yield running


def raw(client: httpx.Client, request: bytes) -> bytes:
    """Send these bytes to nginx. Return all that it answers until it closes the connection."""
    transport: Any = client._transport
    context = ssl._create_unverified_context()
    with socket.socket(socket.AF_UNIX) as plain:
        plain.settimeout(20)
        plain.connect(transport._pool._uds)
        with context.wrap_socket(plain, server_hostname="localhost") as connection:
            connection.sendall(request)
            answer = b""
            while part := connection.recv(65536):
                answer += part
    return answer


@pytest.mark.attack(18, "a request with both lengths, or two, hides a second request from the proxy")
@pytest.mark.parametrize(
    "lengths",
    [
        b"Content-Length: 4\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: chunked\r\nContent-Length: 60",
        b"Content-Length: 4\r\nContent-Length: 60",
        b"Transfer-Encoding: identity, chunked",
        b"Transfer-Encoding: \x0bchunked",
        b"Content-Length: +4",
        b"Content-Length: 4, 4",
    ],
)
def test_one_request_stays_one(api: Api, lengths: bytes) -> None:
    hidden = b"0\r\n\r\nGET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    head = b"POST /v1/enrolments HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    with nginx_of(api) as client:
        answer = raw(client, head + lengths + b"\r\nConnection: close\r\n\r\n" + hidden)
        assert answer.count(b"HTTP/1.1 ") == 1
        assert answer.split()[1] in (b"400", b"411", b"422", b"501")
        assert client.get("/livez").status_code == 200


@pytest.mark.attack(18, "encoded slashes and dots lead to the blobs' internal location, or to the numbers")
def test_no_spelling_of_a_path_reaches_what_is_internal(api: Api) -> None:
    package = api.package()
    layer = max(package.manifest.layers, key=lambda layer: layer.size_bytes)
    inside = package.blobs.path(layer.digest).relative_to(package.blobs.root).as_posix()
    spelt = (
        "/permille-blobs/{}", "//permille-blobs/{}", "/%70ermille-blobs/{}", "/permille-blobs%2f{}",
        "/v1/../permille-blobs/{}", "/v1/..%2fpermille-blobs/{}", "/v1/%2e%2e/permille-blobs/{}",
        "/permille-blobs/../permille-blobs/{}", "/permille-blobs/..%2f..%2fpermille.db",
        "/permille-blobs../keys",
        "/metrics", "//metrics", "/%6detrics", "/./metrics", "/v1/../metrics", "/v1/..%2fmetrics",
        "/metrics/",
        "/metrics%00", "/metrics;x", "/metrics%20", "/metrics?x=1", "/v1%2f..%2fmetrics",
    )  # fmt: skip
    with nginx_of(api) as client:
        for path in spelt:
            for token in (TOKEN, api.token):
                line = (
                    f"GET {path.format(inside)} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token}"
                )
                answer = raw(client, f"{line}\r\nConnection: close\r\n\r\n".encode())
                assert answer.split()[1] in (b"400", b"404"), (path, answer[:200])
                assert b"permille_jobs" not in answer


@pytest.mark.attack(18, "a client says X-Accel-Redirect, or where it comes from, by itself")
def test_headers_of_a_client_stay_its_own(api: Api) -> None:
    package = api.package()
    inside = package.blobs.path(package.manifest.layers[0].digest).relative_to(package.blobs.root).as_posix()
    with nginx_of(api) as client:
        said = {"X-Accel-Redirect": f"/permille-blobs/{inside}", "X-Accel-Buffering": "yes"}
        for path in ("/livez", "/v1/models", "/nothing"):
            answer = client.get(path, headers=said)
            assert answer.status_code in (200, 401, 404)
            assert "x-accel-redirect" not in answer.headers
            assert len(answer.content) < 1000
            assert answer.headers.get_list(HSTS) == ["max-age=63072000"]
        assert client.get("/v1/models", headers={"Host": "evil.example"}).status_code == 421


@pytest.mark.attack(18, "a browser is led to the service without TLS once it knew it with TLS")
@pytest.mark.parametrize("tls", [True, False])
def test_who_has_the_certificate_says_that_it_stays(tmp_path: Path, tls: bool) -> None:
    files: dict[str, Any] = {"tls_certificate": tmp_path / "cert.pem", "tls_key": tmp_path / "key.pem"}
    with running_api(tmp_path, **(files if tls else {})) as api:
        said = api.client.get("https://127.0.0.1/livez").headers.get_list(HSTS)
        assert said == (["max-age=63072000"] if tls else [])
        assert HSTS not in api.client.get("http://127.0.0.1/livez").headers

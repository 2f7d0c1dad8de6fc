"""The API process is light: no torch, not even through the library."""

import asyncio
import os
import socket
import ssl
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from permille.errors import OperatorError
from permille_service.__main__ import Certificate, listen
from permille_service.connections import Connections
from permille_service.settings import Settings

OPENSSL = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=permille"
HEAVY = ("torch", "transformers", "bitsandbytes", "datasets", "celery", "pandas", "scipy")


def test_app_is_imported_without_the_heavy_libraries() -> None:
    modules = "permille_service.app, permille_service.__main__, permille_service.cli.main"
    code = f"import sys, {modules}; print(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "fastapi" in loaded
    assert loaded.isdisjoint(HEAVY)


def test_answers_wait_for_no_delayed_acknowledgement(tmp_path: Path) -> None:
    """A head and a body are two writes: with Nagle's algorithm the second waits 40 ms for the client."""

    async def nodelay_of_an_accepted_connection() -> int:
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def accepted(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            found.set_result(
                writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            )
            writer.close()

        settings = Settings.model_validate({"data_dir": tmp_path, "port": 0})
        listening = listen(settings, Connections(settings, files=1024))
        async with await asyncio.start_server(accepted, sock=listening):
            _, writer = await asyncio.open_connection(*listening.getsockname()[:2])
            nodelay = await found
            writer.close()
        return nodelay

    assert asyncio.run(nodelay_of_an_accepted_connection()) != 0


def test_a_port_in_use_is_named_with_the_option_that_changes_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        settings = Settings.model_validate({"data_dir": tmp_path, "port": port})
        with pytest.raises(OperatorError, match=rf"port {port} of 127.0.0.1: Address already.*--port"):
            listen(settings, Connections(settings, files=1024))


def test_a_renewed_certificate_is_sent_without_a_restart(tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made = [make_certificate(tmp_path / name) for name in ("old", "new")]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

    def put(place: Path, content: bytes, at_s: int) -> None:
        place.write_bytes(content)
        os.utime(place, (at_s, at_s))

    put(certificate, made[0][0], 1)
    put(key, made[0][1], 1)
    context.load_cert_chain(certificate, key)
    renewing = Certificate(context, certificate, key)
    put(certificate, made[1][0], 2)  # the key follows a moment later
    asyncio.run(renewing.renew())
    assert sent_by(context) == made[0][0]
    put(key, made[1][1], 2)
    asyncio.run(renewing.renew())
    assert sent_by(context) == made[1][0]
    key.unlink()
    asyncio.run(renewing.renew())
    assert sent_by(context) == made[1][0]


def make_certificate(stem: Path) -> tuple[bytes, bytes]:
    """Return a new certificate and its key."""
    files = stem.with_suffix(".cert"), stem.with_suffix(".key")
    subprocess.run([*OPENSSL.split(), "-out", files[0], "-keyout", files[1]], check=True, capture_output=True)
    return files[0].read_bytes(), files[1].read_bytes()


def sent_by(context: ssl.SSLContext) -> bytes:
    """Return the certificate that a server with this context sends, as PEM."""
    anyone = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = context.wrap_bio(to_server, to_client, server_side=True)
    client = anyone.wrap_bio(to_client, to_server)
    for end in (client, server, client):
        with suppress(ssl.SSLWantReadError):
            end.do_handshake()
    found = client.getpeercert(binary_form=True)
    assert found is not None
    return ssl.DER_cert_to_PEM_cert(found).encode()

"""`python -m permille_service`: one API process, with settings from the environment (`PERMILLE_DATA_DIR`,
`PERMILLE_PORT`, ...).

With port 0, the system chooses a free port. When the socket listens, the file `service.url` in the data
folder gets the URL.
"""

import gc
import logging
import signal
import socket
import ssl
import sys
import threading
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from permille import telemetry
from permille.errors import OperatorError, RetryableError
from permille.files import write_atomic
from permille.store.settings import explain
from permille_service.connections import Connections, Listener, protocol_of, raise_file_limit
from permille_service.settings import Settings, client_url, load

logger = logging.getLogger(__name__)
EXIT_USAGE, EXIT_RETRY = 2, 75
"""Exit statuses. 75 (EX_TEMPFAIL of sysexits.h) tells a supervisor to start the process again later."""
SHUTDOWN_S = 5
RENEW_S = 60
"""Seconds between two looks at the files of the certificate."""
COLLECT_AFTER = 10_000
"""Number of new objects after which Python collects garbage.

A request makes some hundred objects, and a page with all its rows some ten thousand. Few of them form cycles,
so more frequent collections would find almost nothing.
"""


def main() -> int:
    """Serve until SIGINT or SIGTERM."""
    gc.disable()  # imported modules never become garbage, and collections took an eighth of the start-up
    from permille_service.app import create_app

    try:
        settings = load()
    except ValueError as exc:
        print(f"permille: {explain(exc)}", file=sys.stderr)
        return EXIT_USAGE
    try:
        telemetry.configure_logging(settings.log_format)
        telemetry.start_tracing("permille-api")
        app = create_app(settings)
        connections = Connections(settings, files=raise_file_limit())
        listening = listen(settings, connections)
        url = client_url(settings, listening.getsockname()[1])
        url_path = settings.data_dir / "service.url"
        config = _config(app, settings, connections)
        write_atomic(url_path, f"{url}\n".encode(), mode=0o600)
    except (OperatorError, RetryableError, OSError) as exc:
        print(f"permille: {exc}", file=sys.stderr)
        return EXIT_RETRY if isinstance(exc, RetryableError) else EXIT_USAGE
    gc.collect()
    gc.freeze()  # exclude all modules and routes from later collections
    gc.set_threshold(COLLECT_AFTER)
    gc.enable()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)  # uvicorn shuts down first, then raises the signal again for us
    try:
        _Server(config, app.state.service.draining).run(sockets=[listening])
    finally:
        url_path.unlink(missing_ok=True)
        telemetry.stop_tracing()
    return 0


def _config(app: FastAPI, settings: Settings, connections: Connections) -> uvicorn.Config:
    """Configure the server, and read its certificate.

    Raises:
        OperatorError: the certificate or its key cannot be used.
    """
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http=protocol_of(connections),
        ws="none",  # the limits of `LimitedProtocol` do not apply to WebSocket connections
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=list(settings.trusted_proxies),
        log_level="warning",
        server_header=False,
        date_header=True,
        ssl_certfile=settings.tls_certificate,
        ssl_keyfile=settings.tls_key,
        timeout_graceful_shutdown=SHUTDOWN_S,
        timeout_notify=RENEW_S,
    )
    try:
        config.load()
    except OSError as exc:  # also an error of ssl
        raise OperatorError(
            f"The certificate {settings.tls_certificate} and the key {settings.tls_key} cannot be used: {exc}"
        ) from exc
    if config.ssl is not None and settings.tls_certificate is not None and settings.tls_key is not None:
        config.callback_notify = Certificate(config.ssl, settings.tls_certificate, settings.tls_key).renew
    return config


class Certificate:
    """A certificate that is read again when its files change, for example when cert-manager renews it.

    Args:
        context: the context of the server, which has read the files. New connections get a new certificate.
    """

    def __init__(self, context: ssl.SSLContext, certificate: Path, key: Path) -> None:
        self._context, self._files = context, (certificate, key)
        self._seen = self._times()
        self._outage = telemetry.Outage(logger, "cannot read the certificate again", logging.ERROR)

    async def renew(self) -> None:
        """Read the files if they have changed. If they cannot be used, keep the old certificate."""
        try:
            times = self._times()
            if times != self._seen:
                # While one of the files is still the old one, this fails, and spoils the context it has.
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*self._files)
                self._context.load_cert_chain(*self._files)
                self._seen = times
        except OSError as exc:  # also an error of ssl
            self._outage.note(exc)
        else:
            self._outage.note(None)

    def _times(self) -> list[int]:
        return [file.stat().st_mtime_ns for file in self._files]


class _Server(uvicorn.Server):
    """uvicorn's server. When it begins to stop, it sets `draining`, which ends all event streams."""

    def __init__(self, config: uvicorn.Config, draining: threading.Event) -> None:
        super().__init__(config)
        self._draining = draining

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Set `draining`, and stop as the base class does."""
        self._draining.set()
        super().handle_exit(sig, frame)


def _leave(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


def listen(settings: Settings, connections: Connections) -> Listener:
    """Open the listening socket before uvicorn starts, so that the port is known.

    Raises:
        OperatorError: the port is in use or not allowed, or the address belongs to another machine.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # Name the protocol (TCP). Otherwise asyncio does not switch off Nagle's algorithm, and every answer waits
    # for a delayed ACK (40 ms).
    listening = Listener(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.connections = connections
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((settings.host, settings.port))
    except (OSError, UnicodeError) as exc:  # UnicodeError: the name has a part of 64 characters or more
        listening.close()
        reason = getattr(exc, "strerror", None) or exc
        raise OperatorError(
            f"Cannot listen on port {settings.port} of {settings.host}: {reason}. If another program "
            "uses the port, stop it, or choose another port with `permille up --port` (0 takes a free one)."
        ) from exc
    listening.listen(128)
    return listening


if __name__ == "__main__":
    sys.exit(main())

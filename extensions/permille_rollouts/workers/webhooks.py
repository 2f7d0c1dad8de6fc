"""Sending of webhooks, with signatures in the form of Standard Webhooks 1.0.

An operator chooses the URL, so a webhook could reach into the workers' private network. A worker therefore
looks up the host's addresses only once. It refuses those that are not public (unless a setting allows
this), and connects to exactly an address that it has checked. It follows no redirects, and reads only the
status of an answer.
"""

import hashlib
import hmac
import logging
import socket
import ssl
from base64 import b64decode, b64encode
from collections.abc import Callable
from datetime import datetime
from http.client import HTTPConnection, HTTPException
from threading import Timer
from typing import Final
from urllib.parse import urlsplit

from permille.addresses import is_public
from permille.errors import InputError
from permille.store.database import Database, now
from permille.version import __version__
from permille_rollouts.store import webhooks
from permille_rollouts.store.webhooks import SECRET_PREFIX, Message

_log = logging.getLogger(__name__)
TIMEOUT_S: Final = 10.0
_MOST_ADDRESSES: Final = 4
"""Number of addresses of a name that are tried. They share the time to connect."""

Send = Callable[[Message, datetime], str | None]


def send_due(db: Database, send: Send) -> int:
    """Send each due event once, and return the number of events. Failed events become due again later."""
    with db.write() as session:
        messages, at = webhooks.claim(session), now(session)
    for message in messages:
        failure = send(message, at)
        with db.write() as session:
            webhooks.note(session, message.id, failure)
    return len(messages)


def signature(message: Message, timestamp: int) -> str:
    """Return the header `webhook-signature` of a message.

    Example:
        >>> message = Message(id="msg_1", url="", secret="whsec_c2VjcmV0", body=b"{}")
        >>> signature(message, 1614265330)
        'v1,3/iD+UC/cFPl3PtRMPUcvEULlwun6jyVUEMvdX3yW5g='
    """
    key = b64decode(message.secret.removeprefix(SECRET_PREFIX))
    signed = f"{message.id}.{timestamp}.".encode() + message.body
    return "v1," + b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()


def post(message: Message, at: datetime, *, allow_private: bool) -> str | None:
    """Send one message. Return None if it succeeds, or else a description of the failure."""
    timestamp = int(at.timestamp())
    try:
        headers = {
            "content-type": "application/json",
            "user-agent": f"permille/{__version__}",
            "webhook-id": message.id,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": signature(message, timestamp),
        }
        url = urlsplit(message.url)
        connection = _connect(message.url, allow_private=allow_private)
        # The timeout of the socket applies to each read. The timer also stops a receiver that sends single
        # bytes for a long time.
        hang_up = Timer(TIMEOUT_S, connection.sock.shutdown, (socket.SHUT_RDWR,))
        hang_up.start()
        try:
            target = f"{url.path or '/'}?{url.query}" if url.query else url.path or "/"
            connection.request("POST", target, message.body, headers)
            status = connection.getresponse().status
        finally:
            hang_up.cancel()
            connection.close()
    except (OSError, HTTPException, ValueError, InputError) as exc:
        # Every viewer of the tenant reads the answer, so only the log has addresses.
        _log.info("cannot send %s: %s: %s", message.id, type(exc).__name__, exc)
        return _reason(exc)
    return None if 200 <= status < 300 else f"the answer was {status}"


def _reason(exc: Exception) -> str:
    """Describe a failure without an address of the network."""
    match exc:
        case InputError():
            return str(exc)
        case socket.gaierror():
            return "the host name has no address"
        case ssl.SSLError():
            return "the TLS connection failed"
        case TimeoutError():
            return "the receiver did not answer in time"
        case ConnectionRefusedError():
            return "the receiver refused the connection"
        case OSError():
            return "the connection failed"
        case HTTPException():
            return "the answer was no HTTP"
    return "the URL or the secret cannot be used"


def _connect(address: str, *, allow_private: bool) -> HTTPConnection:
    """Open a connection to the host of a URL. Try each of its addresses that is allowed, in turn.

    Raises:
        OSError: no address of the host can be reached.
        InputError: no address of the host is public.
    """
    url = urlsplit(address)
    host = url.hostname or ""
    is_tls = url.scheme == "https"
    port = url.port or (443 if is_tls else 80)
    entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    found = list(dict.fromkeys(str(entry[4][0]) for entry in entries))[:_MOST_ADDRESSES]
    failure: OSError | InputError = OSError(f"{host} has no address")
    for one in found:
        try:
            _check_public(host, one, allow_private=allow_private)
            connected = socket.create_connection((one, port), TIMEOUT_S / len(found))
            if is_tls:
                connected = ssl.create_default_context().wrap_socket(connected, server_hostname=host)
        # The failure of a reachable address says more than that another one is not public.
        except InputError as exc:
            failure = exc if one == found[0] else failure
        except OSError as exc:
            failure = exc
        else:
            connected.settimeout(TIMEOUT_S)
            connection = HTTPConnection(host, port, timeout=TIMEOUT_S)
            connection.sock = connected
            return connection
    raise failure


def _check_public(host: str, address: str, *, allow_private: bool) -> None:
    """Raise InputError if an address is not public, unless private ones are allowed."""
    if not (allow_private or is_public(address)):
        _log.info("%s has the address %s, which is not public", host, address)
        raise InputError(
            f"{host} has no public address. Set PERMILLE_WEBHOOK_PRIVATE=true on the workers to allow this."
        )

"""Run a keeper, which sums the masks of devices (make a key, answer the service, list the sums)."""

import argparse
import base64
import logging
import os
import secrets
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from permille.addresses import is_loopback
from permille.errors import OperatorError, PermilleError
from permille.plain_text import echo, log_to_stderr
from permille_rounds.keeper.memory import Memory
from permille_rounds.keeper.server import KeeperServer

_KEY, _TOKEN, _MEMORY = "keeper.key", "keeper.token", "keeper.sqlite"


def init(home: Path) -> str:
    """Create the key and the token, and return the text for the service's operator.

    Raises:
        OperatorError: the folder has a key already, or is not empty.
    """
    if (home / _KEY).exists():
        raise OperatorError(
            f"{home / _KEY} exists already. A new key could not open the seals that devices made for the "
            "existing key. Choose another --home."
        )
    home.mkdir(parents=True, exist_ok=True)
    # Close the folder before the check, so that nobody else can put a link or an open file into it.
    home.chmod(0o700)
    if found := next(home.iterdir(), None):
        raise OperatorError(f"{home} contains {found.name!r}. Choose an empty folder as --home.")
    Memory(home / _MEMORY)
    key, token = X25519PrivateKey.generate(), secrets.token_urlsafe(32)
    # Write the key last, because the existence of its file means that the folder is complete.
    for name, data in ((_TOKEN, token.encode()), (_KEY, key.private_bytes_raw())):
        descriptor = os.open(home / name, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            os.fsync(file.fileno())
    return f"key for definitions: {public_text(key)}\ntoken for the service: {token}"


def public_text(key: X25519PrivateKey) -> str:
    """Return a keeper's public key in the form that definitions of federations contain."""
    return base64.urlsafe_b64encode(key.public_key().public_bytes_raw()).decode("ascii").rstrip("=")


def open_server(home: Path, address: tuple[str, int], tls: tuple[Path, Path] | None) -> KeeperServer:
    """Open a server. Its method `serve_forever` answers requests.

    Example:

        open_server(Path("keeper"), ("127.0.0.1", 8331), None).serve_forever()

    Raises:
        OperatorError: the key, the token or the memory is missing, or other machines can reach the address
            without TLS.
    """
    try:
        key = X25519PrivateKey.from_private_bytes((home / _KEY).read_bytes())
        token = (home / _TOKEN).read_text().strip()
    except (OSError, ValueError) as exc:
        raise OperatorError(f"{home} has no key and token: {exc}. Run `permille-keeper init` first.") from exc
    memory = open_memory(home)
    if tls is None and not is_loopback(address[0]):
        raise OperatorError(f"Other machines can reach {address[0]}. Give --tls-certificate and --tls-key.")
    context = None
    if tls is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*tls)
    return KeeperServer(address, key=key, token=token, memory=memory, tls=context)


def open_memory(home: Path) -> Memory:
    """Open the memory that `init` has made. Raises OperatorError if it is missing."""
    # Never make it here: an empty memory in place of a lost one looks like that of a new keeper.
    if not (home / _MEMORY).exists():
        raise OperatorError(
            f"{home / _MEMORY} is missing. Without it, the keeper could open a seal a second time, which is "
            "not safe. Make a new key in an empty folder."
        )
    return Memory(home / _MEMORY)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command."""
    parser = argparse.ArgumentParser(prog="permille-keeper", description=__doc__)
    parser.add_argument(
        "--home",
        type=Path,
        required=True,
        help="folder of the key, the token and the stored answers",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("init", help="make the key and the token, and show what the service needs")
    commands.add_parser("log", help="list the sums that were made and the requests that were refused")
    run = commands.add_parser("run", help="answer requests of the service")
    run.add_argument("--host", default="127.0.0.1", help="address to listen on")
    run.add_argument("--port", type=int, default=8331)
    run.add_argument("--tls-certificate", type=Path)
    run.add_argument("--tls-key", type=Path)
    asked = parser.parse_args(arguments)
    log_to_stderr(logging.INFO, "%(asctime)s %(levelname)s %(message)s")
    try:
        if asked.command == "init":
            print(init(asked.home))
        elif asked.command == "log":
            echo("\n".join(open_memory(asked.home).lines()))
        else:
            tls = (asked.tls_certificate, asked.tls_key) if asked.tls_certificate else None
            with open_server(asked.home, (asked.host, asked.port), tls) as server:
                print(f"keeper listens at {asked.host} port {server.server_address[1]}", flush=True)
                server.serve_forever()
    except (PermilleError, OSError) as exc:
        sys.exit(f"permille-keeper: {exc}")
    except KeyboardInterrupt:
        pass

"""The session of one command: the service that it calls, and the token that it sends.

The URL and the token come from options or the environment. Otherwise they are read from the files that
`permille up` writes.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from permille.exits import CommandError, Exit
from permille_service.cli.output import Output, make_output
from permille_service.cli.references import resolve

if TYPE_CHECKING:
    from permille_service.cli.client import Client


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalOptions:
    """The options that stand before the name of the command. They say which service to call."""

    url: str | None = None
    token: str | None = None
    data_dir: Path | None = None
    ca_file: Path | None = None

    @property
    def folder(self) -> Path:
        """The data folder that the user named, else `permille` in XDG_DATA_HOME or `~/.local/share`."""
        base = os.environ.get("XDG_DATA_HOME")
        return self.data_dir or (Path(base) if base else Path.home() / ".local" / "share") / "permille"

    @property
    def token_path(self) -> Path:
        """The path of the service's first token.

        It lies in PERMILLE_PRIVATE_DIR if the command's environment sets it, else in the data folder.
        """
        private = os.environ.get("PERMILLE_PRIVATE_DIR")
        return (Path(private) if private else self.folder) / "operator.token"


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A client of the service, and the output for the answers."""

    client: "Client"
    output: Output
    ca_file: Path | None

    def id_of(self, collection: str, text: str) -> str:
        """Return the id for a name or for the beginning of an id. Raises CommandError."""
        return resolve(self.client, collection, text)


@contextmanager
def connect(context: typer.Context, *, as_json: bool) -> Iterator[Session]:
    """Open a session. Raises CommandError if the URL or the token is not known."""
    from permille_service.cli.client import Client  # takes a tenth of a second, which would delay `--help`

    place = context.ensure_object(GlobalOptions)
    url = place.url or _first_line(place.folder / "service.url")
    if not url:
        raise CommandError(
            f"No service runs with the data folder {place.folder}. Start one with `permille up`, or give the "
            "URL of another service with --url or PERMILLE_URL.",
            Exit.RETRY,
        )
    token = place.token or _first_line(place.token_path)
    if not token:
        raise CommandError(
            f"No token can be read from {place.token_path}. Give a token with --token or PERMILLE_TOKEN.",
            Exit.ACCESS,
        )
    # Files and secrets often end with a newline. An HTTP library would print other letters in its error.
    if not re.fullmatch(r"[!-~]+", token := token.strip(), re.ASCII):
        raise CommandError(
            "The token of --token or PERMILLE_TOKEN has a space or a letter that no token has. Copy it.",
            Exit.ACCESS,
        )
    # The user chose where to send a token of an option. For the token of the data folder, we must choose.
    from_folder = place.token is None
    with Client(url.strip().rstrip("/"), token, ca_file=place.ca_file, proven=from_folder) as client:
        yield Session(client=client, output=make_output(as_json=as_json), ca_file=place.ca_file)


def _first_line(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() or None
    except OSError:
        return None

"""What the options before the command say, and running one command with them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import typer

from permille_service.cli.client import Client, default_data_dir, find_token, find_url
from permille_service.cli.output import Output, make_output
from permille_service.cli.references import resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the service is and as whom to call it."""

    url: str | None = None
    token: str | None = None
    data_dir: Path | None = None
    ca_file: Path | None = None

    @property
    def folder(self) -> Path:
        """The data folder: named, or the default."""
        return self.data_dir or default_data_dir()


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A client and where its answers go."""

    client: Client
    output: Output
    ca_file: Path | None

    def id_of(self, collection: str, text: str) -> str:
        """The id that a name or a beginning means. Raises CommandError."""
        return resolve(self.client, collection, text)


@contextmanager
def connect(context: typer.Context, *, as_json: bool) -> Iterator[Session]:
    """Open a session. Raises CommandError when URL or token are missing."""
    place = context.ensure_object(Place)
    url, token = find_url(place.url, place.folder), find_token(place.token, place.folder)
    with Client(url, token, ca_file=place.ca_file) as client:
        yield Session(client=client, output=make_output(as_json=as_json), ca_file=place.ca_file)

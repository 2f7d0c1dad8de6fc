"""Real agents and the real service over HTTP: the app in a thread, its worker in this process."""

import io
import json
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from permille_agent.cli.main import main
from permille_agent.link.enrolment import enroll, open_api, require_enrolment
from permille_agent.link.pull import pull
from permille_agent.state.choices import add_references
from permille_agent.state.home import Home, open_home
from permille_agent.training.options import RunContext
from permille_rounds.agent.calls import FederationsApi
from permille_rounds.agent.exchange import TookPart, join_federation, take_part
from tests.api_service import Api, running_api
from tests.bigram_engine import bigram_engine
from tests.packages import sentences

GRADIENT: dict[str, Any] = {
    "method": "gradient",
    "steps": 2,
    "queries": 64,
    "local_steps": 2,
    "learning_rate": None,
    "epsilon": None,
    "target": 2,
    "minimum": 1,
    "few_devices": True,
    "batch_rows": 2,
    "row_tokens": 32,
}
"""Fields of a federation for two devices. They override `tests.rounds.site.SMALL`."""


@dataclass(frozen=True, slots=True)
class Service:
    """The service under test, its address, and every byte of the requests that it received."""

    api: Api
    url: str
    traffic: list[bytes]


class _Noting:
    """An app that records requests before it passes them on."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.traffic: list[bytes] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def receive_and_record() -> Message:
            message = await receive()
            self.traffic.append(message.get("body", b""))
            return message

        headers = b"\r\n".join(b": ".join(header) for header in scope["headers"])
        path = f"{scope['method']} {scope['path']}?".encode() + scope["query_string"]
        self.traffic.append(path + b"\r\n" + headers)
        await self._app(scope, receive_and_record, send)


@contextmanager
def rounds_service(folder: Path) -> Iterator[Service]:
    """Run the app with its data below `folder`, on a port of loopback."""
    with running_api(folder) as api:
        app = _Noting(api.client.app)
        config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        try:
            yield Service(api, f"http://127.0.0.1:{port}", app.traffic)
        finally:
            server.should_exit = True
            thread.join()


@dataclass(frozen=True, slots=True)
class Agent:
    """One device: its home folder, and the text of one person."""

    home: Home
    text: Path

    def take_part(self) -> TookPart:
        """Make one pass with the bigram engine."""
        return take_part(self.home, [self.text], RunContext(engine_of=bigram_engine))

    def without_sending(self) -> None:
        """Make a pass that ends before the contribution is sent."""
        with (
            patch.object(FederationsApi, "contribute", side_effect=KeyboardInterrupt),
            suppress(KeyboardInterrupt),
        ):
            self.take_part()

    def copied(self, folder: Path) -> "Agent":
        """Return a copy of the device in another folder."""
        shutil.copytree(self.home.root, folder, symlinks=True)
        return Agent(open_home(folder), self.text)

    def join(self, name: str) -> None:
        join_federation(self.home, name)

    def command(self, *arguments: str, code: int = 0) -> Any:
        """Run a command with `--json`. Return the document that it prints."""
        printed, errors = io.StringIO(), io.StringIO()
        with redirect_stdout(printed), redirect_stderr(errors):
            got = main(["--home", str(self.home.root), *arguments, "--json"])
        assert got == code, errors.getvalue()
        return json.loads(printed.getvalue() or "null")


def make_agent(service: Service, folder: Path, number: int, *, lines: int = 900) -> Agent:
    """Make an enrolled device that has the package. The words of its sentences are in reverse order."""
    folder.mkdir()
    text = folder / "notes.txt"
    said = [" ".join(reversed(line.split())) for line in sentences(lines, seed=number)]
    text.write_text("\n\n".join(said))
    home = open_home(folder / "home")
    invited = service.api.post("/v1/invitations", {"release": "tiny", "alias": "stable"}).json()
    enroll(home, service.url, invited["invitation"])
    add_references(home, [text])
    with open_api(home) as api:
        pull(home, api, require_enrolment(home)[0], now_s=time.time())
    return Agent(home, text)

"""The API process is light: no torch, not even through the library."""

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from permille.errors import OperatorError
from permille_service.__main__ import listen
from permille_service.connections import Connections
from permille_service.settings import Settings

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

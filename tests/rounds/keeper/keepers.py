"""A keeper in its own process, which can die at a named step."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import permille_rounds.keeper.server as server
from permille_rounds.keeper.main import main
from permille_rounds.keeper.memory import Memory
from permille_rounds.keeper.server import _Handler
from permille_rounds.private_rounds import draw_round_noise
from tests.preloaded import Process

STEPS = ("asked", "opened", "drawn", "kept", "answering")


def die(*_: Any, **__: Any) -> Any:
    """Kill this process. For its files, SIGKILL has the effect of a power failure."""
    os.kill(os.getpid(), signal.SIGKILL)


def arm(step: str) -> None:
    """Let this process die at the named step of its next answer."""
    draw, keep, send = draw_round_noise, Memory.answer_once, _Handler._send

    def half(handler: Any, status: Any, body: bytes) -> None:
        if len(body) < 8:
            send(handler, status, body)
        handler.wfile.write(b"HTTP/1.0 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body[:20])
        handler.wfile.flush()
        die()

    patches = {
        "asked": (server, "answer", die),
        "opened": (server, "draw_round_noise", die),
        "drawn": (server, "draw_round_noise", lambda rules: die(draw(rules))),
        "kept": (Memory, "answer_once", lambda *arguments: die(keep(*arguments))),
        "answering": (_Handler, "_send", half),
    }
    if step in patches:
        setattr(*patches[step])


@contextmanager
def running(
    home: Path, port: int = 0, step: str | None = None
) -> Iterator[tuple[int, "subprocess.Popen[str]"]]:
    """Run a keeper on loopback. Yields its port and its process."""
    command = [sys.executable, "-m", "tests.rounds.keeper.keepers", step or "-", "--home", str(home), "run"]
    process = Process([*command, "--port", str(port)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "listens" in line
        yield int(line.split()[-1]), process
    finally:
        process.kill()
        process.wait()


def wait_until_dead(process: "subprocess.Popen[str]") -> int:
    """Return the number of the signal that ended the process."""
    until = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    return -(process.poll() or 0)


def run(arguments: Sequence[str]) -> None:
    """Run a keeper's command line. The first argument is the step at which to die."""
    arm(arguments[0])
    main(arguments[1:])


if __name__ == "__main__":
    run(sys.argv[1:])

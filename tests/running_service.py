"""`permille up` as a real process, with or without its worker."""

import io
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx

from permille_service.cli.main import main
from tests.preloaded import Process, children, run

STOP_S = 60.0
UP = (sys.executable, "-m", "permille_service.cli.main", "up")


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    url: str
    token: str
    data_dir: Path
    process: subprocess.Popen[str]

    @property
    def api_pid(self) -> int:
        """Return the process id of the API, the first child of `permille up`."""
        return children(self.process.pid)[0]

    def client(self) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.token}"}
        # The service waits less than this for its database, so a test sees the service's own error.
        return httpx.Client(base_url=self.url, headers=headers, timeout=90.0, trust_env=False)

    def permille(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return permille("--data-dir", str(self.data_dir), *arguments)

    def answer(self, *arguments: str) -> Any:
        done = self.permille(*arguments, "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)


def permille(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the operator's command line in this process, without the PERMILLE settings of the caller."""
    printed, errors = io.StringIO(), io.StringIO()
    settings = patch.dict(os.environ, environment(), clear=True)
    with settings, redirect_stdout(printed), redirect_stderr(errors):
        code = main(list(arguments))
    return subprocess.CompletedProcess(arguments, code, printed.getvalue(), errors.getvalue())


def permille_up(*options: str) -> subprocess.CompletedProcess[str]:
    """Run `permille up` as a process and wait for its end."""
    return run([*UP, *options], env=environment())


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment without PERMILLE settings, limited to one compute thread."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PERMILLE_")}
    return {**kept, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **more}


@contextmanager
def running_service(folder: Path, *options: str, **settings: str) -> Iterator[Running]:
    """Run `permille up` with its data below `folder`. Stop it by SIGTERM at the end.

    If `files` is among the settings, each of its processes may open that number of files. If `real` is, the
    processes are started for real, and not forked from a preloaded one.
    """
    data_dir, files = folder / "data", settings.pop("files", None)
    start = subprocess.Popen if settings.pop("real", None) else Process
    process = start(
        [*UP, "--data-dir", str(data_dir), "--port", "0", "--json", *options],
        stdout=subprocess.PIPE,
        stderr=(folder / "up.log").open("w"),
        text=True,
        env=environment(**settings),
        preexec_fn=None if files is None else partial(_limit_files, int(files)),
    )
    try:
        answer = _first_document(process)
        token = Path(answer["token_file"]).read_text().strip()
        yield Running(url=answer["url"], token=token, data_dir=data_dir, process=process)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(STOP_S)
        if process.stdout is not None:
            process.stdout.close()


def _limit_files(files: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))


def _first_document(process: subprocess.Popen[str]) -> dict[str, Any]:
    if process.stdout is None:
        raise RuntimeError("The service has no pipe to read its address from.")
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if line.rstrip() == "}":
            document: dict[str, Any] = json.loads("".join(lines))
            return document
    raise RuntimeError(f"The service did not start: {''.join(lines)!r}")

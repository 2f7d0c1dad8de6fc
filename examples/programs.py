"""Run the service, the operator's commands and the device's commands as child processes.

All programs work below one folder: `cloud` holds the data of the service, and `device` (or another name)
is the home of the agent. Each child runs in its own session and ends with its parent. Ctrl-C therefore
reaches this process alone, which stops the children in order. Programs are run by their command lines,
never imported.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from permille.exits import CommandError, Exit
from permille_service.cli.up import end_with_parent, stop

START_S = 330.0  # longer than `permille up` waits for its API
STOP_S = 60.0
DRAIN_S = "1"
"""Seconds that running jobs get when the service stops.

This short time suffices, because a job that is cut off goes on from its checkpoint when the service runs
again.
"""
POLL_S = 0.1
PERMILLE = ("-m", "permille_service.cli.main")
AGENT = ("-m", "permille_agent")


def _silent(_: str) -> None:
    """Ignore the text of a command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """The command lines of operator and device, both on the data below one folder.

    Attributes:
        work: the folder that holds `cloud` and the home of the agent.
        home: name of the agent's home folder.
        tell: a function that gets each command, as a person would type it.

    Example:
        >>> programs = Programs(work=Path("/var/tmp/personal"))
        >>> with programs.service(models=Path("models"), corpora=Path("texts"), settings={}) as url:
        ...     programs.permille("models", "add", "chat", "--folder", "my-model")
    """

    work: Path
    home: str = "device"
    tell: Callable[[str], None] = _silent

    @property
    def cloud(self) -> Path:
        """The data folder of the service."""
        return self.work / "cloud"

    @property
    def device(self) -> Path:
        """The home folder of the agent."""
        return self.work / self.home

    @contextmanager
    def service(self, *, models: Path, corpora: Path, settings: Mapping[str, str]) -> Iterator[str]:
        """Run API and worker on a free port of loopback, and yield the URL.

        Args:
            models: folder below which models may be registered.
            corpora: folder below which texts may be registered.
            settings: further settings of the service, as environment variables.

        Raises:
            CommandError: the service did not start. The message has its last output.
        """
        self.work.mkdir(mode=0o700, parents=True, exist_ok=True)
        port_file, log = self.work / "port", self.work / "service.log"
        port_file.unlink(missing_ok=True)
        roots = ("--model-root", str(models), "--corpus-root", str(corpora))
        options = ("--data-dir", str(self.cloud), *roots, "--port", "0", "--port-file", str(port_file))
        with log.open("w", encoding="utf-8") as output:

            def up() -> subprocess.Popen[str]:
                variables = {"PERMILLE_DRAIN_S": DRAIN_S, **settings}
                return start((*PERMILLE, "up", *options), variables, stdout=output, stderr=output)

            process, deadline = up(), time.monotonic() + START_S
            try:
                while not port_file.exists():
                    in_time = time.monotonic() < deadline
                    # The service of an earlier, killed run may still be stopping. Then start again.
                    if process.poll() == Exit.RETRY and in_time:
                        process = up()
                    elif process.returncode is not None or not in_time:
                        raise CommandError(_not_started(process, log), Exit.FAILED)
                    time.sleep(POLL_S)
                yield f"http://127.0.0.1:{port_file.read_text(encoding='ascii').strip()}"
            finally:
                stop([process], STOP_S)

    def permille(self, *arguments: str) -> Any:
        """Run one command of the operator, and return its JSON answer. Raises CommandError."""
        self.tell(shlex.join(("permille", *arguments)))
        return _answer((*PERMILLE, "--data-dir", str(self.cloud), *arguments, "--json"), {})

    def follow(self, job_id: str, *, quiet: bool = False) -> None:
        """Wait for a job. Show its progress and the time left on standard error, unless `quiet`.

        Raises:
            CommandError: the job did not succeed.
        """
        if quiet:
            self.permille("jobs", "watch", job_id)
            return
        command = (*PERMILLE, "--data-dir", str(self.cloud), "jobs", "watch", job_id)
        process = start(command, {}, stdout=subprocess.DEVNULL, stderr=None)
        # Stop the command by SIGTERM. After SIGINT, it would say that the job continues, but here the service
        # stops, too.
        _outputs(process, signal.SIGTERM)
        if process.returncode:
            raise CommandError(f"The build did not succeed (job {job_id}). See above.", Exit.FAILED)

    def agent(self, *arguments: str, may_end_with: Sequence[int] = (0,)) -> Any:
        """Run one command of the device, and return its JSON answer.

        Raises:
            CommandError: the command ended with an unexpected exit code.
        """
        self.tell(shlex.join(("permille-agent", *arguments)))
        return _answer((*AGENT, *arguments, "--json"), self._home, may_end_with)

    def show_agent(self, *arguments: str, quiet: bool = False) -> tuple[int, str]:
        """Run one command of the device with output for people, and return its exit code.

        If `quiet`, only errors are shown, and the command's JSON answer is returned, too. Otherwise, the
        answer is empty.
        """
        self.tell(shlex.join(("permille-agent", *arguments)))
        printed, options = (subprocess.PIPE, ("--json",)) if quiet else (None, ())
        process = start((*AGENT, *arguments, *options), self._home, stdout=printed, stderr=None)
        answer, _ = _outputs(process)
        return process.returncode, answer or ""

    @property
    def _home(self) -> dict[str, str]:
        return {"PERMILLE_AGENT_HOME": str(self.device)}


def start(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    stdout: int | IO[str] | None,
    stderr: int | IO[str] | None,
) -> subprocess.Popen[str]:
    """Start Python with `arguments` as a child that ends with this process.

    The child does not inherit `PERMILLE_` variables, which may belong to another service. `environment` adds
    variables.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PERMILLE_")}
    return subprocess.Popen(
        [sys.executable, "-P", *arguments],
        env={**kept, **environment},
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        text=True,
        start_new_session=True,
        preexec_fn=end_with_parent if sys.platform == "linux" else None,
    )


def _answer(
    arguments: Sequence[str], environment: Mapping[str, str], may_end_with: Sequence[int] = (0,)
) -> Any:
    process = start(arguments, environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    printed, errors = _outputs(process)
    if process.returncode not in may_end_with:
        raise CommandError(_error_in(printed, errors), _exit_of(process.returncode))
    return json.loads(printed)


def _error_in(printed: str, errors: str) -> str:
    """Return the error message of a failed command: from its JSON, or else its last line."""
    for text in (printed, errors):
        with suppress(ValueError, AttributeError, TypeError):
            error = json.loads(text)["error"]
            return str(error["message"] if isinstance(error, dict) else error)
    lines = (errors or printed).strip().splitlines()
    return lines[-1] if lines else "It ended without a word."


def _exit_of(code: int) -> Exit:
    """Return the exit code of a child as `Exit`. Both command lines have the same codes."""
    return Exit(code) if code in (Exit.USAGE, Exit.REFUSED, Exit.RETRY, Exit.INTERRUPTED) else Exit.FAILED


def _outputs(process: subprocess.Popen[str], stop_by: signal.Signals = signal.SIGINT) -> tuple[str, str]:
    """Wait for the end of a process, and return what it wrote into pipes.

    If this process is told to end meanwhile, it stops the other process first.
    """
    try:
        return process.communicate()
    except BaseException:  # Ctrl-C, or SIGTERM as SystemExit
        stop([process], STOP_S, stop_by)
        raise


def _not_started(process: subprocess.Popen[str], log: Path) -> str:
    """Return the error message for a service that does not listen."""
    last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
    said = f" It said: {last[0]}" if last else f" It said nothing. Is the disk of {log.parent} full?"
    what = f"did not answer within {START_S:.0f} s" if process.returncode is None else "ended at its start"
    return f"The embedded service {what}.{said} All of it is in {log}."

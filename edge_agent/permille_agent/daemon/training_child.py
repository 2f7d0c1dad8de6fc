"""Training in a child process. The daemon stays small, and it survives a crash of the engine.

`train_in_child` starts this module as a program:

- The child reads one JSON line, trains, and writes one JSON line.
- The child stops after its current step when its standard input ends. The input ends when the parent closes
  it or dies.
- The child holds the writers' lock. It receives paths and never text.
"""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from permille.choices import Method
from permille.errors import InputError, OperatorError, PackageError, PermilleError, RetryableError
from permille_agent.state.home import Home, as_json, open_home, parse_record, path_of, stored_path
from permille_agent.state.lock import LockedError, hold_lock
from permille_agent.training.engines import AUTO, EngineChoice

STOP_GRACE_S = 300.0  # a step on a slow device may take minutes; after this time, the child is killed
READY = "ready"
CHECK_EVERY_S = 1.0
# The child sends the name of the first class that fits its error. LockedError comes first, because it is also
# a RetryableError.
_ERRORS: Mapping[str, type[PermilleError]] = {
    "LockedError": LockedError,
    "RetryableError": RetryableError,
    "InputError": InputError,
    "OperatorError": OperatorError,
}


class ChildDiedError(RetryableError):
    """The training process ended without an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRequest:
    """Request of the daemon for a personal run.

    The daemon sends the same request after an interruption, so that the run is resumed. If `minutes` is
    None, the release or the default decides the length of the run.
    """

    data_paths: tuple[Path, ...]
    minutes: float | None
    share_log: bool
    share_state: bool = False
    method: Method | None = None
    withdrawals: int = 0
    engine: str = AUTO


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignedTraining:
    """Request of the daemon for an assigned training (`link/extension.py`)."""

    extension: str
    order: str
    data_paths: tuple[Path, ...]
    engine: str = AUTO


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """The line that the child reads: a request for a personal run, or for an assigned training."""

    home: Path
    request: TrainingRequest | AssignedTraining


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """The line that the child writes: the outcome of the run, or an error. Only a PackageError has a code."""

    outcome: str = ""
    error: str = ""
    code: str = ""
    message: str = ""


def train_in_child(
    home: Home, request: TrainingRequest | AssignedTraining, keep_going: Callable[[], bool]
) -> str:
    """Train in a child process and return the outcome of the run.

    The outcome is a value of `permille.schemas.runs.Outcome`, or `READY` for an assigned training
    whose result is complete. An unfinished one gives `interrupted`.

    Args:
        home: the home folder.
        request: the training to do.
        keep_going: called about once a second. When it returns False, the child is told to stop.

    Raises:
        PermilleError: the error that the child raised.
        ChildDiedError: the child died without an answer.
    """
    # `-P` prevents imports of modules in the current folder.
    command = [sys.executable, "-P", "-m", "permille_agent.daemon.training_child"]
    # JSON cannot hold the bytes of a path that are not UTF-8.
    request = replace(request, data_paths=tuple(Path(stored_path(path)) for path in request.data_paths))
    line = json.dumps(as_json(_Order(home=Path(stored_path(home.root)), request=request))) + "\n"
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        answer = _supervise(child, line, keep_going)
    if child.returncode != 0 or not answer:
        raise ChildDiedError(f"The training process ended with {child.returncode} and without an answer.")
    return _read_answer(answer)


def run_child(stdin: TextIO, stdout: TextIO) -> None:
    """Run the child process: read one request, write one answer."""
    # Ctrl-C also reaches this child. Ignore it, because the parent stops the child through its pipe.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    order = parse_record(stdin.readline().encode(), _Order, "the parent's line")
    stop = threading.Event()
    # Wait for the end of the input in a thread, because the main thread trains.
    threading.Thread(target=_wait_for_end, args=(stdin, stop), daemon=True).start()
    try:
        answer = _Answer(outcome=_train(order, stop))
    except PackageError as exc:
        message = str(exc).removeprefix(f"{exc.code}: ")
        answer = _Answer(error="PackageError", code=exc.code, message=message)
    except PermilleError as exc:
        kind = next((name for name, kind in _ERRORS.items() if isinstance(exc, kind)), "OperatorError")
        answer = _Answer(error=kind, message=str(exc))
    stdout.write(json.dumps(as_json(answer)) + "\n")
    stdout.flush()


def _train(order: _Order, stop: threading.Event) -> str:
    home = open_home(path_of(str(order.home)))
    paths = tuple(path_of(str(path)) for path in order.request.data_paths)
    if isinstance(order.request, AssignedTraining):
        return _train_assigned(home, replace(order.request, data_paths=paths), stop)
    return _train_personal(home, replace(order.request, data_paths=paths), stop)


def _train_assigned(home: Home, request: AssignedTraining, stop: threading.Event) -> str:
    from permille_agent.link.extension import assignments
    from permille_agent.training.options import RunContext
    from permille_agent.training.progress import LiveProgress

    with hold_lock(home, "run"), LiveProgress(home) as progress:
        context = RunContext(stop=stop, progress=progress, engine_of=EngineChoice(name=request.engine))
        source = assignments()[request.extension]
        return READY if source.train(home, request.order, request.data_paths, context) else "interrupted"


def _train_personal(home: Home, request: TrainingRequest, stop: threading.Event) -> str:
    from permille_agent.state.models import training_of_release
    from permille_agent.training.options import RunContext, options_for
    from permille_agent.training.progress import LiveProgress
    from permille_agent.training.train import run_training

    with hold_lock(home, "run"), LiveProgress(home) as progress:
        context = RunContext(
            share_log=request.share_log,
            share_state=request.share_state,
            withdrawals=request.withdrawals,
            stop=stop,
            progress=progress,
            engine_of=EngineChoice(name=request.engine),
        )
        options = options_for(
            training_of_release(home),
            engine=request.engine,
            share_log=request.share_log,
            method=request.method,
            minutes=request.minutes,
        )
        result = run_training(home, request.data_paths, options, context)
    return str(result.outcome)


def _wait_for_end(stdin: TextIO, stop: threading.Event) -> None:
    stdin.read()
    stop.set()


def _supervise(child: subprocess.Popen[str], line: str, keep_going: Callable[[], bool]) -> str:
    answers: list[str] = []
    assert child.stdin is not None and child.stdout is not None  # both are pipes
    # Read in a thread. Otherwise, a child whose answer fills the pipe would wait forever.
    reader = threading.Thread(target=lambda out=child.stdout: answers.append(out.read()), daemon=True)
    reader.start()
    try:
        child.stdin.write(line)
        child.stdin.flush()
        while reader.is_alive() and keep_going():
            reader.join(CHECK_EVERY_S)
        # The child stops when its input ends.
        child.stdin.close()
        reader.join(STOP_GRACE_S)
    # The child died before it read its request. Wait for the end of its output.
    except BrokenPipeError:
        with suppress(BrokenPipeError):  # `close` tries again to write the request
            child.stdin.close()
        reader.join(STOP_GRACE_S)
    finally:
        if reader.is_alive():
            child.kill()
            reader.join()
    return answers[0] if answers else ""


def _read_answer(text: str) -> str:
    try:
        answer = parse_record(text.splitlines()[-1].encode(), _Answer, "the answer of the training process")
    except OperatorError as exc:
        # A kill while the child writes leaves half a line. The next attempt may succeed.
        raise RetryableError(str(exc)) from exc
    if answer.error == "PackageError":
        raise PackageError(answer.code, answer.message)
    if answer.error:
        raise _ERRORS[answer.error](answer.message)
    return answer.outcome


if __name__ == "__main__":
    run_child(sys.stdin, sys.stdout)

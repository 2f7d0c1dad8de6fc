"""Training in a process of its own, so that the daemon stays small and a crash of the engine does not end it.

`train_in_child` starts this module as a program. It reads one JSON line, trains, and answers with one JSON
line. Its standard input is the parent's pipe: where it ends, because the parent asks to stop or died, the
child stops after the step it is in. The child holds the writers' lock itself. It is handed paths, never text.
"""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from permille.errors import InputError, OperatorError, PackageError, PermilleError, RetryableError
from permille_agent.state.home import Home, open_home
from permille_agent.state.lock import LockedError, hold_lock
from permille_agent.training.engines import AUTO, EngineChoice

STOP_GRACE_S = 300.0
CHECK_EVERY_S = 1.0
_ERRORS: Mapping[str, type[PermilleError]] = {
    "LockedError": LockedError,
    "RetryableError": RetryableError,
    "InputError": InputError,
    "OperatorError": OperatorError,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRequest:
    """What the daemon asks for. `minutes` and `seed` are the same on every try, so that a run is resumed;
    `engine` is the name of one."""

    data_paths: tuple[Path, ...]
    minutes: float
    seed: int
    share_log: bool
    engine: str = AUTO


def train_in_child(home: Home, request: TrainingRequest, keep_going: Callable[[], bool]) -> str:
    """Train in a child; returns how the run ended (`permille.schemas.runs.Outcome`).

    Args:
        keep_going: asked every few seconds; the child is told to stop once it says no.

    Raises:
        PermilleError: what the child raised.
        RetryableError: the child died without an answer.
    """
    command = [sys.executable, "-P", "-m", "permille_agent.daemon.training_child"]
    line = json.dumps({"home": str(home.root), **asdict(request)}, default=str) + "\n"
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        answer = _supervise(child, line, keep_going)
    if child.returncode != 0 or not answer:
        raise RetryableError(f"expected an answer of the training process, it ended with {child.returncode}")
    return _read_answer(answer)


def run_child(stdin: TextIO, stdout: TextIO) -> int:
    """The child's side: one request in, one answer out. Signals are for the parent: the leash decides."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    request = json.loads(stdin.readline())
    stop = threading.Event()
    threading.Thread(target=_wait_for_end, args=(stdin, stop), daemon=True).start()
    try:
        answer: dict[str, Any] = {"outcome": _train(request, stop)}
    except PackageError as exc:
        answer = {
            "error": "PackageError",
            "code": exc.code,
            "message": str(exc).removeprefix(f"{exc.code}: "),
        }
    except PermilleError as exc:
        answer = {"error": type(exc).__name__, "kind": _kind(exc), "message": str(exc)}
    stdout.write(json.dumps(answer) + "\n")
    stdout.flush()
    return 0


def _train(request: Mapping[str, Any], stop: threading.Event) -> str:
    from permille_agent.training.train import run_training

    home = open_home(Path(request["home"]))
    paths: Sequence[Path] = [Path(name) for name in request["data_paths"]]
    with hold_lock(home, "run"):
        outcome = run_training(
            home,
            data_paths=paths,
            steps=None,
            minutes=request["minutes"],
            seed=request["seed"],
            share_log=request["share_log"],
            stop_event=stop,
            engine_of=EngineChoice(name=request.get("engine", AUTO)),
        )
    return str(outcome.outcome)


def _kind(error: PermilleError) -> str:
    return next((name for name, kind in _ERRORS.items() if isinstance(error, kind)), "OperatorError")


def _wait_for_end(stdin: TextIO, stop: threading.Event) -> None:
    stdin.read()
    stop.set()


def _supervise(child: subprocess.Popen[str], line: str, keep_going: Callable[[], bool]) -> str:
    answers: list[str] = []
    assert child.stdin is not None and child.stdout is not None  # both are pipes
    reader = threading.Thread(target=lambda out=child.stdout: answers.append(out.read()), daemon=True)
    reader.start()
    try:
        child.stdin.write(line)
        child.stdin.flush()
        while reader.is_alive() and keep_going():
            reader.join(CHECK_EVERY_S)
        child.stdin.close()
        reader.join(STOP_GRACE_S)
    except BrokenPipeError:
        reader.join(STOP_GRACE_S)
    finally:
        if reader.is_alive():
            child.kill()
            reader.join()
    return answers[0] if answers else ""


def _read_answer(text: str) -> str:
    try:
        answer = json.loads(text.splitlines()[-1])
    except ValueError as exc:
        raise RetryableError(f"expected one JSON line of the training process: {exc}") from exc
    if "error" not in answer:
        return str(answer["outcome"])
    if answer["error"] == "PackageError":
        raise PackageError(str(answer["code"]), str(answer["message"]))
    raise _ERRORS[answer["kind"]](str(answer["message"]))


if __name__ == "__main__":
    sys.exit(run_child(sys.stdin, sys.stdout))

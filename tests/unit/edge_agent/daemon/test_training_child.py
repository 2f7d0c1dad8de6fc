"""Tests of training in a child process: its answers, its stops, and the death of its parent."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from textwrap import indent
from typing import Any

import psutil
import pytest

from permille.errors import InputError, OperatorError, PackageError, PermilleError, RetryableError
from permille.schemas.runs import Outcome
from permille_agent.daemon import training_child
from permille_agent.daemon.training_child import TrainingRequest, train_in_child
from permille_agent.state.home import Home, as_json, open_home
from permille_agent.state.lock import LockedError, hold_lock

REQUEST = TrainingRequest(data_paths=(Path("/no/such/file.txt"),), minutes=1.0, share_log=False)

# Source of the child. It replaces the training module before the child's code imports it.
CHILD = """
import sys, types
from types import SimpleNamespace
from permille.errors import *
module = types.ModuleType("permille_agent.training.train")
def run_training(home, data_paths, options, context):
    stop = context.stop
{body}
module.run_training = run_training
sys.modules["permille_agent.training.train"] = module
from permille_agent.daemon.training_child import run_child
run_child(sys.stdin, sys.stdout)
"""


Doing = Callable[[str], None]


@pytest.fixture
def child_doing(monkeypatch: pytest.MonkeyPatch) -> Doing:
    """Return a function that sets the Python code which `train_in_child` runs as its training."""
    real = subprocess.Popen

    def install(body: str) -> None:
        child = [sys.executable, "-c", CHILD.format(body=indent(body, "    "))]
        monkeypatch.setattr(subprocess, "Popen", lambda _command, **options: real(child, **options))

    return install


def test_the_child_is_handed_the_request_and_its_outcome_comes_back(home: Home, child_doing: Doing) -> None:
    child_doing(
        "assert (options.steps, options.minutes, context.share_log) == (None, 1.0, False)\n"
        "assert context.engine_of.name == 'auto'\n"
        "assert [str(path) for path in data_paths] == ['/no/such/file.txt']\n"
        "print('chatter of a library')\n"
        "return SimpleNamespace(outcome='kept_base')"
    )
    assert train_in_child(home, REQUEST, lambda: True) == "kept_base"


def test_the_child_gets_names_that_are_not_utf_8(tmp_path: Path, child_doing: Doing) -> None:
    child_doing(
        "assert str(home.root).endswith('h\\udce9')\n"
        "assert [str(path) for path in data_paths] == ['/n\\udce9tes']\n"
        "return SimpleNamespace(outcome='kept_base')"
    )
    request = replace(REQUEST, data_paths=(Path("/n\udce9tes"),))
    assert train_in_child(open_home(tmp_path / "h\udce9"), request, lambda: True) == "kept_base"


def test_the_child_holds_the_writers_lock(home: Home, child_doing: Doing) -> None:
    child_doing("return SimpleNamespace(outcome='adopted')")
    errors: list[BaseException] = []

    def train() -> None:
        try:
            train_in_child(home, REQUEST, lambda: True)
        except PermilleError as exc:
            errors.append(exc)

    with hold_lock(home, "train"):
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    assert [type(error) for error in errors] == [LockedError]


@pytest.mark.parametrize(
    ("raised", "kind", "message"),
    [
        ("InputError('too little text')", InputError, "^too little text$"),
        ("OperatorError('no package')", OperatorError, "^no package$"),
        ("RetryableError('busy')", RetryableError, "^busy$"),
        (
            "PackageError('blob-digest', 'expected a, got b')",
            PackageError,
            "^blob-digest: expected a, got b$",
        ),
    ],
)
def test_errors_keep_their_kind(
    home: Home, child_doing: Doing, raised: str, kind: type[PermilleError], message: str
) -> None:
    child_doing(f"raise {raised}")
    with pytest.raises(kind, match=message):
        train_in_child(home, REQUEST, lambda: True)


@pytest.mark.parametrize(
    "body", ["import os; os._exit(3)", "raise ValueError('a bug')", "import os; os.kill(os.getpid(), 9)"]
)
def test_a_child_that_dies_is_tried_again_later(home: Home, child_doing: Doing, body: str) -> None:
    child_doing(body)
    with pytest.raises(RetryableError, match="process ended with"):
        train_in_child(home, REQUEST, lambda: True)


def test_a_child_that_dies_before_it_reads_is_tried_again_later(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = subprocess.Popen

    def die_first(_command: object, **options: Any) -> Any:
        child = real([sys.executable, "-c", "raise SystemExit(3)"], **options)
        child.wait()
        return child

    monkeypatch.setattr(subprocess, "Popen", die_first)
    with pytest.raises(RetryableError, match="process ended with 3"):
        train_in_child(home, REQUEST, lambda: True)


def test_a_child_is_stopped_by_its_parents_pipe(home: Home, child_doing: Doing) -> None:
    child_doing("stop.wait(60)\nreturn SimpleNamespace(outcome='interrupted')")
    asked = iter([True, False])
    assert train_in_child(home, REQUEST, lambda: next(asked)) == "interrupted"


def test_a_child_that_does_not_stop_is_killed(
    home: Home, child_doing: Doing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_child, "STOP_GRACE_S", 0.5)
    child_doing("import time; time.sleep(600)")
    with pytest.raises(RetryableError, match="process ended with -9"):
        train_in_child(home, REQUEST, lambda: False)


def test_a_child_outlives_signals_but_not_its_parent(home: Home) -> None:
    body = "stop.wait(60)\nreturn SimpleNamespace(outcome='interrupted')"
    command = [sys.executable, "-c", CHILD.format(body=indent(body, "    "))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None and child.stdout is not None
        line = {"home": str(home.root), "request": as_json(REQUEST)}
        child.stdin.write(json.dumps(line) + "\n")
        child.stdin.flush()
        while not (home.root / "agent.lock.holder").exists():
            time.sleep(0.01)
        os.kill(child.pid, signal.SIGTERM)
        os.kill(child.pid, signal.SIGINT)
        # Time for the signals to arrive.
        time.sleep(0.2)
        assert psutil.Process(child.pid).is_running()
        child.stdin.close()  # the parent's death closes this pipe, too
        assert json.loads(child.stdout.readlines()[-1])["outcome"] == "interrupted"


def test_the_answer_is_what_the_schema_calls_an_outcome(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("permille_agent.training.train")
    module.run_training = lambda *_, **__: types.SimpleNamespace(outcome=Outcome.ADOPTED)
    monkeypatch.setitem(sys.modules, "permille_agent.training.train", module)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    line = {"home": str(home.root), "request": as_json(REQUEST)}
    output = io.StringIO()
    training_child.run_child(io.StringIO(json.dumps(line) + "\n"), output)
    assert json.loads(output.getvalue())["outcome"] == "adopted"

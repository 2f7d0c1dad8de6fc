"""Tests of the lock: one writer at a time, and no lock after its holder's death."""

import io
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from permille.errors import OperatorError
from permille_agent.cli import main as cli
from permille_agent.state.home import Home
from permille_agent.state.lock import LockedError, hold_lock, lock_holder
from tests.packages import CHATML
from tests.unit.edge_agent.runs import home_with_package, train_quickly, user_text

HOLDER = """
import sys
from pathlib import Path
from permille_agent.state.home import open_home
from permille_agent.state.lock import hold_lock
with hold_lock(open_home(Path(sys.argv[1])), "train"):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def another_process_holds(home: Home) -> Iterator[subprocess.Popen[str]]:
    """Hold the writers' lock in another process. Yields that process."""
    command = [sys.executable, "-c", HOLDER, str(home.root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_second_writer_is_told_who_holds_the_lock_and_a_killed_holder_leaves_it_free(home: Home) -> None:
    with another_process_holds(home) as process:
        expected = rf"`permille-agent train` \(process {process.pid}, since .*\) holds agent.lock"
        with pytest.raises(LockedError, match=expected), hold_lock(home, "run"):
            pytest.fail("two writers")
        process.kill()
        process.wait()
    with hold_lock(home, "run"):
        assert home.lock.exists()


def code_of_another(home: Home) -> int:
    """Return the exit code of another process that takes the lock once.

    Its standard input is empty, so it ends at once.
    """
    command = [sys.executable, "-c", HOLDER, str(home.root)]
    return subprocess.run(command, input=b"", capture_output=True).returncode


def test_a_command_may_take_the_lock_that_its_caller_holds(home: Home) -> None:
    with hold_lock(home, "run"):
        with hold_lock(home, "pull"):
            pass
        assert code_of_another(home) != 0
    assert code_of_another(home) == 0


def test_two_threads_of_a_program_are_two_writers(home: Home) -> None:
    def write() -> None:
        with hold_lock(home, "fit"):
            pass

    with ThreadPoolExecutor(1) as other, hold_lock(home, "fit"), pytest.raises(LockedError):
        other.submit(write).result()
    write()


def test_the_daemons_lock_is_another_one(home: Home) -> None:
    with hold_lock(home, "run", of=home.daemon_lock), hold_lock(home, "train"):
        assert home.daemon_lock.exists()


def test_a_lock_that_cannot_be_written_has_no_holder(home: Home) -> None:
    home.lock.mkdir()  # root writes any file
    assert lock_holder(home) is None
    with pytest.raises(OperatorError, match="lock file"), hold_lock(home, "train"):
        pass


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Home:
    folder = tmp_path_factory.mktemp("trained")
    home, _ = home_with_package(folder / "home", chat_template=CHATML)
    train_quickly(home, [user_text(folder)])
    return home


@pytest.mark.parametrize(
    "command",
    [
        ["show"],
        ["status"],
        ["compare", "--max-tokens", "4"],
        ["generate", "On day 3", "--max-tokens", "4"],
        ["chat", "--max-tokens", "4"],
        ["export", "{folder}/plain"],
        ["export", "{folder}/gguf", "--format", "gguf", "--type", "f16"],
        ["data", "list"],
        ["policy"],
    ],
    ids=lambda command: " ".join(command[:1]),
)
def test_reading_is_never_blocked_by_a_training(
    trained: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n"))
    with another_process_holds(trained) as process:
        holder = lock_holder(trained)
        assert holder is not None and holder.pid == process.pid
        asked = [part.format(folder=tmp_path) for part in command]
        assert cli.main(["--home", str(trained.root), *asked]) == 0
    process.wait()
    assert lock_holder(trained) is None

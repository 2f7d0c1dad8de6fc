"""Forked processes are what started ones are. They and their servers end with the process of the tests."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.preloaded import AT_START, ROOT, Process, children, run

ME = [sys.executable, "-m", "tests.integration.test_preloaded"]
STARTS = (Process, subprocess.Popen)
either = pytest.mark.parametrize("start", STARTS)


def told(start: type["subprocess.Popen[str]"], *arguments: str, **options: object) -> dict[str, object]:
    """Return what `main` prints in a process."""
    process = start([*ME, *arguments], stdout=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload]
    output, _ = process.communicate()
    assert process.returncode == 0
    answer: dict[str, object] = json.loads(output)
    assert answer["pid"] == process.pid
    return answer


@either
def test_process_has_its_own_id_session_folder_arguments_and_environment(
    start: type["subprocess.Popen[str]"], tmp_path: Path
) -> None:
    environment = {**os.environ, "PERMILLE_TEST": "1", "PYTHONPATH": str(ROOT)}
    answer = told(start, "say", "b c", cwd=tmp_path, env=environment, start_new_session=True)
    assert answer["parent"] == os.getpid()
    assert answer["session"] == answer["pid"]
    assert answer["folder"] == str(tmp_path)
    assert answer["arguments"] == ["say", "b c"]
    assert answer["variable"] == "1"
    assert answer["files"] == [0, 1, 2]


@either
def test_process_starts_programs_of_its_own(start: type["subprocess.Popen[str]"]) -> None:
    answer = told(start, "start")
    assert answer["child"] == {"parent": answer["pid"], "ended": 0}
    assert not Path(f"/proc/{answer['pid']}").exists()


@either
@pytest.mark.parametrize(
    ("how", "code", "message"),
    [
        ("exit", 7, ""),
        ("complain", 1, "that is why"),
        ("raise", 1, "ValueError: a bug"),
        ("thread", 0, "last"),
    ],
)
def test_exit_code_and_last_messages_arrive(
    start: type["subprocess.Popen[str]"], how: str, code: int, message: str
) -> None:
    process = start([*ME, how], stderr=subprocess.PIPE, text=True)
    _, errors = process.communicate()
    assert process.returncode == code
    assert message in errors


@either
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_signals_end_the_process_itself(start: type["subprocess.Popen[str]"], number: signal.Signals) -> None:
    process = start([*ME, "wait"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(number)
    assert process.wait() == -number
    process.stdout.close()


def test_other_commands_and_other_settings_of_python_start_for_real() -> None:
    assert run([sys.executable, "-c", "import sys; print('torch' in sys.modules)"]).stdout == "False\n"
    # Libraries that other tests import add variables to the environment of this process.
    answer = told(Process, "say", env={**AT_START, "PYTHONHASHSEED": "0"})
    assert answer["preloaded"] is False
    assert told(Process, "say", env=AT_START)["preloaded"] is True


def test_server_ends_with_the_process_that_it_serves() -> None:
    """The kill of a process of tests leaves no server behind."""
    starter = subprocess.Popen([*ME, "serve"], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    server = Path("/proc") / starter.stdout.readline().strip()
    starter.kill()
    starter.wait()
    starter.stdout.close()
    while server.exists() and (server / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)


def main() -> None:
    """Do what the first argument says."""
    how = sys.argv[1]
    about: dict[str, object] = {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "session": os.getsid(0),
        "folder": str(Path.cwd()),
        "arguments": sys.argv[1:],
        "variable": os.environ.get("PERMILLE_TEST"),
        "files": [number for number in range(3) if Path(f"/proc/self/fd/{number}").exists()],
        "preloaded": "permille_service" in sys.modules,
    }
    if how == "say":
        print(json.dumps(about))
    elif how == "start":
        with subprocess.Popen([*ME, "say"], stdout=subprocess.PIPE, text=True) as child:
            answer = json.loads(child.communicate()[0])
        print(json.dumps(about | {"child": {"parent": answer["parent"], "ended": child.returncode}}))
    elif how == "exit":
        sys.exit(7)
    elif how == "complain":
        sys.exit("that is why")
    elif how == "raise":
        raise ValueError("a bug")
    elif how == "thread":
        threading.Timer(0.1, lambda: print("last", file=sys.stderr)).start()
    elif how == "wait":
        print("waiting", flush=True)
        time.sleep(600)
    elif how == "serve":
        Process([*ME, "wait"], stdout=subprocess.DEVNULL)
        [server] = [child for child in map(int, _all_children()) if child not in children(os.getpid())]
        print(server, flush=True)
        time.sleep(600)


def _all_children() -> list[str]:
    return Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()


if __name__ == "__main__":
    main()

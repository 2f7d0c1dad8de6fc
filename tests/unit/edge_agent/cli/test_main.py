"""Tests of the command line: help, JSON output and exit codes of every command, and imports at the start."""

import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from permille.errors import InputError, OperatorError, PackageError, RetryableError
from permille.exits import ExitCode
from permille.package.reader import Package
from permille.schemas.problems import ProblemType
from permille.version import __version__
from permille_agent.cli.console import EXIT_CODE_HELP, exit_code_of
from permille_agent.cli.daemon import JsonLines
from permille_agent.cli.main import app, main
from permille_agent.link.report import enqueue, read_report
from permille_agent.state.home import Home
from permille_agent.state.models import Active, activate, active_model
from tests.device_service import CODE, DeviceService, Fault
from tests.preloaded import Process
from tests.unit.edge_agent.samples import RUN_ID, metrics
from tests.unit.edge_agent.state.test_lock import another_process_holds

OWN_COMMANDS = (
    "enroll", "pull", "status", "report", "share-log", "unenroll", "run", "install-service", "policy", "data",
    "rollback", "reset", "forget",
)  # fmt: skip
MODEL_COMMANDS = ("train", "compare", "generate", "chat", "serve", "export")
AWAY = Fault(path="/v1/", status=503, headers={"retry-after": "600"}, times=99)


@dataclass(frozen=True)
class Ended:
    """Exit code and output of a command."""

    code: int
    output: str
    errors: str

    @property
    def document(self) -> dict[str, Any]:
        """Standard output, parsed as one JSON document."""
        parsed: dict[str, Any] = json.loads(self.output)
        return parsed


Agent = Callable[..., Ended]


@pytest.fixture
def agent(home: Home, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Agent:
    """Return a function that runs `permille-agent` on the test's home folder."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> Ended:
        capsys.readouterr()
        # The daemon keeps its handlers until its process ends, and other tests send signals to this process.
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        code = main(["--home", str(home.root), *arguments])
        for number, handler in before.items():
            signal.signal(number, handler)
        printed = capsys.readouterr()
        return Ended(code, printed.out, printed.err)

    return run


@pytest.fixture
def enrolled(agent: Agent, service: DeviceService) -> Iterator[Agent]:
    """Return `agent` after an enrolment of the device."""
    assert agent("enroll", service.url, service.invitation).code == ExitCode.OK
    yield agent


def test_enroll_pull_status_tell_what_they_did(
    agent: Agent, service: DeviceService, package: Package
) -> None:
    # Before the enrolment, `status` works without the network.
    status = agent("status", "--json")
    assert (status.code, status.document["enrolment"]) == (0, None)
    enrolled = agent("enroll", service.url, service.invitation, "--name", "kitchen", "--json")
    told = enrolled.document
    assert (enrolled.code, told["name"], told["release"]) == (0, "kitchen", "tiny-llama")
    pulled = agent("pull", "--json")
    assert pulled.document["space_freed_bytes"] == 0
    assert (pulled.code, pulled.document["package"], pulled.document["changed"]) == (0, package.digest, True)
    document = agent("status", "--json").document
    assert document["enrolment"] == told
    assert set(told) == {"server", "device_id", "name", "release", "alias", "root"}
    trains = {"package": package.digest, "trains": f"{package.k} weights over nf4"}
    assert document["release"] == {"name": "tiny-llama", "version": 1, **trains}
    assert document["active"] == {
        **trains,
        "run": None,
        "personal": False,
        "part": None,
        "has_memory": False,
        "tested": None,
        "metrics": None,
    }
    assert document["reports"] == {"pending": 0, "refused": [], "uploaded_logs": []}
    shown = agent("status").output
    for text in (service.url, "tiny-llama (stable)", "version 1", "the base model", "none yet", "0 waiting"):
        assert text in shown


@pytest.mark.parametrize("invitation", ["-" + CODE[1:], "--" + CODE[2:], "-h" + CODE[2:]])
def test_an_invitation_may_begin_with_a_dash(agent: Agent, service: DeviceService, invitation: str) -> None:
    service.invitations.add(invitation)
    invitation += service.invitation[22:]
    assert agent("enroll", service.url, invitation, "--name", "kitchen").code == ExitCode.OK
    assert agent("enroll", service.url, invitation, "--nmae", "kitchen").code == ExitCode.USAGE


@pytest.mark.parametrize(
    ("error", "code"),
    [(InputError("x"), 3), (PackageError("code", "x"), 4), (RetryableError("x"), 5), (OperatorError("x"), 6)],
)
def test_each_kind_of_error_has_its_exit_code(error: Any, code: int) -> None:
    assert exit_code_of(error) == code
    assert f"{code} " in EXIT_CODE_HELP


@pytest.mark.parametrize("command", [("train",), ("data", "add"), ("data", "remove"), ("compare", "--data")])
def test_an_unset_variable_is_not_the_current_folder(agent: Agent, command: tuple[str, ...]) -> None:
    refused = agent(*command, "")
    assert (refused.code, "name is empty" in refused.errors) == (ExitCode.USAGE, True)


@pytest.mark.parametrize("command", [("train",), ("data", "add"), ("compare", "--data")])
@pytest.mark.parametrize("end", ["", "Day and/or night."])
def test_a_text_is_not_the_name_of_a_file(agent: Agent, command: tuple[str, ...], end: str) -> None:
    refused = agent(*command, "My notes. " * 40 + end)
    assert (refused.code, "Give a path, not the text itself" in refused.errors) == (ExitCode.USAGE, True)


def test_errors_come_with_their_code_and_as_json(agent: Agent, service: DeviceService) -> None:
    refused = agent("pull", "--json")
    assert (refused.code, refused.output) == (ExitCode.OPERATOR, "")
    error = json.loads(refused.errors)["error"]
    assert (error["kind"], error["exit_code"]) == ("operator", 6)
    assert "permille-agent enroll" in error["message"]
    assert agent("enroll", service.url, "A" * 22 + service.invitation[22:]).code == ExitCode.INPUT_REFUSED
    insecure = agent("enroll", "http://models.example.org", CODE)
    assert insecure.code == ExitCode.INPUT_REFUSED
    assert "input refused" in insecure.errors
    assert agent("nonsense").code == ExitCode.USAGE
    assert agent("--log-level", "loud", "status").code == ExitCode.USAGE


def test_a_refused_package_and_a_service_that_is_away_have_codes_of_their_own(
    enrolled: Agent, service: DeviceService, package: Package
) -> None:
    service.publish(package.digest, 1, alias="canary")
    refused = enrolled("pull")
    assert refused.code == ExitCode.PACKAGE_REFUSED
    assert "release-alias" in refused.errors
    service.faults = [AWAY]
    assert enrolled("pull").code == ExitCode.TRY_LATER


def test_share_log_is_switched_shown_withdrawn_and_deleted(
    enrolled: Agent, home: Home, service: DeviceService
) -> None:
    assert enrolled("share-log", "show", "--json").document["share_log"] is False
    assert enrolled("share-log", "on", "--json").document["share_log"] is True
    enqueue(home, RUN_ID, metrics(), shared_log=b"log")
    assert enrolled("status", "--json").document["reports"]["pending"] == 1
    assert enrolled("report", "--json").document == {"delivered": 1, "refused": 0}
    assert set(service.runs) == {RUN_ID}
    assert enrolled("share-log", "show", "--json").document["uploaded_logs"] == [RUN_ID]
    assert enrolled("share-log", "delete", RUN_ID, "--json").document == {"deleted": 1}
    assert service.deleted_logs == [RUN_ID]
    enqueue(home, RUN_ID[:-1] + "2", metrics(), shared_log=b"log")
    # A log can also wait in its run's folder.
    waiting = home.runs / "r" / "shared.log"
    waiting.parent.mkdir()
    waiting.write_bytes(b"log")
    assert enrolled("share-log", "off", "--json").document == {"share_log": False, "withdrawn_logs": 2}
    assert not waiting.exists()
    assert enrolled("share-log", "delete", "no-such-run").code == ExitCode.INPUT_REFUSED


def test_a_report_that_was_refused_says_why(enrolled: Agent, home: Home, service: DeviceService) -> None:
    for last in "12":
        enqueue(home, RUN_ID[:-1] + last, metrics(), shared_log=None)
    told = json.dumps({"type": ProblemType.QUOTA_SPENT.uri, "detail": "too many"}).encode()
    service.faults = [Fault(path="/v1/runs", status=409, body=told, times=2)]
    assert "next: permille-agent status" in enrolled("report").output
    shown = enrolled("status").output
    assert "0 waiting, 2 refused" in shown and shown.count("409 too many") == 1


@pytest.mark.parametrize("invitation", ["no invitation", "A" * 22 + "." + "0" * 32])
def test_an_invitation_that_is_refused_leaves_no_folder(
    service: DeviceService, tmp_path: Path, invitation: str
) -> None:
    folder = tmp_path / "new"
    assert main(["--home", str(folder), "enroll", service.url, invitation]) == ExitCode.INPUT_REFUSED
    assert not folder.exists()
    folder.mkdir()
    (folder / ".mine").touch()
    assert main(["--home", str(folder), "enroll", service.url, invitation]) == ExitCode.INPUT_REFUSED
    assert (folder / ".mine").exists()


def test_a_damaged_list_of_data_is_repaired(agent: Agent, tmp_path: Path, home: Home) -> None:
    home.data.write_text(f'{{"paths": ["{tmp_path}", 3]}}')
    assert "permille-agent data repair" in agent("data", "list").errors
    assert agent("data", "repair", "--json").document == {"data": [str(tmp_path)]}
    assert agent("data", "list", "--json").document == {"data": [str(tmp_path)]}


def test_data_is_added_listed_and_removed_by_reference(agent: Agent, tmp_path: Path, home: Home) -> None:
    notes = tmp_path / "notes [1].txt"
    notes.write_text("text of the user")
    for _ in range(2):
        added = agent("data", "add", str(notes), "--json").document
        assert added == {"data": [str(notes)], "text": "1 file: 1 read, 0 skipped", "skipped": []}
    assert str(notes) in agent("data", "list").output
    assert agent("data", "list", "--json").document == {"data": [str(notes)]}
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"\x89PNG\0\0\0\r")
    assert f"{bad}: holds bytes that are no text" in agent("data", "add", str(bad)).output
    assert agent("data", "remove", str(bad)).code == ExitCode.OK
    assert agent("data", "add", str(tmp_path / "none.txt")).code == ExitCode.INPUT_REFUSED
    assert agent("data", "remove", str(tmp_path / "none.txt")).code == ExitCode.INPUT_REFUSED
    assert agent("data", "remove", str(notes), "--json").document == {"data": [], "memories_erased": 0}
    shown = agent("data", "list").output
    assert "next: permille-agent data add" in shown and "last run" not in shown
    (home.runs / "run").mkdir(parents=True)
    (home.runs / "run/run.json").touch()
    assert "permille-agent status, which shows the text of the last run" in agent("data", "list").output
    assert notes.exists()
    assert not any(b"text of the user" in p.read_bytes() for p in home.root.rglob("*") if p.is_file())


def test_a_folder_is_removed_with_all_that_was_added_below_it(agent: Agent, tmp_path: Path) -> None:
    other, *inner = tmp_path / "other", tmp_path / "all/mail", tmp_path / "all/notes"
    for folder in (other, *inner):
        folder.mkdir(parents=True)
        (folder / "text.txt").write_text(f"text of the user in {folder.name}")
    agent("data", "add", str(other), *map(str, inner))
    assert agent("data", "remove", str(tmp_path / "all"), "--json").document["data"] == [str(other)]
    assert agent("data", "list", "--json").document == {"data": [str(other)]}
    assert agent("data", "remove", str(tmp_path / "all")).code == ExitCode.INPUT_REFUSED


def test_rollback_and_reset_move_the_active_model(enrolled: Agent, home: Home, package: Package) -> None:
    enrolled("pull")
    assert enrolled("rollback").code == ExitCode.INPUT_REFUSED
    activate(home, Active(package=package.digest, run="r"), expected=active_model(home))
    personal = {"package": package.digest, "run": "r", "personal": True}
    assert enrolled("reset", "--json").document == personal | {"run": None, "personal": False}
    assert enrolled("rollback", "--json").document == personal


def test_forget_asks_and_tells_its_limits(
    enrolled: Agent, home: Home, service: DeviceService, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home.runs / "trace").write_text("secret")
    enqueue(home, RUN_ID, metrics(), shared_log=b"log")
    enrolled("report")
    for answer in ("n\n", ""):
        monkeypatch.setattr("sys.stdin", io.StringIO(answer))
        declined = enrolled("forget", "--json")
        assert (declined.code, declined.output.strip()) == (ExitCode.INTERRUPTED, "")
        assert "Nothing was erased." in declined.errors
        assert ("Use --yes" in declined.errors) is (not answer)
        assert (home.runs / "trace").exists()
    service.faults = [AWAY]
    away = enrolled("forget", "--yes", "--json")
    assert (away.code, away.document["uploaded_logs_to_delete"]) == (0, 1)
    report = read_report(home, RUN_ID)
    assert report is not None and report.metrics is None
    service.faults = []
    document = enrolled("forget", "--yes", "--json").document
    assert (document["uploaded_logs_deleted"], document["uploaded_logs_to_delete"]) == (1, 0)
    assert "backups" in document["limits"]
    assert not (home.runs / "trace").exists()
    assert service.deleted_logs == [RUN_ID]


def test_forget_and_unenroll_answer_in_sentences(enrolled: Agent, home: Home) -> None:
    (home.runs / "trace").write_text("secret")
    home.serve_token.write_text("token")  # a server that runs goes on with it
    enqueue(home, RUN_ID, metrics(), shared_log=b"log")
    enrolled("report")
    erased, uploaded, promise = enrolled("forget", "--yes").output.splitlines()
    assert re.fullmatch(r"Erased \d+ files? \([\d.]+ \w+\)\.", erased)
    assert uploaded == "The service deleted 1 of your uploaded logs."
    assert promise.startswith("The files were overwritten once")
    assert home.serve_token.read_text() == "token"
    words = enrolled("unenroll").output
    assert words.startswith("This device is no longer enrolled. You can")


def test_unenroll_tells_the_service_or_not(enrolled: Agent, service: DeviceService) -> None:
    assert enrolled("unenroll", "--json").document == {"unenrolled": True, "service_told": True}
    assert service.devices == {}
    assert enrolled("unenroll").code == ExitCode.OPERATOR
    assert enrolled("unenroll", "--local-only").code == ExitCode.OK


def test_policy_is_shown_with_what_speaks_against_training(agent: Agent, home: Home) -> None:
    home.policy.write_text("hours = []\nminutes_per_day = 7\n")
    document = agent("policy", "--json").document
    assert (document["hours"], document["minutes_per_day"], document["may_train_now"]) == ([], 7, False)
    assert document["minutes_per_run"] is None, "the release or the default decides"
    assert any("allowed hours" in reason for reason in document["reasons_against"])
    home.policy.write_text("minutes = 7\n")
    assert agent("policy").code == ExitCode.INPUT_REFUSED


def test_the_service_file_is_printed_or_written(
    agent: Agent, home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    printed = agent("install-service", "--print")
    assert str(home.root) in printed.output
    written = agent("install-service", "--json").document
    assert Path(written["written"]).is_relative_to(tmp_path)
    assert Path(written["written"]).read_text() == printed.output


def test_consent_can_be_withdrawn_while_a_training_holds_the_lock(
    enrolled: Agent, home: Home, service: DeviceService
) -> None:
    enrolled("share-log", "on")
    enqueue(home, RUN_ID, metrics(), shared_log=b"log")
    with another_process_holds(home):
        withdrawn = enrolled("share-log", "off", "--json")
        assert (withdrawn.code, withdrawn.document["share_log"]) == (ExitCode.OK, False)
    assert enrolled("report").code == ExitCode.OK
    assert service.runs[RUN_ID]["state_digest"] is None
    assert service.logs == {}


def test_the_daemons_log_can_be_one_object_a_line() -> None:
    record = logging.LogRecord("permille.agent", logging.INFO, "daemon.py", 1, 'a "%s"', ("b",), None)
    line = json.loads(JsonLines().format(record))
    assert (line["level"], line["message"]) == ("info", 'a "b"')


def test_one_pass_of_the_daemon_ends_by_itself(enrolled: Agent, package: Package) -> None:
    assert enrolled("run", "--once", "--json").code == ExitCode.OK
    assert enrolled("status", "--json").document["release"]["package"] == package.digest


def test_a_daemon_ends_cleanly_on_sigterm_and_is_the_only_one(enrolled: Agent, home: Home) -> None:
    command = [sys.executable, "-m", "permille_agent", "--home", str(home.root), "run"]
    with Process(command, stderr=subprocess.PIPE, text=True) as daemon:
        # After its first poll, the daemon holds its lock and handles signals.
        while not home.releases.exists() or "installed" not in home.releases.read_text():
            assert daemon.poll() is None
            time.sleep(0.05)
        second = enrolled("run", "--once")
        assert second.code == ExitCode.TRY_LATER
        assert f"process {daemon.pid}" in second.errors
        os.kill(daemon.pid, signal.SIGTERM)
        assert daemon.wait(60) == 0


def commands(group: Any = None, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the words of every command. Groups are resolved."""
    group = group or typer.main.get_command(app)
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*prefix, name))
        else:
            yield (*prefix, name)


def test_every_command_has_help_with_examples_and_json(agent: Agent) -> None:
    known = {command: agent(*command, "--help") for command in commands()}
    assert {command[0] for command in known} >= {*OWN_COMMANDS, *MODEL_COMMANDS}
    for command, shown in known.items():
        assert shown.code == 0, command
        assert len(re.sub(r"\s+", " ", shown.output)) > 100, command
        if command[0] in OWN_COMMANDS:
            assert "--json" in shown.output, command
        if command[0] in MODEL_COMMANDS:
            assert "Examples" in shown.output, command
        if command[0] in ("enroll", "pull", "status", "run", "install-service", "forget", "unenroll"):
            assert f"permille-agent {command[0]}" in shown.output
    assert "5 try later" in re.sub(r"\s+", " ", agent("--help").output)


def test_what_goes_into_a_pipe_is_not_wrapped(
    enrolled: Agent, package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    enrolled("pull")
    for command in ("pull", "status"):
        assert package.digest in enrolled(command).output, command


def test_version(agent: Agent) -> None:
    assert agent("--version").output == f"permille-agent {__version__}\n"


def test_the_start_is_light() -> None:
    """Printing help imports none of the slow libraries."""
    heavy = {"torch", "transformers", "tokenizers", "httpx", "numpy", "pydantic", "cryptography", "jinja2"}
    code = "import sys, permille_agent.cli.main; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert heavy & set(result.stdout.split()) == set()

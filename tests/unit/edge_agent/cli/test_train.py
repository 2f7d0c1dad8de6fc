"""Tests of the commands that train and use the model: arguments, output and exit codes."""

import io
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import permille.engines.factory
from permille.choices import Method
from permille.package.reader import Package
from permille.plain_console import PlainConsole
from permille.schemas.runs import Outcome
from permille.trust.roles import Training
from permille.zo.log import decode_canonical
from permille_agent.cli import main as cli
from permille_agent.cli import train as train_command
from permille_agent.link.report import Delivery, read_reports
from permille_agent.state.home import Home
from permille_agent.state.lock import hold_lock
from permille_agent.state.models import installed_release, record_installed
from permille_agent.training.outcome import RunResult
from tests.bigram_engine import BigramEngine
from tests.packages import CHATML
from tests.unit.edge_agent.runs import TINY_RATE, home_with_package, user_text


@pytest.fixture(autouse=True)
def quick_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the engine factory, so that the command line gets the quick engine of the tests."""

    def open_engine(package: Package, *_name: object, **_choices: object) -> BigramEngine:
        return BigramEngine(package)

    monkeypatch.setattr(permille.engines.factory, "open_engine", open_engine)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return home_with_package(tmp_path / "home")[0]


def _run(home: Home, *arguments: str) -> int:
    """Return the command's exit code.

    The default estimator is the gradient. It gets `TINY_RATE`, because the tiny model needs larger steps.
    """
    gradient = arguments[0] == "train" and not {"--estimator", "--share-log"} & set(arguments)
    scale = ("--rate-scale", str(TINY_RATE)) if gradient else ()
    return cli.main(["--home", str(home.root), *arguments, *scale])


def _json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_train_adopts_reports_and_says_what_it_did(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = str(user_text(tmp_path))
    assert _run(home, "train", text, "--steps", "6", "--json") == 0
    document = _json(capsys)
    assert document["outcome"] == "adopted"
    assert document["plan"]["total_steps"] == 6
    assert document["decision"]["against_base"]["low"] > 0
    (report,) = read_reports(home)
    assert (document["run_id"], document["log_delivery"]) == (report.run_id, "none")
    assert report.metrics is not None
    assert report.metrics.outcome.value == "adopted"
    assert report.metrics.state_digest is None
    assert _run(home, "train", text, "--steps", "6") == 0
    shown = capsys.readouterr().out
    assert "adopted" in shown
    assert "held-out loss" in shown
    assert "trained on before with these options, and its model is in use. Nothing was computed" in shown
    assert _run(home, "status", "--json") == 0
    assert _json(capsys)["last_run"]["paths"] == [text]
    assert _run(home, "status") == 0
    assert re.search(r"its text +.*user\.txt", capsys.readouterr().out)


def test_an_estimator_is_chosen_by_name(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = str(user_text(tmp_path))
    assert _run(home, "train", text, "--steps", "6", "--estimator", "one-sided", "--json") in (0, 7)
    (report,) = read_reports(home)
    assert report.metrics is not None
    assert (report.metrics.estimator.value, report.metrics.queries) == ("one_sided", 16)
    assert _run(home, "train", text, "--steps", "6", "--estimator", "adam") == 3


def test_a_run_does_as_the_release_says_unless_its_owner_says_otherwise(home: Home, tmp_path: Path) -> None:
    release = installed_release(home)
    assert release is not None
    training = Training(method=Method.ZEROTH_ORDER, steps=6)
    record_installed(home, replace(release, training=training))
    text = str(user_text(tmp_path))
    assert cli.main(["--home", str(home.root), "train", text]) in (0, 7)
    assert _run(home, "train", text, "--method", "gradient", "--steps", "5") in (0, 7)
    found = [(report.metrics.method, report.metrics.steps) for report in read_reports(home) if report.metrics]
    assert sorted(found) == [("gradient", 5), ("zeroth-order", 6)]


def test_a_gradient_run_cannot_be_asked_for_a_log(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = str(user_text(tmp_path))
    assert _run(home, "train", text, "--steps", "5", "--method", "gradient", "--share-log") == 3
    assert "Share its state with --share-state" in capsys.readouterr().err


def test_a_run_that_its_engine_refuses_leaves_nothing_to_go_on_with(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = str(user_text(tmp_path))
    monkeypatch.undo()  # use the real factory
    assert _run(home, "train", text, "--steps", "6", "--engine", "executorch") == 3
    assert list(home.runs.iterdir()) == []
    assert _run(home, "status", "--json") == 0
    assert _json(capsys)["last_run"] is None


def test_queries_rows_and_dtype_reach_the_run(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, asked = str(user_text(tmp_path)), list[object]()

    def open_engine(package: Package, *_name: object, **choices: object) -> BigramEngine:
        asked.append(choices["compute_dtype"])
        return BigramEngine(package)

    monkeypatch.setattr(permille.engines.factory, "open_engine", open_engine)
    chosen = (
        "--estimator",
        "spsa",
        "--queries",
        "3",
        "--rows",
        "5",
        "--dtype",
        "bfloat16",
        "--row-tokens",
        "24",
    )
    assert _run(home, "train", text, "--steps", "4", *chosen) in (0, 7)
    (report,) = read_reports(home)
    assert report.metrics is not None
    assert report.metrics.queries == 3
    (definition,) = home.runs.glob("*/run.json")
    options = json.loads(definition.read_text())["definition"]["options"]
    assert (options["batch_rows"], options["row_tokens"]) == (5, 24)
    assert set(asked) == {"bfloat16"}
    assert _run(home, "train", text, "--steps", "4", "--queries", "9999999") == 3
    assert _run(home, "train", text, "--steps", "4", "--row-tokens", "7") == 3


def test_the_log_is_shared_only_where_the_user_says_so(home: Home, tmp_path: Path) -> None:
    text = str(user_text(tmp_path))
    assert _run(home, "train", text, "--steps", "5", "--share-log", "--json") == 0
    assert _run(home, "train", text, "--steps", "6", "--json") in (0, 7)
    digests = [report.metrics and report.metrics.state_digest for report in read_reports(home)]
    assert sorted(digest is None for digest in digests) == [False, True]


def test_the_log_of_a_run_that_has_ended_can_be_shared_later(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("train", str(user_text(tmp_path)), "--steps", "5", "--estimator", "one-sided", "--json")
    assert _run(home, *command) == 0
    (before,) = read_reports(home)
    assert _run(home, "share-log", "on") == 0
    capsys.readouterr()
    assert _run(home, *command) == 0
    assert _json(capsys)["log_delivery"] == "none"  # the consent is for later runs only

    assert _run(home, *command, "--share-log") == 0

    document = _json(capsys)
    (report,) = read_reports(home)
    assert (document["known"], document["run_id"], document["log_delivery"]) == (
        True,
        report.run_id,
        "queued",
    )
    assert report.metrics == before.metrics
    log = decode_canonical(
        (home.reports / f"{report.run_id}.log").read_bytes(), max_bytes=1 << 20, max_steps=5
    )
    assert len(log.coefficients_TQ) == document["decision"]["step"] > 0
    assert _run(home, "share-log", "off") == 0
    assert next(read_reports(home)).log_delivery is Delivery.NONE
    assert not list(home.reports.glob("*.log"))


def test_train_uses_the_data_that_was_added(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(home, "train", "--steps", "5", "--json") == 3
    assert "data add" in capsys.readouterr().err
    assert _run(home, "data", "add", str(user_text(tmp_path))) == 0
    assert _run(home, "train", "--steps", "5", "--json") == 0


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--steps", "5", "--minutes", "1"], 3, "either --steps or --minutes"),
        (["--steps", "0"], 3, "--steps must be 1 to 1,000,000, got 0"),
        (["--minutes", "-1"], 3, "--minutes must be above 0"),
        (["--seed", "-1", "--steps", "5"], 3, "--seed must be 0"),
        (["--from", "middle"], 3, "'middle' is not a start. Choose one of active, round, base"),
    ],
)
def test_train_refuses_what_no_run_can_have(
    home: Home,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    words: str,
) -> None:
    assert _run(home, "train", str(user_text(tmp_path)), *arguments, "--json") == code
    assert words in json.loads(capsys.readouterr().err)["error"]["message"]


def test_too_little_text_has_an_exit_code_of_its_own(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(home, "train", str(user_text(tmp_path, 10)), "--steps", "5") == 3
    assert "at least 700 are needed" in " ".join(capsys.readouterr().out.split())


def test_a_run_that_is_not_better_keeps_what_is_there(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = str(user_text(tmp_path))
    assert _run(home, "train", text, "--steps", "20", "--json") == 0
    capsys.readouterr()
    assert _run(home, "train", text, "--steps", "1", "--from", "base", "--json") == 7
    assert _json(capsys)["outcome"] == "kept_base"


def test_after_a_rollback_the_same_command_brings_the_run_back(home: Home, tmp_path: Path) -> None:
    text = str(user_text(tmp_path))
    assert _run(home, "train", text, "--steps", "6", "--json") == 0
    adopted = home.current.read_text()
    assert _run(home, "reset", "--json") == 0
    assert home.current.read_text() != adopted
    assert _run(home, "rollback", "--json") == 0
    assert _run(home, "rollback", "--json") == 0
    assert _run(home, "train", text, "--steps", "6", "--json") == 0
    assert home.current.read_text() == adopted


def test_train_waits_for_nobody_who_writes(home: Home, tmp_path: Path) -> None:
    text = str(user_text(tmp_path))
    with hold_lock(home, "run"):
        command = [
            sys.executable,
            "-m",
            "permille_agent",
            "--home",
            str(home.root),
            "train",
            text,
            "--steps",
            "5",
        ]
        refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 5
    assert "permille-agent run" in refused.stderr


def test_generate_prints_text_or_json(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--max-tokens", "6", "--temperature", "0"]
    assert _run(home, "generate", "On day 3", *options) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("On day 3")
    assert _run(home, "generate", "On day 3", "--json", *options) == 0
    document = _json(capsys)
    assert shown == f"On day 3{document['text']}\n"
    assert document["model"] == "base"
    assert document["completion_tokens"] == 6


def test_chat_keeps_the_conversation_until_it_is_reset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home, _ = home_with_package(tmp_path / "chatting", chat_template=CHATML)
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\nbad \udcff\nagain\n/reset\nnew\n/exit\nnever\n"))
    assert _run(home, "chat", "--max-tokens", "3", "--system", "Be brief.") == 0
    captured = capsys.readouterr()
    assert "not sent: a character that is not UTF-8" in captured.err
    assert "never" not in captured.out


def test_chat_without_standard_input_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, _ = home_with_package(tmp_path / "chatting", chat_template=CHATML)
    monkeypatch.setattr("sys.stdin", None)
    assert _run(home, "chat") == 0


def test_compare_without_a_personalisation_says_what_to_do(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(home, "compare", "--json") == 3
    assert "permille-agent train" in capsys.readouterr().err


def test_compare_shows_both_models(home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(home, "train", str(user_text(tmp_path)), "--steps", "6", "--json") == 0
    capsys.readouterr()
    assert _run(home, "compare", "--max-tokens", "4") == 0
    shown = capsys.readouterr().out
    assert "loss per token" in shown
    assert "bits per byte" in shown


def test_words_of_a_package_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    """The messages of a chat template can be among the reasons for leaving text out."""
    message = "There is too little text: 3 x [/template] [link=https://example.org]here"
    result = RunResult(run="a", run_id="b", outcome=Outcome.REFUSED_DATA, message=message)
    train_command._render(PlainConsole(width=200), result, Delivery.NONE, False)
    assert message in capsys.readouterr().out

"""Tests of a run's page: complete in one file, safe against the user's text, correct for every outcome."""

import json
import re
from pathlib import Path

import pytest

from permille.errors import InputError, OperatorError
from permille.package.blobs import BlobFolder
from permille.package.reader import Package
from permille.schemas.runs import Outcome
from permille_agent.cli import main as cli
from permille_agent.link.extension import AgentExtension
from permille_agent.local import show
from permille_agent.local.show import show_run
from permille_agent.state.home import Home, write_record
from permille_agent.state.models import installed_release
from permille_agent.training.decision import DecisionCount
from tests.bigram_engine import bigram_engine
from tests.packages import CHATML, sentences
from tests.unit.edge_agent.runs import home_with_package, train_quickly
from tests.unit.edge_agent.training.test_general import measured_by

SCRIPT = "<script>alert(1)"


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return home_with_package(tmp_path / "home")[0]


def _text(folder: Path, count: int = 320) -> Path:
    """Create a folder of user files. Their text and names look like script code."""
    folder.mkdir()
    (folder / "user.txt").write_text("\n\n".join(f"{SCRIPT} {text}" for text in sentences(count, seed=3)))
    (folder / f"{SCRIPT}.txt").write_bytes(b"\x89PNG\0\0\0")
    return folder


def _page(home: Home, run: str | None = None) -> str:
    path = show_run(home, run, bigram_engine)
    assert path.stat().st_mode & 0o777 == 0o600
    page = path.read_text()
    assert "<script" not in page
    assert not re.search(r"https?:|src=|href=|url\(|@import|<link|<iframe", page)
    return page


def test_an_adopted_run_shows_gain_curve_and_samples(home: Home, tmp_path: Path) -> None:
    result = train_quickly(home, [_text(tmp_path / "notes")])

    page = _page(home)

    assert "Adopted your new model" in page
    assert "It is in use now." in page
    assert re.search(r"<strong>\d+ % more chance</strong>", page)
    assert '<polyline class="curve" points="60.0,' in page
    assert "<strong>&lt;script&gt;alert(1) On day" in page
    assert "this package carries no general text" in page
    assert page.index("What the model still knows") < page.index("more chance")
    assert "1 read, 1 skipped: 1 x holds bytes that are no text" in page
    assert "&lt;script&gt;alert(1).txt: holds bytes that are no text" in page
    assert "<td>nothing</td>" in page
    samples = home.runs / result.run / "samples.json"
    before = samples.read_bytes()
    assert _page(home, result.run[:6]) == page
    assert samples.read_bytes() == before


def test_general_loss_stands_above_the_gain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, _ = home_with_package(tmp_path / "chatting", chat_template=CHATML)
    release = installed_release(home)
    assert release is not None
    measured_by(monkeypatch, Package.open(BlobFolder(home.blobs), release.manifest_digest).values())
    result = train_quickly(home, [_text(tmp_path / "notes")], keep_general=100)
    assert result.decision is not None and result.decision.general is not None
    page = _page(home)
    told = f"{result.decision.general.rise:+.4f} nats per token"
    assert page.index("loss of the base model is\n2.0000") < page.index(told) < page.index("more chance")
    assert result.outcome is Outcome.KEPT_BASE
    assert "The state alone may keep all of what was trained." in page
    assert "No answers were compared" in page


def test_a_run_that_kept_the_base_says_so(home: Home, tmp_path: Path) -> None:
    # After so many decisions, no gain is certain enough.
    write_record(home.decisions, DecisionCount(decisions=10**9))
    train_quickly(home, [_text(tmp_path / "notes")])

    page = _page(home)

    assert "Kept the base model" in page
    assert "not surely better than the base" in page
    assert "It is in use now." not in page


def test_refused_text_has_a_page_too_and_the_command_says_where(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(OperatorError, match="No run has ended yet"):
        show_run(home, None, bigram_engine)
    with pytest.raises(InputError, match="No run has a name that begins with"):
        show_run(home, "x", bigram_engine)
    result = train_quickly(home, [_text(tmp_path / "notes", 10)])
    assert cli.main(["--home", str(home.root), "show", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"page": str(home.runs / result.run / "show.html")}

    page = _page(home)

    assert "Refused the text" in page
    assert "no state of this run was judged" in page
    assert "<svg" not in page


def test_without_the_text_there_are_samples_after_another_word(home: Home, tmp_path: Path) -> None:
    folder = _text(tmp_path / "notes")
    train_quickly(home, [folder])
    for file in folder.iterdir():
        file.unlink()

    page = _page(home)

    assert "<strong>The</strong>" in page


def test_what_extensions_have_sent_is_told_beside_what_else_left(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sending = AgentExtension(
        name="federations", title="", status=lambda _home: None, sent=lambda _home: "3 integers"
    )
    silent = AgentExtension(name="others", title="", status=lambda _home: None)
    monkeypatch.setattr(show, "agent_extensions", lambda: (sending, silent))
    train_quickly(home, [_text(tmp_path / "notes")])
    page = _page(home)
    assert "<tr><th>to federations</th><td>3 integers</td></tr>" in page
    assert "to others" not in page

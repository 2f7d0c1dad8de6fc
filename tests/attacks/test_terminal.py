"""Packages, file names and device names that contain escape sequences for the user's terminal."""

import io
import json
import logging
import string
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from permille.plain_console import PlainConsole
from permille.plain_text import log_to_stderr, printable
from permille.schemas.devices import DeviceName
from permille_agent.cli.main import main as agent
from permille_agent.link.install import SENTENCE, install
from permille_agent.state.home import open_home
from permille_agent.state.models import InstalledRelease
from permille_service.cli.output import Output, make_output, print_json
from tests.packages import tiny_package, tiny_tokenizer

CLIPBOARD = "\x1b]52;c;cm0gLXJmIC8=\x07"
HOSTILE = ("\x1b", "\x07", "\x9b", "\u202e", "\u2066", "\U000e0041", "\udc1b", "\u2028")
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def home_with_hostile_package(root: Path) -> Path:
    """Install a package whose tokenizer decodes letters to an escape sequence that writes the clipboard.

    The letters of the trial's sentence are spared, so that the package passes its trial.
    """
    document = json.loads(tiny_tokenizer().to_str())
    unused = "".join(letter for letter in string.ascii_letters + string.digits if letter not in SENTENCE)
    rules = [
        {"type": "Replace", "pattern": {"Regex": f"[{unused}]"}, "content": f"e{CLIPBOARD}\u202e"},
        {"type": "Replace", "pattern": {"String": "%"}, "content": "\x9b2J"},
    ]
    document["decoder"] = {"type": "Sequence", "decoders": [document["decoder"], *rules]}
    home = open_home(root)
    files = {"tokenizer.json": json.dumps(document).encode()}
    package = tiny_package(home.blobs, files=files, chat_template=TEMPLATE)
    release = InstalledRelease(name="tiny", version=1, manifest_digest=package.digest)
    install(home, release, size_bytes=package.size_bytes)
    return root


def assert_nothing_is_obeyed(text: str) -> None:
    assert not [letter for letter in HOSTILE if letter in text], ascii(text)


@pytest.mark.attack(15, "a package's tokenizer writes the clipboard of who generates or chats")
def test_generated_text_moves_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = ["--home", str(home_with_hostile_package(tmp_path))]
    short = ["--max-tokens", "40", "--temperature", "2", "--engine", "light"]
    assert agent([*home, "generate", "Once upon", *short]) == 0
    generated = capsys.readouterr().out
    said = iter(["hello", "/exit"])
    monkeypatch.setattr("builtins.input", lambda _prompt: next(said))
    assert agent([*home, "chat", *short]) == 0
    chatted = capsys.readouterr().out
    for printed in (generated, chatted):
        assert "]52;c;" in printed, "the package does not attack"
        assert_nothing_is_obeyed(printed)
    assert agent([*home, "generate", "Once upon", *short, "--json"]) == 0
    document = capsys.readouterr().out
    assert_nothing_is_obeyed(document)
    assert CLIPBOARD in json.loads(document)["text"], "programs are given what was generated"


@pytest.mark.attack(15, "a note's file name has escapes, or bytes that are no text")
@pytest.mark.parametrize("name", [f"note{CLIPBOARD}\u202e\x9b.txt", "note\udc9b\udcff.txt"])
def test_a_file_name_moves_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    note, home = tmp_path / name, ["--home", str(tmp_path / "home")]
    (tmp_path / "home").mkdir()
    note.write_text("A text of some words. " * 40)
    commands = (["data", "add", str(note)], ["data", "list"], ["status"], ["compare", "--data", str(note)])
    for command in commands:
        agent([*home, *command])
        printed = capsys.readouterr()
        assert_nothing_is_obeyed(printed.out + printed.err)


@pytest.mark.attack(15, "a device's or worker's words turn the operator's line around")
def test_the_operators_command_line_prints_nothing_that_moves_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [{"id": "one", "name": f"kitchen{CLIPBOARD}\u202egnp.exe"}]
    printed = io.StringIO()
    console = PlainConsole(file=printed, width=200)
    output = Output(as_json=False, console=console, errors=console)
    output.show(rows, ["id", "name"])
    output.show({"job": {"error": rows[0]["name"]}, "rows": rows})
    output.say(rows[0]["name"])
    assert "kitchen" in printed.getvalue()
    assert_nothing_is_obeyed(printed.getvalue())
    print_json(rows)
    document = capsys.readouterr().out
    assert_nothing_is_obeyed(document)
    assert json.loads(document) == rows
    assert isinstance(make_output(as_json=False).errors, PlainConsole)


@pytest.mark.attack(15, "a log line of a command has escapes")
def test_the_log_of_a_command_moves_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    log_to_stderr(logging.WARNING, "%(message)s")
    logging.getLogger("permille.test").warning("note %s", CLIPBOARD)
    printed = capsys.readouterr().err
    assert "]52;c;" in printed
    assert_nothing_is_obeyed(printed)


@pytest.mark.attack(15, "a device names itself with characters that hide or turn what stands there")
@pytest.mark.parametrize(
    "letter", ["\u202e", "\u200b", "\u00ad", "\ufeff", "\u2066", "\U000e0041", "\x1b", "\x9b"]
)
def test_names_have_no_format_characters(letter: str) -> None:
    adapter: TypeAdapter[str] = TypeAdapter(DeviceName)
    assert adapter.validate_python("Küche 温室 🌱") == "Küche 温室 🌱"
    with pytest.raises(ValidationError):
        adapter.validate_python(f"kitchen{letter}laptop")


def test_what_people_write_is_printed_as_it_is() -> None:
    text = "Grüße\n\t温室 می‌خواهم 👩‍🌾 naïve"
    assert printable(text) == text

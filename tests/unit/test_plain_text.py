"""Tests of printing to terminals whose charset lacks letters."""

from io import BytesIO, TextIOWrapper

import pytest

from permille.plain_console import PlainConsole
from permille.plain_text import echo


def test_a_letter_that_the_terminal_lacks_is_a_question_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    written = BytesIO()
    monkeypatch.setattr("sys.stdout", TextIOWrapper(written, encoding="latin-1", write_through=True))
    echo("größer 🐈")
    monkeypatch.setattr("sys.stdout", TextIOWrapper(written, encoding="latin-1", write_through=True))
    PlainConsole(width=80).print("schön 🐈")
    assert written.getvalue().decode("latin-1").split("\n") == ["größer ?", "schön ?", ""]

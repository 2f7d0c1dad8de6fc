"""Tests of the selection of text that a round may train with."""

from pathlib import Path

import pytest

from permille.package.reader import Package
from permille_agent.text.preparation import prepare
from permille_agent.text.reading import read_documents
from permille_agent.text.tokens import package_tokenizer
from permille_rounds.agent.part import training_rows
from tests.packages import sentences


@pytest.mark.parametrize("lines", [150, 900])
def test_no_round_trains_on_text_that_judges_or_selects(tmp_path: Path, package: Package, lines: int) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("\n\n".join(sentences(lines, seed=4)))
    documents, _ = read_documents([path])
    tokenizer = package_tokenizer(package)
    for row_tokens in (16, 32, 128):  # a federation's rows can be longer or shorter than those of a run
        prepared = prepare(documents, tokenizer, row_tokens=row_tokens)
        assert bool(prepared.stages) == (lines == 150)
        trained = "".join(tokenizer.decode(row.ids_T.tolist()) for row in training_rows(prepared))
        own = prepare(documents, tokenizer, row_tokens=128)
        held_out = [tokenizer.decode(row.ids_T.tolist()) for row in (*own.test, *own.select)]
        said = [piece for text in held_out for piece in text.split("\n") if piece.startswith("On day")]
        whole = [piece for piece in said if piece.endswith(".")]
        assert len(whole) > 20
        assert [piece for piece in whole if piece in trained] == []
        assert "On day" in trained
    tokenizer.close()

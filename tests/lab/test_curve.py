"""The curve: the newest tokens of a text, the chosen model, and a page with missing cells."""

from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from permille_agent.embed import TokenizedDocument
from permille_lab.measuring.cells import Cells, Result
from permille_lab.real.curve import Text, sizes_of
from permille_lab.real.curve_page import PEOPLE, Point, picture, tables


def document(first: int, last: int) -> TokenizedDocument:
    ids_T = np.arange(first, last)
    target_T = np.ones(len(ids_T), np.bool_)
    target_T[0] = False
    return TokenizedDocument(ids_T, target_T, np.ones_like(ids_T))


def text_of(*lengths: int) -> Text:
    ends = np.cumsum(lengths).tolist()
    own = [document(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    return Text(name="nobody", own=own, judged=[document(0, 10)])


def test_the_newest_tokens_end_the_text_and_the_first_document_is_cut() -> None:
    found = text_of(10, 20, 30).newest(45)
    assert np.concatenate([one.ids_T for one in found]).tolist() == list(range(15, 60))
    assert [one.target_T[0] for one in found] == [False, False]
    assert [len(one.ids_T) for one in text_of(10, 20).newest(20)] == [20]
    # One token alone has no target, so it is left out.
    assert [len(one.ids_T) for one in text_of(10, 20).newest(21)] == [20]


@pytest.mark.parametrize(
    ("tokens", "sizes"),
    [
        (30_000, [500, 1000, 3000]),
        (2500, [500, 1000, 2500]),
        (1200, [500, 1200]),
        (1050, [500, 1000]),
        (720, [720]),
    ],
)
def test_a_short_text_is_also_used_whole(tokens: int, sizes: list[int]) -> None:
    assert sizes_of(text_of(tokens), [3000, 500, 1000]) == sizes


def result(nats: float, **more: object) -> Result:
    return {"nats": nats, "general": 3.9, **more}


def test_the_chosen_model_follows_the_rule_of_the_agent() -> None:
    short = {"state": result(4.0), "memory": result(3.0), "both": result(3.5)}
    assert Point("a", 699, short).chosen == "memory"
    assert Point("a", 700, short).chosen == "both"
    assert Point("a", 700, short | {"both": result(3.5, fault="lose the answer")}).chosen == "memory"
    names = {"state": 3.1, "memory": 3.3, "both": 3.2}
    long = {name: result(4.0, select=loss) for name, loss in names.items()}
    assert Point("a", 10_000, long).chosen == "state"


def test_the_page_names_what_is_missing_and_the_picture_draws_the_rest(tmp_path: Path) -> None:
    cells = Cells(tmp_path / "curve.jsonl")
    cells.keep("base", {"text": "pepys"}, result(4.6))
    cells.keep("prompt", {"text": "pepys", "tokens": 1000}, result(4.1))
    given = {"text": "pepys", "tokens": 1000}
    cells.keep("memory", given | {"positions": 512}, result(4.2, bytes=6_269_136))
    cells.keep("memory", given | {"positions": 1024}, result(4.15, bytes=12_538_065))
    trained = result(4.25, strength=7, steps=20, train_s=99.0)
    cells.keep("state", given | {"seed": 0}, trained)
    beside = given | {"seed": 0, "positions": 1024}
    cells.keep("both", beside, result(4.0, strength=4))
    cells.keep("strength", beside | {"strength": 7}, result(4.03, strength=7))
    cells.keep("base", {"text": "618"}, result(5.8))
    cells.keep("memory", {"text": "GLOUCESTER", "tokens": 8588, "positions": 1024}, result(4.4))
    cells.keep("memory", {"text": "618", "tokens": 1200, "positions": 1024}, result(4.0))

    found = tables(tmp_path)

    lines = {line.split("|")[2].strip(): line for line in found["curve"].splitlines() if "pepys" in line}
    assert [cell.strip() for cell in lines["1,000"].split("|")[3:-1]] == [
        *("4.600", "4.100", "4.100", "4.250", "4.150", "4.000"),
    ]
    assert "3,000" not in lines
    assert ": pepys with 3,000, 10,000, 30,000 tokens; muir with 1,000, 3,000, " in found["missing"]
    assert "; GLOUCESTER with 1,000, 3,000, 8,588 tokens; " in found["missing"]
    assert found["missing"].endswith(f"; the whole text of {', '.join(PEOPLE)}.")
    assert "+0.000" in found["general"]
    rows = [line.split("|")[3:-1] for line in found["positions"].splitlines()[2:]]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["512", "6.3 MB", "4.200", "–"],
        ["1,024", "12.5 MB", "4.150", "4.000"],
    ]
    (row,) = (line.split("|")[1:-1] for line in found["strengths"].splitlines()[2:])
    assert [cell.strip() for cell in row] == ["pepys", "1,000", "7/8", "4.030", "4/8", "4.000", "+0.000"]
    assert "618" in found["people"]

    drawn = ElementTree.fromstring(picture(tmp_path))
    names = [line.get("class") for line in drawn.iter("{http://www.w3.org/2000/svg}polyline")]
    assert names == ["base", "prompt", "state", "memory", "both", "memory"]


def test_a_page_without_cells_is_empty(tmp_path: Path) -> None:
    assert "pepys with 1,000, 3,000, 10,000, 30,000 tokens" in tables(tmp_path)["missing"]
    ElementTree.fromstring(picture(tmp_path))

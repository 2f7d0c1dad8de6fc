"""examples/one_page.py, run on the example model, and the part of it that the README shows."""

import re
import textwrap
from pathlib import Path

import pytest

from examples import one_page

ROOT = Path(__file__).parents[2]
RESULT = re.compile(r"loss on unseen text: ([\d.]+) -> ([\d.]+)")


def test_the_page_trains_and_its_replay_gives_the_same_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained, replayed = one_page.one_page(one_page.EXAMPLES / "model", tmp_path)
    assert trained == replayed
    printed = capsys.readouterr().out
    result = RESULT.search(printed)
    assert result is not None
    assert re.search(r"a log of [1-9]\d{2} bytes", printed)
    assert float(result[2]) < float(result[1]) - 0.01


def test_the_readme_shows_the_steps_of_the_page() -> None:
    page = Path(one_page.__file__).read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (shown,) = [block for block in blocks if "directions_of" in block]
    assert textwrap.indent(shown, "    ") in page

"""examples/personalise.ipynb, run twice in one folder with the example model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples/personalise.ipynb"


def _code() -> str:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


@pytest.mark.slow
def test_the_notebook_runs_twice(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    runs = [
        subprocess.run(
            [sys.executable, "-c", _code()], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        for _ in range(2)
    ]
    assert [run.returncode for run in runs] == [0, 0], runs[-1].stderr
    first, second = (run.stdout for run in runs)
    assert second == first, "the second run goes on where the first ended"
    assert "adopted:" in first or "kept_base:" in first

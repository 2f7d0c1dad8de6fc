"""The session of docs/tutorial/library.md and steps-in-python.md, run unchanged in a process.

The code blocks of both pages are joined and run in a folder with the repository's examples. `CHECKS` then
tests the variables that the session defined.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / "tutorial" / name for name in ("library.md", "steps-in-python.md")]
FENCE = re.compile(r"^```(?P<mark>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)

CHECKS = """
assert loss_personal < loss_base, (loss_personal, loss_base)
assert np.any(s_K), "expected the steps to move the state"
assert np.array_equal(replayed_K, s_K)
assert log.steps == STEPS
assert len(log_bytes) < 2048
again = BlobFolder(WORK / "again")
assert package.digest == pack_model(again, checkpoint, chosen)
exported = dict(plain.named_parameters())
start = 0
for info in package.manifest.tensors:
    merged = exported[info.name].detach().numpy().reshape(-1)[package.mask(info.name)]
    assert np.array_equal(merged, personal_K[start : start + info.count]), info.name
    start += info.count
assert start == package.k
import torch
ids_BT = torch.from_numpy(held_out.input_ids_BT)
theirs = plain(ids_BT, labels=ids_BT).loss.item()
assert abs(theirs - loss_personal) < 1e-4, (theirs, loss_personal)
print("all checks passed")
"""


def session(page: Path) -> str:
    """Return all blocks of a page, joined. All of them must be Python."""
    blocks = list(FENCE.finditer(page.read_text(encoding="utf-8")))
    assert {match["mark"] for match in blocks} == {"python"}
    return "\n".join(match["text"] for match in blocks)


@pytest.mark.slow
def test_the_session_of_the_library_guide(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    script = tmp_path / "session.py"
    script.write_text("\n".join(map(session, PAGES)) + CHECKS, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-P", script.name], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("all checks passed\n")
    assert "carry" in done.stdout

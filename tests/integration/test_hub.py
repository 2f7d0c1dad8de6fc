"""Downloads from a hub, as a process of its own makes them: against a local server of the hub's routes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from permille.models.checkpoint import Checkpoint
from tests.hub_site import COMMIT, GATED, REPOSITORY, HubSite, hub_site

MODEL = Path(__file__).parents[2] / "examples" / "model"
# Copies of the weights for other programs, pickles and code: nothing that is fetched.
OTHERS = {
    "consolidated.safetensors": b"x" * 100,
    "original/consolidated.00.pth": b"x" * 100,
    "onnx/model.safetensors": b"x" * 100,
    "pytorch_model.bin": b"x" * 100,
    "modeling_own.py": b"raise SystemExit('code of the repository ran')",
}
_CODE = """
import sys
from pathlib import Path
from permille.errors import PermilleError
from permille.models.sources import download_model
try:
    print(download_model(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
except PermilleError as exc:
    print(f"{type(exc).__name__}: {exc}")
"""


@pytest.fixture
def site() -> Iterator[HubSite]:
    with hub_site(MODEL, OTHERS) as site:
        yield site


def start(site: HubSite, root: Path, repository: str, commit: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": site.url, "HF_HOME": str(root / "home"), "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-c", _CODE, repository, commit, str(root)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def download(site: HubSite, root: Path, repository: str = REPOSITORY, commit: str = COMMIT) -> str:
    printed, errors = start(site, root, repository, commit).communicate(timeout=120)
    assert printed, errors
    return printed.strip()


def test_a_download_is_the_published_model_and_nothing_beside_it(site: HubSite, tmp_path: Path) -> None:
    folder = Path(download(site, tmp_path))
    assert {path.name for path in folder.iterdir() if path.is_file()} - {".complete"} == {
        *("config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json"),
    }
    assert not [file for file in site.asked if file in OTHERS]
    assert Checkpoint(folder).digest() == Checkpoint(MODEL).digest()
    asked = len(site.asked)
    assert download(site, tmp_path) == str(folder)
    assert len(site.asked) == asked, "it is there already"


def test_a_killed_download_goes_on(site: HubSite, tmp_path: Path) -> None:
    site.stall_after = 1 << 20
    process = start(site, tmp_path, REPOSITORY, COMMIT)
    assert site.stalled.wait(60)
    process.kill()
    process.communicate()
    site.stall_after = None
    site.go_on.set()
    assert Checkpoint(Path(download(site, tmp_path))).digest() == Checkpoint(MODEL).digest()


@pytest.mark.parametrize(
    ("repository", "commit", "words"),
    [
        (GATED, COMMIT, ("InputError", "is gated", "accept its licence", "HF_TOKEN")),
        ("owner/none", COMMIT, ("InputError", "knows no repository owner/none", "HF_TOKEN")),
        (REPOSITORY, "f" * 40, ("InputError", f"{REPOSITORY} has no commit {'f' * 40}")),
    ],
)
def test_a_refusal_says_what_to_do(
    site: HubSite, tmp_path: Path, repository: str, commit: str, words: tuple[str, ...]
) -> None:
    said = download(site, tmp_path, repository, commit)
    assert all(word in said for word in words), said

"""Downloads from a hub by a process, against a local server with the hub's routes."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from permille.models.checkpoint import Checkpoint
from tests.hub_site import CIRCLE, COMMIT, GATED, PORTAL, REPOSITORY, HubSite, hub_site

MODEL = Path(__file__).parents[2] / "examples" / "model"
# Copies of the weights for other programs, pickles and code. They must not be downloaded.
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
    folder = Path(download(site, tmp_path))
    assert Checkpoint(folder).digest() == Checkpoint(MODEL).digest()
    assert not list(folder.rglob("*.incomplete")), "what the killed one left is no use to anybody"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("repository", "commit", "words"),
    [
        (GATED, COMMIT, ("InputError", "is gated", "accept its licence", "HF_TOKEN")),
        ("owner/none", COMMIT, ("InputError", "knows no repository owner/none", "HF_TOKEN")),
        (REPOSITORY, "f" * 40, ("InputError", f"{REPOSITORY} has no commit {'f' * 40}")),
        ("owner/forbidden", COMMIT, ("InputError", "refuses owner/forbidden", "403", "HF_TOKEN")),
        ("owner/broken", COMMIT, ("RetryableError", "answered 500", "owner/broken")),
        (PORTAL, COMMIT, ("RetryableError", "answer for owner/portal cannot be read", "HF_ENDPOINT")),
        (CIRCLE, COMMIT, ("RetryableError", "Cannot reach the hub for owner/circle", "redirects")),
    ],
)
def test_a_refusal_says_what_to_do(
    site: HubSite, tmp_path: Path, repository: str, commit: str, words: tuple[str, ...]
) -> None:
    said = download(site, tmp_path, repository, commit)
    assert all(word in said for word in words), said
    assert not list(tmp_path.glob("hub/*/*/.complete"))


def test_a_file_that_is_cut_off_without_a_word_is_tried_again(site: HubSite, tmp_path: Path) -> None:
    site.sent = {"model.safetensors": b"<html>"}
    said = download(site, tmp_path)
    assert said.startswith(f"RetryableError: Cannot reach the hub for {REPOSITORY}"), said
    assert "has size 6" in said
    assert not list(tmp_path.glob("hub/*/*/.complete"))


@pytest.mark.slow
def test_a_hub_out_of_reach_is_no_model_without_files(site: HubSite, tmp_path: Path) -> None:
    folder = tmp_path / "hub" / REPOSITORY.replace("/", "--") / COMMIT
    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes(site.files["config.json"])
    with socket.create_server(("127.0.0.1", 0)) as taken:  # no hub answers on this port once it is closed
        away = HubSite(url=f"http://127.0.0.1:{taken.getsockname()[1]}", files={})
    said = download(away, tmp_path)
    assert said.startswith(f"RetryableError: Cannot reach the hub for {REPOSITORY}"), said
    assert not (folder / ".complete").exists()


def test_a_download_that_does_not_fit_the_disk_asks_for_no_byte(site: HubSite, tmp_path: Path) -> None:
    site.claimed = {"model.safetensors": 1 << 60}
    said = download(site, tmp_path)
    assert said.startswith(f"OperatorError: Not enough disk space for {REPOSITORY}: 1,152,921,5"), said
    needed, free = re.findall(r"([\d,]+) MB", said)
    assert int(free.replace(",", "")) < int(needed.replace(",", ""))
    assert "Free some space" in said
    assert not site.asked
    site.claimed = {}
    assert Checkpoint(Path(download(site, tmp_path))).digest() == Checkpoint(MODEL).digest()


def test_a_repository_of_gguf_files_is_refused_before_its_config_is_fetched(
    site: HubSite, tmp_path: Path
) -> None:
    site.files = {"config.json": site.files["config.json"], "model-Q4_K_M.gguf": b"GGUF"}
    said = download(site, tmp_path)
    assert said.startswith("InputError: owner/name holds no weights"), said
    assert "--gguf" in said
    assert not site.asked


def test_pickles_are_fetched_where_no_safetensors_are(site: HubSite, tmp_path: Path) -> None:
    site.files = {name: data for name, data in site.files.items() if name != "model.safetensors"}
    folder = Path(download(site, tmp_path))
    assert (folder / "pytorch_model.bin").read_bytes() == OTHERS["pytorch_model.bin"]
    assert not (folder / "modeling_own.py").exists()

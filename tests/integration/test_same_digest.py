"""A model from a hub repository, a folder and a GGUF file becomes the same package.

The GGUF file is converted once. The local hub serves the resulting folder, so that all three have the same
weights. Each package is made by its own process in its own folders.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from permille.models.gguf.folder import convert
from tests.hub_site import COMMIT, REPOSITORY, hub_site
from tests.real_model import smollm2_file
from tests.unit.models.gguf_files import coded_file

_CODE = """
import sys
from pathlib import Path
import permille
from permille.choices import MaskMethod
from permille.models.checkpoint import Checkpoint
from permille.models.gguf.codes import KeptModel
from permille.package.blobs import BlobFolder
from permille.package.build import ChosenMask, pack_model
from permille.sensitivity.masks import select_mask

source, commit, work, keeps = sys.argv[1], sys.argv[2] or None, Path(sys.argv[3]), sys.argv[4] == "kept"
model = permille.load_model(source, commit=commit, cache=work / "cache")
checkpoint = Checkpoint(model.folder)
method = MaskMethod.MAGNITUDE
mask = ChosenMask(indices=select_mask(checkpoint.weights(), method, 0.001), method=method, density=0.001)
blobs = BlobFolder(work / "packages")
blobs.root.mkdir()
print(pack_model(blobs, KeptModel(checkpoint, Path(source)) if keeps else checkpoint, mask))
"""


def package_digest(work: Path, source: str, *, commit: str = "", kept: bool = False, hub: str = "") -> str:
    """Make a package in a new process. `kept` keeps the file's embedding and head, as the service does."""
    work.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": hub, "HF_HOME": str(work / "home"), "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-c", _CODE, source, commit, str(work), "kept" if kept else ""]
    made = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert made.returncode == 0, made.stderr
    return made.stdout.strip()


def check_three_ways(gguf: Path, work: Path) -> None:
    folder = work / "folder"
    folder.mkdir()
    convert(gguf, folder)
    with hub_site(folder, {}) as site:
        by_hub = package_digest(work / "hub", REPOSITORY, commit=COMMIT, hub=site.url)
    assert "model.safetensors" in site.asked
    assert by_hub.startswith("sha256:")
    assert package_digest(work / "by_folder", str(folder)) == by_hub
    assert package_digest(work / "by_gguf", str(gguf)) == by_hub
    assert package_digest(work / "by_kept", str(gguf), kept=True) == by_hub


def test_a_tiny_model_is_one_package_by_hub_folder_and_gguf(tmp_path: Path) -> None:
    check_three_ways(coded_file(tmp_path, ["Q4_0", "Q8_0"]), tmp_path)


@pytest.mark.slow
def test_smollm2_is_one_package_by_hub_folder_and_gguf(tmp_path: Path) -> None:
    check_three_ways(smollm2_file(), tmp_path)

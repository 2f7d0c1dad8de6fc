"""A model from a hub repository, a folder and a GGUF file becomes the same package.

The GGUF file is converted once. The local hub serves the resulting folder, so that all three have the same
weights. Each package is made in its own folders. A process reads the hub's settings when it starts, so the
package of the hub is made by a new one.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import permille
from permille.choices import MaskMethod
from permille.models.checkpoint import Checkpoint
from permille.models.gguf.codes import KeptModel
from permille.models.gguf.folder import convert
from permille.package.blobs import BlobFolder
from permille.package.build import ChosenMask, pack_model
from permille.sensitivity.masks import select_mask
from tests.hub_site import COMMIT, REPOSITORY, hub_site
from tests.real_model import smollm2_file
from tests.unit.models.gguf_files import coded_file


def packed(source: str, commit: str | None, work: Path, *, kept: bool = False) -> str:
    """Make a package. `kept` keeps the file's embedding and head, as the service does."""
    model = permille.load_model(source, commit=commit, cache=work / "cache")
    checkpoint = Checkpoint(model.folder)
    method = MaskMethod.MAGNITUDE
    mask = ChosenMask(indices=select_mask(checkpoint.weights(), method, 0.001), method=method, density=0.001)
    blobs = BlobFolder(work / "packages")
    blobs.root.mkdir(parents=True)
    return pack_model(blobs, KeptModel(checkpoint, Path(source)) if kept else checkpoint, mask)


def packed_by_hub(work: Path, hub: str) -> str:
    """Make a package of the hub's repository in a new process."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": hub, "HF_HOME": str(work / "home"), "HF_HUB_DISABLE_XET": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-m", "tests.integration.test_same_digest", REPOSITORY, COMMIT, str(work)]
    made = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert made.returncode == 0, made.stderr
    return made.stdout.strip()


def check_three_ways(gguf: Path, work: Path) -> None:
    folder = work / "folder"
    folder.mkdir()
    convert(gguf, folder)
    with hub_site(folder, {}) as site:
        by_hub = packed_by_hub(work / "hub", site.url)
    assert "model.safetensors" in site.asked
    assert by_hub.startswith("sha256:")
    assert packed(str(folder), None, work / "by_folder") == by_hub
    assert packed(str(gguf), None, work / "by_gguf") == by_hub
    assert packed(str(gguf), None, work / "by_kept", kept=True) == by_hub


def test_a_tiny_model_is_one_package_by_hub_folder_and_gguf(tmp_path: Path) -> None:
    check_three_ways(coded_file(tmp_path, ["Q4_0", "Q8_0"]), tmp_path)


@pytest.mark.slow
def test_smollm2_is_one_package_by_hub_folder_and_gguf(tmp_path: Path) -> None:
    check_three_ways(smollm2_file(), tmp_path)


if __name__ == "__main__":
    print(packed(sys.argv[1], sys.argv[2], Path(sys.argv[3])))

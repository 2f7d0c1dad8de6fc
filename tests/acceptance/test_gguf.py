"""SmolLM2-135M-Instruct in Q4_1: from GGUF to a folder, to a package that keeps its codes, and back."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from examples.demo import SMOLLM2
from permille.engines.gguf.export import export_gguf
from permille.engines.light.engine import LightEngine
from permille.engines.sampling import TokenSampling
from permille.models.checkpoint import Checkpoint
from permille.models.gguf.codes import KeptModel
from permille.models.gguf.file import GgufFile
from permille.models.gguf.folder import convert
from permille.models.loading import FileChat
from permille.package.blobs import BlobFolder
from permille.package.build import ChosenMask, pack_model
from permille.package.reader import verify_package
from permille.quantization.types import Scheme

UP = "model.layers.0.mlp.up_proj.weight"
MOST_BYTES = 100_000_000


@pytest.mark.slow
@pytest.mark.skipif(
    not SMOLLM2.is_file(), reason=f"no {SMOLLM2.name}: `make smollm2` fetches it where an index is reached"
)
@pytest.mark.timeout(300)
def test_a_real_file_answers_from_its_own_codes_and_comes_back(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    convert(SMOLLM2, folder)
    model = KeptModel(Checkpoint(folder), SMOLLM2)
    mask = ChosenMask(indices={UP: np.arange(0, 8000, 7, dtype=np.uint32)}, method="random", density=0.001)
    blobs = BlobFolder(tmp_path / "blobs")
    package = verify_package(blobs, pack_model(blobs, model, mask, Scheme.SOURCE, codes=model.codes))
    assert package.size_bytes < MOST_BYTES

    chat = FileChat.find(folder)
    assert chat is not None
    asked = TokenSampling(max_new_tokens=24, stop_ids=chat.stop_ids())
    prompt = chat.prompt("What is the capital of France?")
    answer = list(LightEngine(package).generate(package.values(), prompt, asked))
    assert "Paris" in Tokenizer.from_file(str(folder / "tokenizer.json")).decode(answer)

    export_gguf(package, None, tmp_path / "out")
    ours, theirs = GgufFile(tmp_path / "out" / "model.gguf"), GgufFile(SMOLLM2)
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name in theirs.tensors:
        assert ours.tensors[name].type is theirs.tensors[name].type
        assert np.array_equal(ours.raw(name), theirs.raw(name)), name

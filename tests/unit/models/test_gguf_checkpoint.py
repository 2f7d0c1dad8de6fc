"""Tests of a GGUF file that is read in place: it equals the folder of its conversion."""

from pathlib import Path

import numpy as np
import pytest
import torch

from permille.errors import InputError
from permille.models.checkpoint import Checkpoint
from permille.models.gguf.checkpoint import GgufCheckpoint
from permille.models.layerwise import whole_model
from permille.models.loading import load_model
from permille.pipeline.draw import Drawn
from permille.pipeline.score import Compute, Scoring
from permille.quantization.gguf_blocks import TYPES
from tests.unit.models.gguf_files import coded_file, converted


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "gpt_neox"])
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[GgufCheckpoint, Path]:
    """A file read in place, and the folder of its conversion."""
    folder = tmp_path_factory.mktemp("gguf")
    path = coded_file(folder, TYPES, family=request.param)
    (folder / "texts").mkdir()
    return GgufCheckpoint(path, folder / "texts"), converted(path, folder / "model").folder


def test_contents_and_digest_are_those_of_the_conversion(both: tuple[GgufCheckpoint, Path]) -> None:
    ours, theirs = both[0], Checkpoint(both[1])
    assert (ours.config, ours.family, ours.names, ours.files()) == (
        theirs.config,
        theirs.family,
        theirs.names,
        theirs.files(),
    )
    assert (ours.parameters, ours.size_bytes) == (theirs.parameters, theirs.size_bytes)
    assert all(ours.place(name) == theirs.place(name) for name in ours.names)
    assert all(ours.raw(name).data.tobytes() == theirs.raw(name).data.tobytes() for name in ours.names)
    assert ours.digest() == theirs.digest()
    assert not (ours.folder / "model.safetensors").exists()


def test_a_filled_model_has_the_bits_of_a_loaded_one(both: tuple[GgufCheckpoint, Path]) -> None:
    ours, theirs = whole_model(both[0], torch.float32, "cpu"), load_model(both[1])
    ids_BT = torch.arange(40)[None] % 50
    with torch.no_grad():
        assert torch.equal(ours(input_ids=ids_BT).logits, theirs(input_ids=ids_BT).logits)
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    assert not ours.training


@pytest.mark.parametrize("memory_bytes", [None, 1])
def test_scores_of_a_file_are_those_of_its_conversion(
    both: tuple[GgufCheckpoint, Path], memory_bytes: int | None
) -> None:
    drawn = Drawn(tokens_NT=np.arange(60).reshape(3, 20) % 50, provenance={}, read={})
    compute = Compute(memory_bytes=memory_bytes)
    ours, theirs = (
        Scoring(checkpoint=each, drawn=drawn, compute=compute).scores()
        for each in (both[0], Checkpoint(both[1]))
    )
    assert ours.flat.tobytes() == theirs.flat.tobytes()


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    path = coded_file(tmp_path, ("Q8_0",))
    data = bytearray(path.read_bytes())
    checkpoint = GgufCheckpoint(path, tmp_path)
    name = "model.layers.0.self_attn.q_proj.weight"
    place = checkpoint._model.file.tensors[checkpoint._model.names[name]]
    data[place.begin : place.begin + 2] = b"\xff\x7f"  # a scale that is NaN
    path.write_bytes(data)
    with pytest.raises(InputError, match="not finite"):
        GgufCheckpoint(path, tmp_path).float32(name)
    with pytest.raises(InputError, match="not finite"):
        GgufCheckpoint(path, tmp_path).digest()

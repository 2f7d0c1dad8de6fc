"""Tests of an NF4 package in unmodified transformers with bitsandbytes.

The folder consists of links to blobs.
"""

import json
from pathlib import Path
from typing import Any

import bitsandbytes
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from permille.errors import InputError
from permille.package.blobs import BlobFolder
from permille.package.reader import Package
from permille.quantization import dequantize
from permille.quantization.types import Scheme
from permille_lab.measuring.transformers_folder import link_transformers_folder
from tests.bitsandbytes_decoding import decoded
from tests.unit.package.tiny import LLAMA, write_tiny

OPT: dict[str, Any] = {
    "model_type": "opt",
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "word_embed_proj_dim": 16,
    "do_layer_norm_before": True,
}
NEOX: dict[str, Any] = {
    "model_type": "gpt_neox",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
TIED = LLAMA | {"tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("config", "dtype"),
    [(LLAMA, "F32"), (TIED, "BF16"), (OPT, "BF16"), (NEOX, "F16")],
    ids=["llama", "tied", "opt", "neox"],
)
def test_transformers_opens_it_and_decodes_the_same_weights(
    config: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    tiny = write_tiny(BlobFolder(tmp_path / "blobs"), config=config, dtype=dtype)
    package = Package.open(tiny.blobs, tiny.digest)
    link_transformers_folder(package, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    modules = dict(model.named_modules())
    for tensor in package.manifest.tensors:
        linear = modules[tensor.name.removesuffix(".weight")]
        assert isinstance(linear, bitsandbytes.nn.Linear4bit)
        theirs = decoded(linear)
        assert theirs.dtype == torch.float32
        assert np.array_equal(theirs.numpy(), dequantize(package.quantized(tensor.name)))
    for name in package.plain_names:
        assert np.array_equal(
            model.get_parameter(name).detach().float().numpy(), package.plain(name).float32()
        )
    logits = model(torch.tensor([[1, 2, 3]])).logits
    assert logits.shape == (1, 3, 64) and torch.isfinite(logits).all()


def test_big_files_are_links_and_a_second_time_changes_nothing(tmp_path: Path) -> None:
    tiny = write_tiny(BlobFolder(tmp_path / "blobs"))
    package = Package.open(tiny.blobs, tiny.digest)
    folder = tmp_path / "model"
    for _ in range(2):
        link_transformers_folder(package, folder)
    assert {path.name for path in folder.iterdir()} == {
        *("config.json", "model.safetensors.index.json", "LICENSE"),
        *("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
    }
    for path in folder.glob("*.safetensors"):
        assert path.is_symlink() and path.resolve().is_relative_to(tiny.blobs.root.resolve())
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"]["bnb_4bit_quant_type"] == "nf4"
    assert config["hidden_size"] == LLAMA["hidden_size"]


def test_int4_has_no_such_folder(tmp_path: Path) -> None:
    tiny = write_tiny(BlobFolder(tmp_path / "blobs"), scheme=Scheme.INT4)
    with pytest.raises(InputError, match="expected an nf4 package, got int4"):
        link_transformers_folder(Package.open(tiny.blobs, tiny.digest), tmp_path / "model")

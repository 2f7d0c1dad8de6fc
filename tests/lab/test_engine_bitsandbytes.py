"""Tests of an NF4 package in unmodified transformers with bitsandbytes, against the torch engine."""

from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from permille.choices import Embeddings
from permille.engines.torch_engine import TorchEngine
from permille.package.reader import Package
from permille.quantization.types import Scheme
from permille_lab.measuring.transformers_folder import link_transformers_folder
from tests.bitsandbytes_decoding import decoded
from tests.unit.engines.tiny import CONFIGS, reference_token_losses, tiny_batch, tiny_package, variants


def with_overlay(package: Package, folder: Path, values_K: NDArray[np.float32]) -> Any:
    """Return the linked model with dense layers: bitsandbytes' decoded weights, with the values set."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    start = 0
    for info in package.manifest.tensors:
        path = info.name.removesuffix(".weight")
        layer = model.get_submodule(path)
        assert isinstance(layer, bnb.nn.Linear4bit)
        weight = decoded(layer).float()
        weight.view(-1)[torch.from_numpy(package.mask(info.name).astype(np.int64))] = torch.from_numpy(
            values_K[start : start + info.count]
        )
        start += info.count
        linear = torch.nn.Linear(info.shape[1], info.shape[0], bias=layer.bias is not None)
        linear.weight = torch.nn.Parameter(weight)
        if layer.bias is not None:
            linear.bias = layer.bias
        model.set_submodule(path, linear)
    return model.requires_grad_(False)


@pytest.mark.parametrize("family", CONFIGS)
def test_logits_agree_with_bitsandbytes_within_1e_4(family: str, tmp_path: Path) -> None:
    tiny = tiny_package(tmp_path / "blobs", family, Scheme.NF4, embeddings=Embeddings.SOURCE)
    link_transformers_folder(tiny.package, tmp_path / "linked")
    values_K = variants(tiny.package, 2)[1]
    model = with_overlay(tiny.package, tmp_path / "linked", values_K)
    engine = TorchEngine(tiny.package)
    batch = tiny_batch()
    np.testing.assert_allclose(
        engine.token_losses(values_K, batch), reference_token_losses(model, batch).numpy(), rtol=0, atol=1e-4
    )

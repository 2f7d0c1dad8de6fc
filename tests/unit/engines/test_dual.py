"""Tests of dual forwarding against the reference engine, as a module and as an exported program."""

from pathlib import Path

import numpy as np
import pytest
import torch

from permille.engines.executorch.exporting import DualModel, dual_model, export_program
from permille.engines.executorch.program import ProgramShape
from permille.errors import InputError
from permille.package.reader import Package
from permille.quantization.types import Scheme
from permille.zo.estimators import Batch
from permille_lab.measuring.reference_engine import ReferenceEngine
from tests.unit.engines.tiny import CONFIGS, tiny_package, variants

QUERIES, ROWS, TOKENS = 2, 2, 12


def _ids() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, 96, (ROWS, TOKENS)))


def _batch(ids_BT: torch.Tensor) -> Batch:
    target_BT = np.ones(ids_BT.shape, np.bool_)
    target_BT[:, 0] = False
    return Batch(
        input_ids_BT=ids_BT.numpy(), attention_BT=np.ones(ids_BT.shape, np.bool_), target_BT=target_BT
    )


def _dual_inputs(package: Package) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return every variant on the same sequences, in the order of a two-sided step."""
    values_VK = torch.from_numpy(variants(package, 2 * QUERIES))
    return values_VK, torch.arange(len(values_VK)).repeat_interleave(ROWS), _ids().repeat(2 * QUERIES, 1)


@pytest.mark.parametrize("family", CONFIGS)
def test_all_variants_in_one_pass_have_the_losses_of_the_reference(family: str, tmp_path: Path) -> None:
    package = tiny_package(tmp_path, family).package
    values_VK, variant_R, ids_RT = _dual_inputs(package)
    with torch.no_grad():
        got = dual_model(package)(values_VK, variant_R, ids_RT)
    assert got.shape == (len(variant_R), TOKENS - 1)
    engine, batch = ReferenceEngine(package), _batch(_ids())
    for variant, values_K in enumerate(values_VK.numpy()):
        expected = engine.token_losses(values_K, batch)
        found = got[variant_R == variant].reshape(-1).numpy()
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("family", "scheme"), [("llama", Scheme.INT8), ("gemma3_text", Scheme.NF4)])
def test_the_exported_program_is_the_module(family: str, scheme: Scheme, tmp_path: Path) -> None:
    package = tiny_package(tmp_path, family, scheme).package
    with pytest.raises(InputError, match=f"need an int4 package, and this one is {scheme}"):
        export_program(package, ProgramShape(variants=1, rows=1, tokens=TOKENS), weights="int4")
    module: DualModel = dual_model(package)
    inputs = _dual_inputs(package)
    program = torch.export.export(module, inputs)
    assert "permille.sparse_add.default" in {str(node.target) for node in program.graph.nodes}
    with torch.no_grad():
        np.testing.assert_array_equal(program.module()(*inputs).numpy(), module(*inputs).numpy())

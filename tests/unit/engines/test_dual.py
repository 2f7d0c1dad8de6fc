"""Dual forwarding against the reference engine and the reference estimator, as modules and exported."""

from pathlib import Path

import numpy as np
import pytest
import torch

from permille.engines.dual.lora_fa import LoraFALinear, LoraFAModel, StepInput, lora_fa_model, signs
from permille.engines.dual.sparse import DualModel, dual_model
from permille.engines.executorch.exporting import export_program
from permille.engines.executorch.program import ProgramShape
from permille.engines.torch_engine import TorchEngine
from permille.errors import InputError
from permille.package.reader import Package
from permille.quantization.types import Scheme
from permille.zo.directions import direction
from permille.zo.estimators import Batch
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
    """Every variant on the same sequences, as a two-sided step orders them."""
    values_VK = torch.from_numpy(variants(package, 2 * QUERIES))
    return values_VK, torch.arange(len(values_VK)).repeat_interleave(ROWS), _ids().repeat(2 * QUERIES, 1)


@pytest.mark.parametrize("family", CONFIGS)
def test_all_variants_in_one_pass_have_the_losses_of_the_reference(family: str, tmp_path: Path) -> None:
    package = tiny_package(tmp_path, family).package
    values_VK, variant_R, ids_RT = _dual_inputs(package)
    with torch.no_grad():
        got = dual_model(package)(values_VK, variant_R, ids_RT)
    assert got.shape == (len(variant_R), TOKENS - 1)
    engine, batch = TorchEngine(package), _batch(_ids())
    for variant, values_K in enumerate(values_VK.numpy()):
        expected = engine.token_losses(values_K, batch)
        found = got[variant_R == variant].reshape(-1).numpy()
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("family", "scheme"), [("llama", Scheme.INT8), ("gemma3_text", Scheme.SQUEEZELLM)])
def test_the_exported_program_is_the_module(family: str, scheme: Scheme, tmp_path: Path) -> None:
    package = tiny_package(tmp_path, family, scheme).package
    with pytest.raises(InputError, match=f"expected an int4 package for 4-bit weights, got {scheme}"):
        export_program(package, ProgramShape(variants=1, rows=1, tokens=TOKENS), weights="int4")
    module: DualModel = dual_model(package)
    inputs = _dual_inputs(package)
    program = torch.export.export(module, inputs)
    assert "permille.sparse_add.default" in {str(node.target) for node in program.graph.nodes}
    with torch.no_grad():
        np.testing.assert_array_equal(program.module()(*inputs).numpy(), module(*inputs).numpy())


def test_signs_in_the_graph_are_those_of_the_log() -> None:
    """FORMAT 6.3, with the native kernels or numpy as the judge, at words that use every bit."""
    seed, step, counts = (0xFEDCBA98 << 32) + 0x87654321, 0xFFFFFFFE, (130, 300)
    given = _step(seed=seed, step=step)
    for query, got in enumerate(signs(given, 1, QUERIES, counts[1])):
        expected = direction(seed=seed, step=step, query=query, counts=counts)[counts[0] :]
        np.testing.assert_array_equal(got.numpy(), expected)


@pytest.mark.parametrize("exported", [False, True])
def test_lora_fa_steps_are_those_of_the_reference_estimator(exported: bool, tmp_path: Path) -> None:
    """Five steps inside the graph, against one copy of each B and sequential passes, as MeZO orders them."""
    package = tiny_package(tmp_path, "llama").package
    module, ids_BT = lora_fa_model(package, rank=4, queries=QUERIES), _ids()
    reference = _Reference(lora_fa_model(package, rank=4, queries=QUERIES), rate=2e-2, epsilon=1e-2)
    run = torch.export.export(module, (ids_BT, _step())).module() if exported else module
    grad_Q, first = np.zeros(QUERIES, np.float32), 0.0
    for step in range(5):
        with torch.no_grad():
            got = run(ids_BT, _step(step=step, grad_Q=grad_Q, rate=2e-2, epsilon=1e-2))
        loss_QS = got.mean((2, 3)).numpy()
        expected_QS = reference.losses(ids_BT, step, grad_Q)
        np.testing.assert_allclose(loss_QS, expected_QS, rtol=0, atol=1e-5)
        grad_Q = ((expected_QS[:, 0] - expected_QS[:, 1]) / 2e-2).astype(np.float32)
        first = first or float(loss_QS.mean())
    assert loss_QS.mean() < first  # it learns these tokens


def _step(
    *,
    seed: int = 7,
    step: int = 0,
    grad_Q: np.ndarray[tuple[int], np.dtype[np.float32]] | None = None,
    rate: float = 1e-2,
    epsilon: float = 1e-2,
) -> StepInput:
    grad_Q = np.zeros(QUERIES, np.float32) if grad_Q is None else grad_Q
    return StepInput(
        seed=torch.tensor([seed & 0xFFFFFFFF, seed >> 32]),
        step=torch.tensor([step]),
        projected_grad_Q=torch.from_numpy(grad_Q),
        rate=torch.tensor([rate]),
        epsilon=torch.tensor([epsilon]),
    )


class _Reference:
    """MeZO's order of work: restore, step, perturb, forward; one direction and sign after the other."""

    def __init__(self, module: LoraFAModel, *, rate: float, epsilon: float) -> None:
        self._module, self._rate, self._epsilon = module.model, rate, epsilon
        self._layers = [layer for layer in self._module.modules() if isinstance(layer, LoraFALinear)]
        self._b = [torch.zeros(layer.b_copies.shape[1:]) for layer in self._layers]

    def losses(
        self, ids_BT: torch.Tensor, step: int, grad_Q: np.ndarray[tuple[int], np.dtype[np.float32]]
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        if step:
            for query, grad in enumerate(grad_Q.tolist()):
                for b, z in zip(self._b, self._directions(step - 1, query), strict=True):
                    b -= self._rate / QUERIES * grad * z
        found = np.zeros((QUERIES, 2), np.float32)
        for query in range(QUERIES):
            for column, sign in enumerate((1, -1)):
                for layer, b, z in zip(self._layers, self._b, self._directions(step, query), strict=True):
                    layer.b_copies.data = (b + sign * self._epsilon * z)[None]
                with torch.no_grad():
                    logits = self._module(input_ids=ids_BT, use_cache=False).logits[:, :-1]
                log_prob = torch.log_softmax(logits, -1).gather(2, ids_BT[:, 1:, None])
                found[query, column] = -float(log_prob.mean())
        return found

    def _directions(self, step: int, query: int) -> list[torch.Tensor]:
        counts = [b.numel() for b in self._b]
        z_K = direction(seed=7, step=step, query=query, counts=counts).astype(np.float32)
        parts = np.split(z_K, np.cumsum(counts)[:-1])
        return [torch.from_numpy(part).view(b.shape) for part, b in zip(parts, self._b, strict=True)]

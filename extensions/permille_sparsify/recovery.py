"""Fine-tuning of a pruned model by LoRA at its kept weights, in steps that survive a kill.

    recover_model(Checkpoint(pruned), target, rows_NT, RecoveryPlan(steps=400, rows=8, rate=0.003))

Beside each linear layer, `dW = B A` is trained, with A [r, K] and B [N, r], from dW = 0. The layer
computes with `keep * (W + dW)`, where `keep` is 1 where W is not 0, and 0 elsewhere. The target folder gets
this product as the layer's weight, so a pruned weight stays 0.

Adam minimises the mean next-token loss of public text, with a rate that falls to 0 over the steps. The rows
of a step depend only on the seed and the number of the step. After a kill, a call with the same arguments and
checkpoint continues. On the same machine, with the same number of threads, it ends with the same bits.

Shapes: in NK, N = outputs and K = inputs of a linear; in NT, N = rows and T = tokens; B = rows of a step,
r = rank, V = vocabulary.
"""

import io
import math
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, parametrize, vector_to_parameters

from permille.corpora.sequences import row_order
from permille.errors import InputError
from permille.files import write_atomic
from permille.models.checkpoint import Checkpoint
from permille.models.families import scoped_tensors
from permille.models.loading import load_model
from permille.sensitivity.backward import check_sequences, differentiable
from permille_sparsify.plan import RecoveryPlan
from permille_sparsify.streaming import copy_model, write_weight

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STEPS_A_CHECKPOINT = 20
TOKENS_A_PASS = 1024
"""Rows go through the model together up to this number of tokens, which bounds the memory of the logits."""

Progress = Callable[[int, int], None]


class LoraAdapter(nn.Module):
    """A change of a weight with rank r."""

    def __init__(self, shape: tuple[int, int], rank: int, generator: torch.Generator) -> None:
        super().__init__()
        rows, columns = shape
        # B starts at 0, and so does the change. A must not start at 0, or B would get no gradient.
        self.a = nn.Parameter(torch.randn(rank, columns, generator=generator) / math.sqrt(columns))
        self.b = nn.Parameter(torch.zeros(rows, rank))

    def forward(self) -> Tensor:
        """Return the change [N, K]."""
        return self.b @ self.a


class _Masked(nn.Module):
    """The adapter of a weight, as a parametrization of torch. Zeros stay 0."""

    def __init__(self, adapter: nn.Module) -> None:
        super().__init__()
        self.adapter = adapter

    def forward(self, w_NK: Tensor) -> Tensor:
        return torch.where(w_NK != 0, w_NK + self.adapter().to(w_NK.dtype), 0)


def recover_model(
    pruned: Checkpoint,
    target: Path,
    rows_NT: NDArray[np.int64],
    plan: RecoveryPlan,
    *,
    device: str = "cpu",
    checkpoint: Path | None = None,
    progress: Progress = lambda _done, _total: None,
) -> None:
    """Fine-tune a pruned model in memory, and write it to the folder `target`.

    Raises:
        InputError: as for `recover`.
        OSError: the file system failed.
    """
    model = load_model(pruned.folder).to(device)
    names = [name for name, _ in scoped_tensors(pruned.config)]
    trained = attach(model, names, plan.rank, seed=plan.seed)
    recover(model, trained, rows_NT, plan, checkpoint=checkpoint, progress=progress)
    copy_model(pruned, target)
    for name in names:
        module = model.get_submodule(name.removesuffix(".weight"))
        # The weight becomes `keep * (W + dW)`, so zeros stay zeros.
        parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)
        write_weight(pruned, target, name, module.weight.detach(), updated=True)


def attach(model: nn.Module, names: Sequence[str], rank: int, *, seed: int) -> list[nn.Parameter]:
    """Put an adapter beside each of these weights, freeze all others, and return the trained parameters."""
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    found: list[nn.Parameter] = []
    for name in names:
        weight_NK = model.get_parameter(name)
        shape = (weight_NK.shape[0], weight_NK.shape[1])
        adapter = LoraAdapter(shape, min(rank, *shape), generator).to(weight_NK.device)
        module = model.get_submodule(name.removesuffix(".weight"))
        parametrize.register_parametrization(module, "weight", _Masked(adapter))
        found.extend(adapter.parameters())
    return found


def recover(
    model: "PreTrainedModel",
    trained: Sequence[nn.Parameter],
    rows_NT: NDArray[np.int64],
    plan: RecoveryPlan,
    *,
    checkpoint: Path | None = None,
    progress: Progress = lambda _done, _total: None,
) -> list[float]:
    """Train a model in place, and return the mean loss of each step.

    Args:
        model: the model.
        trained: the result of `attach`. All other parameters are frozen.
        rows_NT: the text.
        plan: the options.
        checkpoint: a file for continuing. A kill costs at most `STEPS_A_CHECKPOINT` steps.
        progress: called after each step. An exception stops the work.

    Raises:
        InputError: there are fewer rows than a step takes, a token is outside of the vocabulary, or a loss is
            not finite.
    """
    check_sequences(model, rows_NT)
    if len(rows_NT) < plan.rows:
        raise InputError(
            f"A step takes {plan.rows} rows of text, and there are {len(rows_NT)}. Add text, or take fewer "
            "rows."
        )
    # `foreach=True` would need temporaries as large as all parameters.
    optimizer = torch.optim.Adam(trained, lr=plan.rate, foreach=False)
    losses = _load(checkpoint, trained, optimizer)
    at_once = max(1, TOKENS_A_PASS // rows_NT.shape[1])
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    with differentiable(model, names):
        for step in range(len(losses), plan.steps):
            for group in optimizer.param_groups:
                group["lr"] = plan.rate * (1 - step / plan.steps)
            optimizer.zero_grad()
            total = 0.0
            taken_BT = rows_NT[row_order(len(rows_NT), plan.rows, plan.seed, step)]
            for first in range(0, plan.rows, at_once):
                part_BT = taken_BT[first : first + at_once]
                loss = _mean_loss(model, part_BT, step) * (len(part_BT) / plan.rows)
                # Each loss is weighted by its share of the rows, so gradients add up to that of the step.
                loss.backward()  # type: ignore[no-untyped-call]
                total += float(loss.detach())
            optimizer.step()
            losses.append(total)
            if checkpoint and (len(losses) % STEPS_A_CHECKPOINT == 0 or len(losses) == plan.steps):
                write_atomic(checkpoint, _bytes(trained, optimizer, losses))
            progress(len(losses), plan.steps)
    return losses


def _mean_loss(model: "PreTrainedModel", rows_BT: NDArray[np.int64], step: int) -> torch.Tensor:
    """Return the mean loss over all predictions of the rows, with logits in float32.

    Raises:
        InputError: the loss is not finite.
    """
    ids_BT = torch.from_numpy(np.ascontiguousarray(rows_BT)).to(model.device)
    logits_BTV = model(input_ids=ids_BT, use_cache=False).logits[:, :-1].float()
    loss = functional.cross_entropy(logits_BTV.flatten(0, 1), ids_BT[:, 1:].flatten())
    if not torch.isfinite(loss):
        raise InputError(f"The loss of step {step} is not finite: {loss.item()}. Take a lower rate.")
    return loss


def _bytes(trained: Sequence[nn.Parameter], optimizer: torch.optim.Adam, losses: Sequence[float]) -> bytes:
    moments = [
        torch.cat([optimizer.state[parameter][key].reshape(-1) for parameter in trained])
        for key in ("exp_avg", "exp_avg_sq")
    ]
    # Adam needs the values and both moments to continue with the same bits.
    values_3K = torch.stack([parameters_to_vector(trained).detach(), *moments])
    buffer = io.BytesIO()
    np.savez(buffer, values_3K=values_3K.float().cpu().numpy(), losses=np.array(losses))
    return buffer.getvalue()


def _load(
    checkpoint: Path | None, trained: Sequence[nn.Parameter], optimizer: torch.optim.Adam
) -> list[float]:
    """Restore a checkpoint. Return the losses of its steps, or an empty list if it is missing or damaged."""
    if checkpoint is None or not checkpoint.exists():
        return []
    try:
        with np.load(checkpoint, allow_pickle=False) as stored:
            values_3K, losses = torch.from_numpy(stored["values_3K"]), stored["losses"]
    # A checkpoint only saves time, so a damaged one is ignored, and training begins anew.
    except (ValueError, KeyError, OSError, zipfile.BadZipFile):
        return []
    if values_3K.shape != (3, sum(parameter.numel() for parameter in trained)):
        return []
    values_3K = values_3K.to(trained[0].device)
    vector_to_parameters(values_3K[0], trained)
    start = 0
    for parameter in trained:
        end = start + parameter.numel()
        optimizer.state[parameter] = {
            # Adam uses the number of steps to correct the bias of its moments.
            "step": torch.tensor(float(len(losses))),
            "exp_avg": values_3K[1, start:end].view_as(parameter).clone(),
            "exp_avg_sq": values_3K[2, start:end].view_as(parameter).clone(),
        }
        start = end
    return [float(loss) for loss in losses]

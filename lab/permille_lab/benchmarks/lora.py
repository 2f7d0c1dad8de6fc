"""First-order LoRA on a 4-bit base: peft's adapters, AdamW, recomputed activations, micro-batches.

The strongest thrifty form that users have: adapters on all linear layers of the decoder (r = 8, alpha = 16,
as in the papers), activations of one layer at a time, gradients of a batch added up over micro-batches.
"""

from collections.abc import Callable
from typing import Any

import peft
import torch

from permille.zo.estimators import Batch
from permille_lab.benchmarks.dense import mean_loss

RANK, ALPHA = 8, 16


def with_adapters(model: Any, *, seed: int = 0) -> Any:
    """The model with adapters on all linear layers of its decoder, the rest frozen, checkpointed."""
    model.requires_grad_(False)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    torch.manual_seed(seed)
    config = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, config)


class LoraStep:
    """Calling it makes one step of AdamW on one batch."""

    def __init__(self, model: Any, batch: Batch, *, micro_rows: int, learning_rate: float) -> None:
        adapted = with_adapters(model)
        self.model = adapted.base_model.model
        self.model.train()
        self._trained = [weight for weight in adapted.parameters() if weight.requires_grad]
        self._optimizer = torch.optim.AdamW(self._trained, lr=learning_rate)
        self._batch = batch
        self._micro_rows = micro_rows

    def __call__(self) -> None:
        """One step on the batch."""
        self.step(self._batch)

    def step(self, batch: Batch) -> float:
        """One step on another batch; returns its loss."""
        loss = accumulate(self.model, batch, self._micro_rows)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss


def accumulate(
    model: Any, batch: Batch, micro_rows: int, *, before: Callable[[], None] | None = None
) -> float:
    """Gradients of the batch's mean loss, added up over micro-batches; returns the loss.

    `before` is called before each micro-batch.
    """
    targets = int(batch.target_BT.sum())
    total = 0.0
    for start in range(0, len(batch.input_ids_BT), micro_rows):
        rows = slice(start, start + micro_rows)
        part = Batch(
            input_ids_BT=batch.input_ids_BT[rows],
            attention_BT=batch.attention_BT[rows],
            target_BT=batch.target_BT[rows],
        )
        if before is not None:
            before()
        loss = mean_loss(model, part) * (int(part.target_BT.sum()) / targets)
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    return total

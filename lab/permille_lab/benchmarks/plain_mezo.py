"""A plain MeZO loop on transformers, written as the published one works (Malladi et al. 2023, their trainer).

Rows are documents, padded to the longest of the batch; the model is called with labels, so logits of all
positions exist; z comes from the process's one generator, and every perturbation makes a new tensor for each
weight.
"""

from collections.abc import Sequence
from typing import Any

import torch

from permille_agent.text.rows import Row, batch_of


class PlainMezo:
    """`step(number)` makes one step on the next rows, in an order that the seed decides."""

    def __init__(
        self,
        model: Any,
        rows: Sequence[Row],
        *,
        batch_rows: int,
        epsilon: float,
        learning_rate: float,
        seed: int,
    ) -> None:
        self._model = model
        self._rows = rows
        self._batch_rows = batch_rows
        self._epsilon = epsilon
        self._learning_rate = learning_rate
        self._rng = torch.Generator().manual_seed(seed)
        self._order: list[int] = []

    def step(self, number: int) -> None:
        """`number` is the seed of the step's z."""
        inputs = self._inputs()
        self._perturb(number, 1)
        loss_plus = self._loss(inputs)
        self._perturb(number, -2)
        loss_minus = self._loss(inputs)
        projected_grad = (loss_plus - loss_minus) / (2 * self._epsilon)
        self._perturb(number, 1)
        torch.manual_seed(number)
        with torch.no_grad():
            for parameter in self._model.parameters():
                z = torch.normal(mean=0.0, std=1.0, size=parameter.shape, dtype=parameter.dtype)
                parameter.data = parameter.data - self._learning_rate * (projected_grad * z)

    def _perturb(self, seed: int, factor: float) -> None:
        torch.manual_seed(seed)
        for parameter in self._model.parameters():
            z = torch.normal(mean=0.0, std=1.0, size=parameter.shape, dtype=parameter.dtype)
            parameter.data = parameter.data + factor * z * self._epsilon

    def _loss(self, inputs: dict[str, torch.Tensor]) -> float:
        with torch.inference_mode():
            return float(self._model(**inputs).loss)

    def _inputs(self) -> dict[str, torch.Tensor]:
        if len(self._order) < self._batch_rows:
            self._order += torch.randperm(len(self._rows), generator=self._rng).tolist()
        chosen, self._order = self._order[: self._batch_rows], self._order[self._batch_rows :]
        batch = batch_of([self._rows[index] for index in chosen])
        ids = torch.from_numpy(batch.input_ids_BT)
        labels = ids.masked_fill(~torch.from_numpy(batch.target_BT), -100)
        return {"input_ids": ids, "attention_mask": torch.from_numpy(batch.attention_BT), "labels": labels}

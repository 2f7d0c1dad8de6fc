"""Cells about gradients: what few weights hold of them, and what masks keep of them while a model is trained.

Figures 2, 3, 7 and 8 of the sensitive-sparse paper. Training is first order on all linear weights, as in the
paper's figure 8; the corpus' mask is that of the sweeps.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from permille.sensitivity.fisher import fisher_scores
from permille.sensitivity.masks import Mask, MaskMethod, select_mask
from permille.zo.estimators import Batch
from permille_lab.benchmarks.cells import Result
from permille_lab.benchmarks.evidence_plan import Unit
from permille_lab.evaluate import models
from permille_lab.evaluate.cell_data import CellData
from permille_lab.evaluate.cells import Bench
from permille_lab.evaluate.coverage import LinearWeights, held_shares, layer_shares
from permille_lab.evaluate.methods import Order, method
from permille_lab.evaluate.outcomes import Cell
from permille_lab.evaluate.prompts import Task
from permille_lab.evaluate.scoring import Choices, training_batch
from permille_lab.evaluate.specification import Base, Sweep
from permille_lab.evaluate.training import Recipe, Validate, train

CURVE = tuple(float(at) for at in np.geomspace(1e-5, 1, 26))
TRANSFER_DENSITIES = (1e-4, 1e-3, 1e-2)
_EXAMPLES = 64
"""Of the train part that select a mask, and as many of the validation part that judge it."""
_STAGES = 4


class Gradients:
    """The gradients of one model on the corpus and on one task."""

    def __init__(self, sweep: Sweep, unit: Unit, *, examples: int = _EXAMPLES) -> None:
        self._model = unit.model
        self._bench = Bench(sweep)
        cell = Cell(model=unit.model, base=Base.BF16, method=method("fo:full"), task=Task(unit.task), seed=0)
        self._data: CellData = self._bench.data(cell, 0)
        # Parts share no passage: what judges selected nothing and trains nothing.
        self._selecting = _singles(self._data.train[:examples])
        self._judging = _singles(self._data.validation[:examples])
        self._weights = LinearWeights(models.stored(unit.model, Base.BF16))

    def batch(self, step: int) -> Batch:
        """The task's batch of a step."""
        return self._data.batch(step)

    def coverage(self) -> Result:
        """Figure 2: shares by fraction, of the corpus and of the task."""
        corpus = fisher_scores(
            models.stored(self._model, Base.BF16), self._bench.corpus_sequences(self._model)
        )
        task = self._weights.squared_gradients(self._weights.trainable.base_K, self._selecting)
        curves = {"corpus": layer_shares(corpus, CURVE), "task": layer_shares(task, CURVE)}
        return {
            "fractions": list(CURVE),
            "curves": {
                name: {"mean": list(found.mean), "deviation": list(found.deviation)}
                for name, found in curves.items()
            },
        }

    def transfer(self, steps: int) -> Result:
        """Figure 3: what masks hold of the task's gradients, before, during and after training."""
        corpus = fisher_scores(
            models.stored(self._model, Base.BF16), self._bench.corpus_sequences(self._model)
        )
        trainable = self._weights.trainable
        states = [(0, trainable.base_K.copy())]
        recipe = Recipe(order=Order.FIRST, steps=steps, step_factor=0.3, seed=0, evaluations=_STAGES)
        losses: list[float] = []
        train(trainable, self._data.batch, self._keeping(states, losses, steps), recipe)
        weights = {
            name: parameter.detach().numpy()
            for name, parameter in models.stored(self._model, Base.BF16).named_parameters()
            if name in corpus
        }
        fixed = {
            density: {
                "C4 mask": select_mask(corpus, MaskMethod.FISHER, density),
                "random": select_mask(weights, MaskMethod.RANDOM, density, seed=0),
                "outliers": select_mask(weights, MaskMethod.MAGNITUDE, density),
            }
            for density in TRANSFER_DENSITIES
        }
        rows = []
        for (step, values_K), loss in zip(states, losses, strict=True):
            selecting = self._weights.squared_gradients(values_K, self._selecting)
            judging = self._weights.squared_gradients(values_K, self._judging)
            for density in TRANSFER_DENSITIES:
                now = select_mask(selecting, MaskMethod.FISHER, density)
                if step == 0:
                    fixed[density]["task mask, before"] = now
                masks: dict[str, Mask] = {"task mask, now": now, **fixed[density]}
                rows.append(
                    {"step": step, "loss": loss, "density": density, "shares": held_shares(judging, masks)}
                )
        return {"rows": rows}

    def _keeping(
        self, states: list[tuple[int, NDArray[np.float32]]], losses: list[float], steps: int
    ) -> Validate:
        """Validation that keeps every state it sees."""
        batch = training_batch(self._data.validation)
        trainable = self._weights.trainable

        def loss(values_K: NDArray[np.float32]) -> float:
            if losses:
                states.append((-(-steps * len(losses) // _STAGES), values_K.copy()))
            losses.append(float(trainable.token_losses(values_K, batch).mean()))
            return losses[-1]

        return loss


def _singles(items: Sequence[Choices]) -> list[Batch]:
    return [training_batch([item]) for item in items]

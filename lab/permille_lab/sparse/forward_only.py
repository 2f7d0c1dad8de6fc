"""Recovery of a pruned model by forward passes alone: pooling adapters, a device's estimator, equal steps."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from permille.choices import EstimatorKind
from permille.errors import InputError
from permille.models.checkpoint import Checkpoint
from permille.models.families import scoped_tensors
from permille.models.loading import load_model
from permille.pruning.plan import IterativePlan
from permille.sparse_tuning.adapters import allocate, attach, merge
from permille.sparse_tuning.iterative import IterativeText
from permille.sparse_tuning.recovery import row_order
from permille.zo.estimators import Batch
from permille_lab.evaluate.methods import Order
from permille_lab.evaluate.training import Recipe, train
from permille_lab.models.trainables import parameters_of
from permille_lab.sparse.ways import STEPS

QUERIES = 16
FACTORS = (1.0, 4.0)
"""Of the step size, over which the loss of the selection windows decides."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ended:
    """A model whose adapters are merged, and its loss on the selection windows."""

    model: Any
    loss: float


def forward_only(pruned: Checkpoint, text: IterativeText, plan: IterativePlan, factor: float) -> Ended:
    """Train equal, masked adapters for all steps; what ends above where it began is not taken.

    Raises:
        InputError: no evaluation rows.
    """
    if text.evaluation_ET is None:
        raise InputError("expected rows to select a step size by, got none")
    shapes = dict(scoped_tensors(pruned.config))
    average = plan.rank * sum(map(sum, shapes.values())) / len(shapes)
    model = load_model(pruned.folder)
    sizes = allocate(dict.fromkeys(shapes, 1.0), shapes, average)
    trained = attach(model, sizes, plan.adapter, masked=True, seed=plan.recovery.seed)
    trainable = parameters_of(model, trained)
    selection = _batch(text.evaluation_ET)

    def batches(step: int) -> Batch:
        rows = row_order(len(text.recovery_MT), plan.recovery.rows, plan.recovery.seed, step)
        return _batch(text.recovery_MT[rows])

    def validate(values_K: NDArray[np.float32]) -> float:
        return float(trainable.token_losses(values_K, selection).mean())

    recipe = Recipe(
        order=Order.ZEROTH,
        steps=STEPS,
        step_factor=factor,
        seed=plan.recovery.seed,
        queries=QUERIES,
        estimator=EstimatorKind.ONE_SIDED,
        evaluations=1,
    )
    ended = train(trainable, batches, validate, recipe)
    validate(ended.values_K)  # puts these values into the model
    merge(model)
    return Ended(model=model, loss=ended.loss)


def _batch(rows_BT: NDArray[np.int64]) -> Batch:
    target_BT = np.ones(rows_BT.shape, np.bool_)
    target_BT[:, 0] = False
    return Batch(input_ids_BT=rows_BT, attention_BT=np.ones(rows_BT.shape, np.bool_), target_BT=target_BT)

"""Runs of a sweep's cells, and the trials of their tuning.

A cell is a model, a base, a method, a task and a seed. Results depend only on the sweep and the cell:
batches on seed and step, splits on the seed, masks on model and seed.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from permille.choices import MaskMethod
from permille.corpora.sequences import token_sequences
from permille.corpora.sources import ReadReport, file_texts
from permille.errors import InputError
from permille.models.loading import FileTokenizer
from permille.sensitivity.masks import Mask
from permille_lab.evaluate.cell_data import CellData, Encoder
from permille_lab.evaluate.methods import DYNAMIC, IN_SEGMENTS, TASK_MASKS, Order, TrainedSet
from permille_lab.evaluate.outcomes import Cell, Outcome
from permille_lab.evaluate.specification import Base, Sweep
from permille_lab.evaluate.training import Recipe, Trained, train, train_safely
from permille_lab.evaluate.tuning import Trial
from permille_lab.models import storage
from permille_lab.models.trainables import Trainable, masked_weights
from permille_lab.tasks.examples import Pool, Task
from permille_lab.tasks.rows import read_file
from permille_lab.tasks.scoring import (
    Choices,
    mean_losses,
    score,
    training_batch,
)
from permille_lab.tasks.splits import Splits, split

_MASK_EXAMPLES = 64
# Factor between a segment's first step and its seed. Thus no two segments share directions.
_SEGMENT_SEEDS = 1_000_003


class Bench:
    """Inputs of a sweep's cells: example pools, corpus masks and calibrated weights. All are cached.

    Args:
        unfinished: folder for the states of unfinished runs. They are left there when a cell is done.
    """

    def __init__(self, sweep: Sweep, unfinished: Path | None = None) -> None:
        self.sweep = sweep
        self._unfinished = unfinished
        self._bad_rows: dict[str, None] = {}
        self.pool = lru_cache(maxsize=None)(self._pool)
        self.decoded = lru_cache(maxsize=4)(self._decoded)

    def run(self, cell: Cell, seed: int, step_factor: float | None) -> Outcome:
        """Train one cell with a seed, if its method trains, and score it on the test items."""
        begin = time.perf_counter()
        data = self.data(cell, seed)
        if cell.method.order is None:
            trainable, trained = Trainable(self._stored(cell), []), None
            values_K = trainable.base_K
        else:
            recipe = self._recipe(cell.method.order, seed, step_factor)
            trainable, trained = self._trained(cell, data, recipe, train_safely)
            values_K = trained.values_K
        tested = score(lambda batch: trainable.token_losses(values_K, batch), data.test)
        return Outcome(cell, data, trained, tested, time.perf_counter() - begin)

    def trial(self, cell: Cell, order: Order, seed: int, step_factor: float) -> Trial:
        """Return the outcome of one tuning run. It has a validation loss and no test score."""
        recipe = self._recipe(order, seed, step_factor)
        recipe = replace(recipe, steps=self.sweep.trial_steps or recipe.steps)
        trained = self._trained(cell, self.data(cell, seed), recipe, train)[1]
        return Trial(loss=trained.loss, rose=trained.rose and cell.method.trained not in IN_SEGMENTS)

    def read(self) -> None:
        """Read all task files. Check that they can be split and that the corpus has text.

        This happens before the first cell, so that no cell fails after hours because of a file.

        Raises:
            InputError: a file is not in its task's format or has too few examples, or the corpus has no text.
        """
        report = ReadReport()
        corpus = self.sweep.corpus
        if next(file_texts(corpus, report), None) is None:
            bad = ", ".join(f"{count} {reason.value}" for reason, count in report.bad.items())
            raise InputError(
                f"expected a corpus with text, such as JSON lines with `text`, got {report.rows} rows "
                f"({bad or 'none'}) in {corpus}"
            )
        for task, files in self.sweep.tasks.items():
            for path in (files.train, files.test):
                if path is not None:
                    self.pool(task, path)
            for seed in self.sweep.seeds:
                self._splits(task, seed)

    def bad_rows(self) -> list[str]:
        """Return a line with the reason for each bad row so far.

        Bad rows are rows of a file that are no examples, and examples that did not fit into a cell.
        """
        return list(self._bad_rows)

    def _recipe(self, order: Order, seed: int, step_factor: float | None) -> Recipe:
        sweep = self.sweep
        return Recipe(
            order=order,
            steps=sweep.zo_steps if order is Order.ZEROTH else sweep.fo_steps,
            step_factor=step_factor or 1.0,
            seed=seed,
            queries=sweep.queries,
            estimator=sweep.estimator,
            evaluations=sweep.evaluations,
        )

    def _pool(self, task: Task, path: Path) -> Pool:
        found = read_file(task, path)
        self._bad_rows.update((f"{task.value}: {bad.name}: {bad.reason}", None) for bad in found.bad)
        return found

    def data(self, cell: Cell, seed: int) -> CellData:
        """Return the examples of a cell."""
        return CellData(
            self._splits(cell.task, seed),
            Encoder(cell.model),
            seed=seed,
            shots=cell.method.shots,
            batch_size=self.sweep.batch_size,
            max_tokens=self.sweep.max_tokens,
            unfit=lambda bad: self._bad_rows.setdefault(
                f"{cell.task.value}, {cell.model.name}: {bad.name}: {bad.reason}"
            ),
        )

    def _splits(self, task: Task, seed: int) -> Splits:
        files = self.sweep.tasks[task]
        pool = self.pool(task, files.train).examples
        test_pool = None if files.test is None else self.pool(task, files.test).examples
        try:
            return split(pool, seed, test_pool=test_pool, sizes=self.sweep.sizes)
        except InputError as exc:
            groups = len({example.group for example in pool})
            raise InputError(
                f"{task.value}: {exc}, of {len(pool)} examples in {groups} groups in {files.train}"
            ) from exc

    def _decoded(self, model: Path, base: Base) -> storage.Decoded:
        return storage.calibrated(model, base, self.corpus_sequences(model))

    def _stored(self, cell: Cell, mask: Mask | None = None) -> Any:
        decoded = self.decoded(cell.model, cell.base) if cell.base in storage.CALIBRATED else None
        return storage.stored(cell.model, cell.base, mask, decoded)

    def corpus_sequences(self, model: Path) -> NDArray[np.int64]:
        """Return sequences of the corpus in the model's tokens, [sequences, tokens]."""
        sweep = self.sweep
        return _corpus_sequences(model, sweep.corpus, sweep.corpus_sequences, sweep.corpus_tokens)

    def _trained(
        self, cell: Cell, data: CellData, recipe: Recipe, training: Callable[..., Trained]
    ) -> tuple[Trainable, Trained]:
        """Train a cell.

        Args:
            training: `train` or `train_safely`. Training in segments ignores it, because each segment
                starts at the best state of the last one.
        """
        if cell.method.trained in IN_SEGMENTS:
            return self._trained_in_segments(cell, data, recipe)
        mask = self._mask(cell, data, 0, lambda: storage.stored(cell.model, Base.BF16))
        model = self._stored(cell, mask)
        trainable = (
            storage.adapted(model, cell.method, recipe.seed) if mask is None else masked_weights(model, mask)
        )
        folder = self._unfinished and self._unfinished / cell.tuning_key.replace("/", "-")
        validate = _validation(trainable, data.validation)
        return trainable, training(trainable, data.batch, validate, recipe, folder)

    def _trained_in_segments(self, cell: Cell, data: CellData, recipe: Recipe) -> tuple[Trainable, Trained]:
        """Train in segments of `refresh_steps`. A dynamic mask is selected again for each segment.

        A weight that leaves the mask keeps its trained value. A segment starts at the best evaluated state
        of the last one. The learning-rate schedule runs over all segments. For zeroth order, the step size
        is inversely proportional to the segment's first gradients, so it grows as they shrink.
        """
        model = self._stored(cell)
        own = storage.stored(cell.model, Base.BF16)
        every = self.sweep.refresh_steps
        curve: list[tuple[int, float]] = []
        step, learned = 0, set[tuple[str, int]]()
        mask = self._mask(cell, data, 0, lambda: model)
        for first in range(0, recipe.steps, every):
            if first and cell.method.trained in DYNAMIC:
                mask = self._mask(cell, data, first // every, lambda: model)
            assert mask is not None  # all sets in IN_SEGMENTS have masks
            storage.give_own_values(model, own, mask, learned)
            trainable = masked_weights(model, mask)
            part = replace(
                recipe,
                steps=min(every, recipe.steps - first),
                seed=recipe.seed + first * _SEGMENT_SEEDS,
                evaluations=max(1, recipe.evaluations * every // recipe.steps),
                first_step=first,
                total_steps=recipe.steps,
            )
            trained = train(
                trainable, data.batches_from(first), _validation(trainable, data.validation), part
            )
            trainable.token_losses(trained.values_K, data.batch(0))  # installs them for the next segment
            curve += [(first + at, loss) for at, loss in trained.curve]
            step = first + trained.step if trained.step else step
        return trainable, replace(trained, step=step, curve=tuple(curve))

    def _mask(self, cell: Cell, data: CellData, segment: int, model: Callable[[], Any]) -> Mask | None:
        density = self.sweep.density
        match cell.method.trained:
            case TrainedSet.SENSITIVE_C4:
                sweep = self.sweep
                size = (sweep.corpus_sequences, sweep.corpus_tokens)
                return _mask_of_corpus(cell.model, sweep.corpus, *size, density)
            case trained if trained in TASK_MASKS:
                singles = [training_batch([item]) for item in data.train[:_MASK_EXAMPLES]]
                return storage.task_mask(model(), singles, density)
            case TrainedSet.RANDOM | TrainedSet.RANDOM_DYNAMIC:
                seed = data.seed * 1000 + segment
                return storage.weight_mask(model(), MaskMethod.RANDOM, density, seed)
            case TrainedSet.OUTLIERS:
                return storage.weight_mask(model(), MaskMethod.MAGNITUDE, density, 0)
            case _:
                return None


def _corpus_sequences(model: Path, corpus: Path, sequences: int, tokens: int) -> NDArray[np.int64]:
    return token_sequences(FileTokenizer(model), file_texts(corpus, ReadReport()), sequences, tokens, 0)


@lru_cache(maxsize=4)
def _mask_of_corpus(model: Path, corpus: Path, sequences: int, tokens: int, density: float) -> Mask:
    """Return the mask of the corpus. Sweeps of one process that differ in their seeds share it."""
    own = storage.stored(model, Base.BF16)
    return storage.corpus_mask(own, _corpus_sequences(model, corpus, sequences, tokens), density)


def _validation(trainable: Trainable, items: Sequence[Choices]) -> Callable[[NDArray[np.float32]], float]:
    """Return a function that computes the mean loss of the right answers.

    The wrong candidates are not needed, so each item takes one row.
    """
    parts = [items[first : first + 32] for first in range(0, len(items), 32)]
    batches = [training_batch(part) for part in parts]

    def loss(values_K: NDArray[np.float32]) -> float:
        means = [
            mean_losses(trainable.token_losses(values_K, batch), part)
            for batch, part in zip(batches, parts, strict=True)
        ]
        return float(np.concatenate(means).mean())

    return loss

"""One estimator on one text: tuning with so many trials as every other has, then steps until the budget is
spent, judged on held-out rows on the way.

The budget is counted in row passes: one row of the batch through the whole model once. The seconds are the
process's own, evaluations left out, with one thread of the engine.
"""

import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from permille.engines.factory import open_engine
from permille.engines.interface import Engine
from permille.package.reader import Package
from permille.zo.header import EstimatorKind, LogHeader
from permille.zo.lattice import values
from permille.zo.steps import apply_record, take_step
from permille_agent.text.preparation import prepare
from permille_agent.text.reading import read_documents
from permille_agent.text.rows import Row, TrainingBatches
from permille_agent.training.evaluation import mean_loss
from permille_agent.training.options import TrainOptions
from permille_agent.training.run import Json, RunFolder
from permille_agent.training.setup import Setup, step_spread, training_exponents
from permille_agent.training.step_size import RACE_FACTOR, STEP_NORM, Racer, SearchFailed, find_epsilon
from permille_agent.training.steps import CLIP_RMS, attempt_header
from permille_agent.training.train import package_tokenizer

TRIALS = 8
TRIAL_SHARE = 0.06
FEWEST_TRIAL_STEPS = 4
EVALUATIONS = 6
# Enough for a difference of some hundredths of a nat between contenders on the same rows.
HELD_OUT_TOKENS = 2000
SELECT_TOKENS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way to estimate and to choose directions."""

    estimator: EstimatorKind
    queries: int
    batch_rows: int = 2
    scaling: bool = False

    @property
    def label(self) -> str:
        """Its name in tables."""
        extras = ["scaling"] if self.scaling else []
        return " + ".join([f"{self.estimator.value} {self.queries} x {self.batch_rows}", *extras])

    def options(self, *, seed: int, row_tokens: int, steps: int) -> TrainOptions:
        """As the agent is told."""
        return TrainOptions(seed=seed, row_tokens=row_tokens, steps=steps, **asdict(self))


@dataclass(frozen=True, slots=True)
class Run:
    """A contender on a text, with what it has spent."""

    setup: Setup
    contender: Contender
    budget: int
    held_out: list[Row]
    _spent: list[float] = field(default_factory=lambda: [0.0])

    def run(self, run: RunFolder) -> dict[str, Any]:
        """Tune, train, and tell: see `measure`."""
        began = time.process_time()
        try:
            plan = self._tuned(run)
        except SearchFailed as exc:
            return {"failed": str(exc)}
        tuning_s = time.process_time() - began
        header = attempt_header(self.setup, plan, 0)
        points = self._train(header, plan)
        return {
            "step_passes": step_passes(header, self.setup.decoder_layers, self.contender.batch_rows),
            "steps": header.total_steps,
            "tuning_cpu_s": tuning_s,
            "trials": plan["trials"],
            "points": points,
        }

    def _tuned(self, run: RunFolder) -> Json:
        """A plan as the trainer makes it."""
        steps = self._steps(self.budget)
        return self._rates(run, TRIALS) | {"total_steps": steps}

    def _rates(self, run: RunFolder, most: int) -> Json:
        epsilon = find_epsilon(self.setup, run)
        header = self.setup.header(seed=0, epsilon=epsilon["epsilon"])
        start = STEP_NORM / (epsilon["g_rms"] * step_spread(header, self.setup.exponents))
        steps = max(FEWEST_TRIAL_STEPS, self._steps(int(self.budget * TRIAL_SHARE)))
        losses: dict[int, float] = {}
        wanted = [0, 1]
        while wanted:
            for power in wanted:
                rate = start * RACE_FACTOR**power
                racer = Racer(self.setup, epsilon["epsilon"], epsilon["g_rms"], rate, steps)
                loss = racer.race()["loss"]
                losses[power] = math.inf if loss is None else loss
            best = min(losses, key=lambda power: (losses[power], power))
            edge = best - 1 if best == min(losses) else best + 1 if best == max(losses) else None
            wanted = [edge] if edge is not None and len(losses) < most else []
        return {
            "epsilon": epsilon["epsilon"],
            "g_rms": epsilon["g_rms"],
            "clip": CLIP_RMS * epsilon["g_rms"],
            "learning_rate": start * RACE_FACTOR**best,
            "trials": {
                "relative_error": epsilon["relative_error"],
                "losses": {
                    str(power): loss if math.isfinite(loss) else None for power, loss in losses.items()
                },
            },
        }

    def _steps(self, passes: int) -> int:
        header = self.setup.header(seed=0, epsilon=1.0)
        return max(1, int(passes / step_passes(header, self.setup.decoder_layers, self.contender.batch_rows)))

    def _train(self, header: LogHeader, plan: Json) -> list[dict[str, float | None]]:
        setup = self.setup
        s_K = np.zeros(header.k, dtype=np.int64)
        cost = step_passes(header, setup.decoder_layers, self.contender.batch_rows)
        due = {round(header.total_steps * part / EVALUATIONS) for part in range(1, EVALUATIONS + 1)}
        points = [self._point(header, s_K, 0.0, 0.0)]
        cpu_s = 0.0
        for step in range(header.total_steps):
            began = time.process_time()
            record = take_step(
                setup.engine,
                setup.batches(step),
                setup.descent(header),
                s_K,
                step,
                clip=plan["clip"],
            )
            apply_record(s_K, record, header, setup.exponents)
            cpu_s += time.process_time() - began
            if step + 1 in due:
                points.append(self._point(header, s_K, (step + 1) * cost, cpu_s))
        return points

    def _point(
        self, header: LogHeader, s_K: NDArray[np.int64], passes: float, cpu_s: float
    ) -> dict[str, float | None]:
        values_K = values(self.setup.w_base_K, s_K, header.step_unit_exponent)
        loss = mean_loss(self.setup.engine, values_K, self.held_out)
        return {"passes": passes, "cpu_s": cpu_s, "loss": loss if math.isfinite(loss) else None}


def measure(
    package: Package, text: Path, contender: Contender, *, seed: int, row_tokens: int, passes: int
) -> dict[str, Any]:
    """One cell: {steps, step_passes, tuning_cpu_s, trials, points: [{passes, cpu_s, loss}]}, or {failed}.

    Args:
        text: JSON lines of documents.
        passes: budget of the steps in row passes; tuning may spend half as much again.
    """
    engine = open_engine(package, threads=1)
    with tempfile.TemporaryDirectory() as name:
        run = make_run(package, engine, text, contender, seed=seed, row_tokens=row_tokens, passes=passes)
        return run.run(RunFolder(Path(name)))


def make_run(
    package: Package,
    engine: Engine,
    text: Path,
    contender: Contender,
    *,
    seed: int,
    row_tokens: int,
    passes: int,
) -> Run:
    """A contender with its text read and divided."""
    documents, _ = read_documents([text])
    prepared = prepare(documents, package_tokenizer(package), seed=seed, row_tokens=row_tokens)
    prepared = replace(prepared, select=first_rows(prepared.select, SELECT_TOKENS))
    # `steps` is no limit here: the budget is.
    options = contender.options(seed=seed, row_tokens=row_tokens, steps=1)
    setup = Setup(
        engine=engine,
        package_digest=package.digest,
        mask_digest=package.mask_digest,
        counts=package.counts,
        w_base_K=package.values(),
        prepared=prepared,
        options=options,
        batches=TrainingBatches(prepared.train, batch_rows=contender.batch_rows, seed=seed),
        exponents=training_exponents(package, options),
        decoder_layers=int(package.config["num_hidden_layers"]),
    )
    return Run(setup, contender, passes, first_rows(prepared.test, HELD_OUT_TOKENS))


def first_rows(rows: Sequence[Row], tokens: int) -> list[Row]:
    """Rows from the front, until they have so many target tokens."""
    chosen: list[Row] = []
    found = 0
    for row in rows:
        if found >= tokens:
            break
        chosen.append(row)
        found += int(row.target_T.sum())
    return chosen


def step_passes(header: LogHeader, decoder_layers: int, batch_rows: int) -> float:
    """Row passes of one step, as the estimator counts them; the head is left out where a block is.

    Forward mode's passes are dearer than the others': the seconds tell by how much.
    """
    queries = header.queries
    match header.estimator:
        case EstimatorKind.SPSA:
            passes = 2.0 * queries
        case EstimatorKind.ONE_SIDED:
            passes = float(queries)
        case EstimatorKind.FORWARD:
            passes = queries + 1.0
        case EstimatorKind.SPLIT:
            passes = _split_passes(header, decoder_layers)
    return passes * batch_rows


def _split_passes(header: LogHeader, decoder_layers: int) -> float:
    if header.split is None:
        return 2.0 * header.queries
    below = header.split.first_upper_tensor * decoder_layers // len(header.counts) / decoder_layers
    lower = header.split.lower_queries
    return 2 * lower * below + 2 * (header.queries - lower) * (1 - below)

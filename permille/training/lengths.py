"""Lengths of zeroth order: those of a perturbation and of a step (FORMAT 3.6).

A build measures both with the package's own base, on the public texts of its reference. A device takes them
from the manifest, and searches nothing (docs/adr/0030).

    manifest = measure_lengths(engine, package, work=folder)
    digest = write_manifest(package.blobs, manifest)

**Perturbation.** At a length and at twice that length, projected gradients g along the same directions must
agree: `|g - g2| <= 0.3 |g|`. The first candidate that passes is taken, else the one that agrees best.

**Step.** A trial makes a few steps of one length on some rows, and measures the loss on the others. If the
best length is at an end of the range, the range is extended.

Each result is a choice from a grid, so another machine finds the same lengths unless two candidates are equal
up to rounding errors.
"""

import json
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from permille.choices import EstimatorKind
from permille.engines.interface import Engine
from permille.files import write_atomic
from permille.package.manifest import Lengths, Manifest
from permille.package.reader import Package
from permille.training.reference import Reference
from permille.zo.estimators import Batch, Descent, estimate
from permille.zo.header import DirectionKind, LogHeader, Schedule
from permille.zo.lattice import values
from permille.zo.steps import apply_record, rounded_step, take_step

QUERIES = 16  # directions of a step, as on a device
PROBES = 2  # rows on which projected gradients are compared
PERTURBATIONS = (0.5, 0.25, 1.0, 0.125, 2.0)  # candidates, the nearest ones to the default first
MOST_DISAGREEMENT = 0.3
STEPS = 4  # of a trial
STEP = 0.5  # the length of the first trial's steps
FACTOR = 3.0  # ratio of neighbouring lengths of steps
MOST_TRIALS = 6


def measure_lengths(
    engine: Engine,
    package: Package,
    *,
    work: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Manifest:
    """Measure the lengths of a package. Without public texts in its reference, they stay as they are.

    Args:
        engine: an engine of the package.
        work: a folder for finished measurements, so that another call resumes. None keeps nothing.
        progress: called with a message before each measurement.

    Returns:
        The manifest of the package with its lengths, for `write_manifest`.
    """
    reference = Reference.of(package)
    if reference is None:
        return package.manifest
    train, judge = (reference.texts(pulls=pulls) for pulls in (True, False))
    if not (train and judge):
        return package.manifest
    trials = _Trials(
        package=package,
        engine=engine,
        train=train,
        judge=judge,
        known=work and work / f"lengths-{package.digest[7:23]}.json",
        progress=progress,
    )
    perturbation = trials.perturbation()
    return replace(
        package.manifest, lengths=Lengths(perturbation=perturbation, step=trials.step(perturbation))
    )


@dataclass(frozen=True, kw_only=True)
class _Trials:
    """Measurements on the rows of a reference. Each batch holds one row."""

    package: Package
    engine: Engine
    train: list[Batch]
    judge: list[Batch]
    known: Path | None
    progress: Callable[[str], None]
    at_base: dict[tuple[float, int], tuple[float, NDArray[np.float64]]] = field(default_factory=dict)
    """Estimates at the base, by length of the perturbation and step. All trials begin with the same one."""

    def perturbation(self) -> float:
        """Return the length of a perturbation."""
        found = dict[float, float]()
        for length in PERTURBATIONS:
            found[length] = self._once(f"perturbation {length:g}", partial(self._disagreement, length))
            if found[length] <= MOST_DISAGREEMENT:
                break
        return min(found, key=lambda length: found[length])

    def step(self, perturbation: float) -> float:
        """Return the length of a step. Of lengths with equal losses, it is the shortest one."""
        losses, wanted = dict[int, float](), [0, 1]  # by power of `FACTOR`
        while wanted:
            for power in wanted:
                length = STEP * FACTOR**power
                losses[power] = self._once(f"step {length:.3g}", partial(self._loss, perturbation, length))
            best = min(losses, key=lambda power: (losses[power], power))
            edge = best - 1 if best == min(losses) else best + 1 if best == max(losses) else None
            wanted = [edge] if edge is not None and len(losses) < MOST_TRIALS else []
        return STEP * FACTOR**best

    def _once(self, name: str, measure: Callable[[], float]) -> float:
        """Return a measurement, infinity for one that is not finite. Keep it in the file `known`."""
        done = dict[str, float]()
        if self.known is not None:
            # What a damaged file held is measured again.
            with suppress(FileNotFoundError, ValueError, TypeError):
                done = {
                    name: float(found) for name, found in dict(json.loads(self.known.read_bytes())).items()
                }
        if name not in done:
            self.progress(name)
            found = measure()
            done[name] = found if math.isfinite(found) else math.inf
            if self.known is not None:
                write_atomic(self.known, json.dumps(done).encode())
        return done[name]

    def _descent(self, perturbation: float, length: float) -> Descent:
        package = self.package
        header = LogHeader(
            package_digest=package.digest,
            mask_digest=package.mask_digest,
            seed=0,
            directions=DirectionKind.GROUPS,
            estimator=EstimatorKind.ONE_SIDED,
            queries=QUERIES,
            epsilon=1.0,
            learning_rate=1.0,
            schedule=Schedule.LINEAR,
            total_steps=STEPS,
            step_unit_exponent=0,
            counts=package.counts,
        ).with_lengths(perturbation, length)
        return Descent(header=header, w_base_K=package.values())

    def _disagreement(self, length: float) -> float:
        near_N, far_N = (self._projected(times * length) for times in (1, 2))
        with np.errstate(invalid="ignore", divide="ignore"):
            return float(np.linalg.norm(near_N - far_N) / np.linalg.norm(near_N))

    def _projected(self, perturbation: float) -> NDArray[np.float64]:
        """Return projected gradients at the base, along the same directions for each length."""
        probes = range(len(self.train[:PROBES]))
        return np.concatenate([self._estimate_at_base(perturbation, step)[1] for step in probes])

    def _estimate_at_base(self, perturbation: float, step: int) -> tuple[float, NDArray[np.float64]]:
        if (perturbation, step) not in self.at_base:
            # The length of steps has no effect on an estimate at the base.
            descent, s_K = self._descent(perturbation, STEP), np.zeros(self.package.k, np.int64)
            row = self.train[step]
            self.at_base[perturbation, step] = estimate(self.engine, row, descent, s_K, step)
        return self.at_base[perturbation, step]

    def _loss(self, perturbation: float, length: float) -> float:
        """Return the loss after the steps of a trial."""
        # All trials have the same directions, so that only the length differs.
        descent, s_K = self._descent(perturbation, length), np.zeros(self.package.k, np.int64)
        first = self._estimate_at_base(perturbation, 0)
        apply_record(s_K, rounded_step(*first, descent.header, 0, normalised=True), descent.header)
        for step in range(1, STEPS):
            row = self.train[step % len(self.train)]
            record = take_step(self.engine, row, descent, s_K, step, normalised=True)
            apply_record(s_K, record, descent.header)
        values_K = values(descent.w_base_K, s_K, descent.header.step_unit_exponent)
        losses = [self.engine.token_losses(values_K, row).mean(dtype=np.float64) for row in self.judge]
        return float(np.mean(losses))

"""Compare zeroth-order methods on SmolLM2 at equal numbers of layer passes. A stopped run continues.

    PERMILLE_DATA=DIR python -m permille_lab.real.zeroth_order --row-passes 160 --density 1e-5 --adapter

Every cell takes steps on one person's text until the engine has used the budget of layer passes. Its result
is the loss on held-out text before and after, and the rise of the loss on general text. The first cells
combine every density and adapter with every kind of step, on the gardener's notes. The other cells change one
setting at a time: the number of directions, a schedule of such numbers, momentum, or the person. `norm` is
the length of a step (FORMAT 3.6).

All runs can be replayed: a schedule is a sequence of logs, and momentum is a weight of each coefficient.

# Legend: K masked weights, Q directions, T steps.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from permille.choices import AdapterKind, Embeddings, EstimatorKind
from permille.models.gguf.folder import model_folder
from permille.package.build import ChosenAdapter
from permille.zo.estimators import Batch, Descent, estimate
from permille.zo.header import DirectionKind, LogHeader, Schedule
from permille.zo.lattice import step_unit_exponent_for, values
from permille.zo.replay import replay
from permille.zo.steps import rounded_step
from permille_agent.embed import TrainingBatches, mean_loss
from permille_lab.learning.runs import TextRun, person_run, text_run
from permille_lab.measuring.cells import Cells, Result, settings_parser
from permille_lab.measuring.machine import machine, timed
from permille_lab.measuring.model_packages import (
    SMOLLM2_FILE,
    Sources,
    folder_from_environment,
    model_package,
)
from permille_lab.people.user_texts import Collection, cohort, read_users
from permille_lab.real.subjects import LEAST_CHARACTERS, gardener, general_batches, general_of

GARDENER = "gardener"
GROUPS = "one_sided, groups"
KINDS = {
    GROUPS: EstimatorKind.ONE_SIDED,
    "one_sided": EstimatorKind.ONE_SIDED,
    "two_sided": EstimatorKind.SPSA,
}
ADAPTERS = {
    f"lora-fa-{rank}": ChosenAdapter(kind=AdapterKind.LORA_FA, rank=rank, alpha=16) for rank in (1, 4)
}
"""Adapters that train only the matrix B."""
_ROWS = 2
_EPSILON_NORM = 0.5
_SHARES = 20
"""Number of fractional bits of the momentum's weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One zeroth-order method.

    Attributes:
        density: density of the mask, None for an adapter.
        normalised: if True, only the learning rate decides the length of a step. If False, the projected
            gradients also change it, and the rate is scaled by those of the first step.
        first_layer: first decoder layer with trained weights.
        norm: length of a step (FORMAT 3.6).
        directions: number of forward passes of a step. Several numbers are a schedule: each has an equal
            part of the budget.
        momentum: share of the velocity that remains in the next step.
    """

    density: float | None
    kind: str
    normalised: bool
    first_layer: int
    norm: float
    seed: int = 0
    adapter: str | None = None
    directions: tuple[int, ...] = (16,)
    momentum: float = 0.0
    person: str = GARDENER

    def settings(self) -> dict[str, Any]:
        """Return the settings that identify the cell.

        Later settings are left out at their defaults, since older cells do not have them.
        """
        added = {"adapter", "directions", "momentum", "person"}
        same = {field.name for field in fields(self) if getattr(self, field.name) == field.default}
        return {name: value for name, value in asdict(self).items() if name not in added & same}


def measure(run: TextRun, contender: Contender, row_passes: int, general: Sequence[Batch] = ()) -> Result:
    """Take steps until the layer passes of `row_passes` rows are used. Return losses, steps and seconds."""
    layers, engine = int(run.package.config["num_hidden_layers"]), run.engine
    base_K = run.package.values()
    logs: list[_Log] = []

    def steps() -> None:
        for part, directions in enumerate(contender.directions, start=1):
            values_K, step = (logs[-1].values_K, logs[-1].end) if logs else (base_K, 0)
            descent = descent_of(run, contender, layers, directions, values_K)
            last = begun + row_passes * layers * part / len(contender.directions)
            logs.append(_log(run, contender, descent, step, last))

    loss_before = run.loss()
    begun = engine.layer_passes
    spent = timed(steps)
    passes, values_K, moving = engine.layer_passes - begun, logs[-1].values_K, logs[-1].moving
    found = {
        "k": run.package.k,
        "moving": moving.stop - moving.start,
        "loss_before": loss_before,
        "loss_after": mean_loss(engine, values_K, run.prepared.select),
        "steps": logs[-1].end,
        "layer_passes": passes,
        "cpu_s": round(spent.cpu_s, 1),
        "machine": machine(),
    }
    if general:
        found["general_rise"] = general_of(engine, values_K, general) - general_of(engine, base_K, general)
    return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Log:
    """The end of a log: the values of its state, the number of the next step, and the moving weights."""

    values_K: NDArray[np.float32]
    end: int
    moving: slice


def _log(run: TextRun, contender: Contender, descent: Descent, first: int, last_pass: float) -> _Log:
    """Take steps from number `first`, until the engine has done `last_pass` layer passes in all."""
    batches = TrainingBatches(run.prepared.train, batch_rows=_ROWS, seed=contender.seed)
    rows, s_K, step = list[tuple[int, ...]](), np.zeros(run.package.k, np.int64), first
    while run.engine.layer_passes < last_pass:
        loss, slope_Q = estimate(run.engine, batches(step), descent, s_K, step)
        if step == first and not contender.normalised:
            rate = descent.header.learning_rate / float(np.sqrt(np.mean(np.square(slope_Q))))
            descent = replace(descent, header=replace(descent.header, learning_rate=rate))
        record = rounded_step(loss, slope_Q, descent.header, step, normalised=contender.normalised)
        rows.append(record.coefficients)
        s_K = replay(descent.header, with_momentum(np.array(rows), contender.momentum), start=first)
        step += 1
    values_K = values(descent.w_base_K, s_K, descent.header.step_unit_exponent)
    return _Log(values_K=values_K, end=step, moving=descent.header.moving)


def with_momentum(c_TQ: NDArray[np.int64], momentum: float) -> NDArray[np.int64]:
    """Return the coefficients of the state after T steps with momentum (heavy ball).

    Step t has moved the state by a share `1 - momentum^(T - t)` of its coefficient `c_t`. The shares are
    integers:

        share[n] = round((1 - momentum^n) 2^20)
        state    = sum_t ((c_t share[T - t] + 2^19) >> 20) z_t

    The state is exact in any order of the sum. With a decaying integer velocity it would not be.
    """
    if not momentum:
        return c_TQ
    share_T = np.rint((1 - momentum ** np.arange(len(c_TQ), 0, -1.0)) * (1 << _SHARES)).astype(np.int64)
    return (c_TQ * share_T[:, None] + (1 << (_SHARES - 1))) >> _SHARES


def descent_of(
    run: TextRun, contender: Contender, layers: int, directions: int, w_base_K: NDArray[np.float32]
) -> Descent:
    estimator = KINDS[contender.kind]
    queries = directions // 2 if estimator is EstimatorKind.SPSA else directions
    package = run.package
    first_tensor = contender.first_layer * (len(package.counts) // layers)
    moving = sum(package.counts[first_tensor:])
    rate = contender.norm * float(np.sqrt(queries / moving))
    header = LogHeader(
        package_digest=package.digest,
        mask_digest=package.mask_digest,
        seed=contender.seed,
        estimator=estimator,
        directions=DirectionKind.GROUPS if contender.kind == GROUPS else DirectionKind.RADEMACHER,
        queries=queries,
        epsilon=_EPSILON_NORM / float(np.sqrt(moving)),
        learning_rate=rate,
        schedule=Schedule.CONSTANT,
        total_steps=1 << 20,
        step_unit_exponent=0,
        counts=package.counts,
        first_tensor=first_tensor,
    )
    exponent = step_unit_exponent_for(rate, 1.0, queries, header.sigma)
    return Descent(header=replace(header, step_unit_exponent=exponent), w_base_K=w_base_K)


def planned(options: argparse.Namespace, people: Sequence[str]) -> Iterator[Contender]:
    """Yield every contender: first all kinds on the gardener's notes, then those with one changed setting."""
    lengths = (True, False) if options.plain else (True,)
    trained = [(density, None) for density in options.density] + [(None, name) for name in options.adapter]
    for (density, adapter), kind, first, norm, normalised in product(
        trained, options.kind, options.first_layer, options.norm, lengths
    ):
        yield Contender(
            density=density, adapter=adapter, kind=kind, normalised=normalised, first_layer=first, norm=norm
        )
    for density, adapter in trained:
        plain = Contender(
            density=density,
            adapter=adapter,
            kind=GROUPS,
            normalised=True,
            first_layer=0,
            norm=options.norm[0],
        )
        yield from (replace(plain, directions=directions) for directions in options.directions)
        yield from (replace(plain, momentum=momentum) for momentum in options.momentum)
        yield from (replace(plain, person=person) for person in people)


def main() -> None:
    """Measure the missing cells."""
    parser = settings_parser(__doc__, "zeroth-order")
    parser.add_argument("--gguf", type=Path, default=SMOLLM2_FILE)
    parser.add_argument("--row-passes", type=int, default=4800, help="budget of a cell: passes of one row")
    parser.add_argument("--density", type=float, nargs="*", default=[1e-5, 1e-4, 1e-3])
    parser.add_argument("--adapter", choices=ADAPTERS, nargs="*", default=list(ADAPTERS))
    parser.add_argument("--kind", choices=KINDS, nargs="*", default=list(KINDS))
    parser.add_argument("--first-layer", type=int, nargs="+", default=[0, 15])
    parser.add_argument("--norm", type=float, nargs="+", default=[0.5])
    parser.add_argument(
        "--directions", type=_numbers, nargs="*", default=[(4,), (64,), (4, 16), (16, 64)],
        help="forward passes of a step; 4,16 is a schedule",
    )  # fmt: skip
    parser.add_argument("--momentum", type=float, nargs="*", default=[0.5, 0.9])
    parser.add_argument("--people", type=int, default=3, help="number of authors of tweets")
    parser.add_argument("--plain", action="store_true", help="also steps that are not normalised")
    options = parser.parse_args()
    data, cells = folder_from_environment("PERMILLE_DATA"), Cells(options.cells)
    model = model_folder(options.gguf, options.folder)
    sources, general = Sources(models=model.parent, data=data), general_batches(model, data)
    authors = {}
    if options.people:
        everybody = cohort(read_users(data, Collection.LAMP7).users, least_characters=LEAST_CHARACTERS)
        authors = {user.name: user.documents for user in everybody[: options.people]}

    @cache
    def opened(density: float | None, adapter: str | None, person: str) -> TextRun:
        trained = density if adapter is None else ADAPTERS[adapter]
        package = model_package(
            sources, model.name, options.folder, trained=trained, embeddings=Embeddings.Q8_0
        )
        if person in authors:
            folder = options.folder / "people"
            return person_run(package, authors[person], folder, seed=0, threads=options.threads)
        documents = gardener().documents
        return text_run(package, documents, options.folder / "zeroth-order", seed=0, threads=options.threads)

    def measured(contender: Contender) -> Result:
        run = opened(contender.density, contender.adapter, contender.person)
        return measure(run, contender, options.row_passes, general)

    for contender in planned(options, list(authors)):
        settings = contender.settings() | {"row_passes": options.row_passes}
        cells.once("zeroth order", settings, partial(measured, contender))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


if __name__ == "__main__":
    main()

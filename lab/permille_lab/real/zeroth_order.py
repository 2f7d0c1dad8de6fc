"""Compare zeroth orders on SmolLM2 at equal layer passes: one line a cell, and a stopped run goes on.

    PERMILLE_DATA=DIR python -m permille_lab.real.zeroth_order --row-passes 160 --density 1e-5 1e-4

Every cell takes steps on the gardener's notes until the engine has done as many layer passes as the budget
allows, and tells the loss on held-out notes before and after. What differs is the number of values, the
estimator, whether a step's length is the rate's alone (FZOO) or the losses' too, and the first layer that is
trained. A step's length is `norm`: where it starts is the agent's own rule.

# Legend: K masked weights, Q directions.
"""

from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np

from permille.choices import Embeddings, EstimatorKind
from permille.models.gguf.folder import model_folder
from permille.zo.estimators import Descent, estimate
from permille.zo.header import DirectionKind, LogHeader, Schedule
from permille.zo.lattice import step_unit_exponent_for, values
from permille.zo.steps import apply_record, rounded_step
from permille_agent.embed import TrainingBatches, mean_loss
from permille_lab.learning.runs import TextRun, text_run
from permille_lab.measuring.cells import Cells, Result, settings_parser
from permille_lab.measuring.machine import machine, timed
from permille_lab.measuring.model_packages import (
    SMOLLM2_FILE,
    Sources,
    folder_from_environment,
    model_package,
)
from permille_lab.real.subjects import gardener

_GROUPS = "one_sided, groups"
_KINDS = {
    _GROUPS: (EstimatorKind.ONE_SIDED, 16),
    "one_sided": (EstimatorKind.ONE_SIDED, 16),
    "two_sided": (EstimatorKind.SPSA, 8),
}
"""Estimators, with as many passes a step."""
_ROWS = 2
_EPSILON_NORM = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One zeroth order.

    Attributes:
        normalised: the rate alone says how long a step is; else the losses' differences do, too, and the rate
            fits the first of them.
        norm: length of a step by the rule of the agent's search.
    """

    density: float
    kind: str
    normalised: bool
    first_layer: int
    norm: float
    seed: int = 0


def measure(run: TextRun, contender: Contender, row_passes: int) -> Result:
    """Take steps until the layer passes of so many rows are used up; returns losses, steps and seconds."""
    layers, engine = int(run.package.config["num_hidden_layers"]), run.engine
    descent = _descent(run, contender, layers)
    s_K = np.zeros(run.package.k, np.int64)
    batches = TrainingBatches(run.prepared.train, batch_rows=_ROWS, seed=contender.seed)
    loss_before, begun, step = run.loss(), engine.layer_passes, 0

    def steps() -> None:
        nonlocal descent, step
        while engine.layer_passes - begun < row_passes * layers:
            loss, slope_Q = estimate(engine, batches(step), descent, s_K, step)
            if not step and not contender.normalised:
                rate = descent.header.learning_rate / float(np.sqrt(np.mean(np.square(slope_Q))))
                descent = replace(descent, header=replace(descent.header, learning_rate=rate))
            record = rounded_step(loss, slope_Q, descent.header, step, normalised=contender.normalised)
            apply_record(s_K, record, descent.header)
            step += 1

    spent = timed(steps)
    values_K = values(descent.w_base_K, s_K, descent.header.step_unit_exponent)
    return {
        "k": run.package.k,
        "moving": descent.header.moving.stop - descent.header.moving.start,
        "loss_before": loss_before,
        "loss_after": mean_loss(engine, values_K, run.prepared.select),
        "steps": step,
        "layer_passes": engine.layer_passes - begun,
        "cpu_s": round(spent.cpu_s, 1),
        "machine": machine(),
    }


def _descent(run: TextRun, contender: Contender, layers: int) -> Descent:
    estimator, queries = _KINDS[contender.kind]
    package = run.package
    groups = contender.kind == _GROUPS
    first_tensor = contender.first_layer * (len(package.counts) // layers)
    moving = sum(package.counts[first_tensor:])
    rate = contender.norm * float(np.sqrt(queries / moving))
    header = LogHeader(
        package_digest=package.digest,
        mask_digest=package.mask_digest,
        seed=contender.seed,
        estimator=estimator,
        directions=DirectionKind.GROUPS if groups else DirectionKind.RADEMACHER,
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
    return Descent(header=replace(header, step_unit_exponent=exponent), w_base_K=package.values())


def main() -> None:
    """Measure what is missing."""
    parser = settings_parser(__doc__, "zeroth-order")
    parser.add_argument("--gguf", type=Path, default=SMOLLM2_FILE)
    parser.add_argument("--notes", type=Path, default=Path("examples/gardener/notes.txt"))
    parser.add_argument("--row-passes", type=int, default=4800, help="forward passes of a row, of a cell")
    parser.add_argument("--density", type=float, nargs="+", default=[1e-5, 1e-4, 1e-3])
    parser.add_argument("--kind", choices=_KINDS, nargs="+", default=list(_KINDS))
    parser.add_argument("--first-layer", type=int, nargs="+", default=[0, 15])
    parser.add_argument("--norm", type=float, nargs="+", default=[0.5])
    parser.add_argument("--plain", action="store_true", help="steps as long as the losses say, too")
    options = parser.parse_args()
    data, cells = folder_from_environment("PERMILLE_DATA"), Cells(options.cells)
    model = model_folder(options.gguf, options.folder)
    sources, documents = Sources(models=model.parent, data=data), gardener(options.notes).documents
    for density in options.density:
        package = model_package(
            sources, model.name, options.folder, trained=density, embeddings=Embeddings.Q8_0
        )
        run = text_run(package, documents, options.folder / "zeroth-order", seed=0, threads=options.threads)
        lengths = (True, False) if options.plain else (True,)
        for kind, first, norm, normalised in product(
            options.kind, options.first_layer, options.norm, lengths
        ):
            contender = Contender(
                density=density, kind=kind, normalised=normalised, first_layer=first, norm=norm
            )
            settings = asdict(contender) | {"row_passes": options.row_passes}
            cells.once("zeroth order", settings, partial(measure, run, contender, options.row_passes))


if __name__ == "__main__":
    main()

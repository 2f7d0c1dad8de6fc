"""Wall time to the held-out loss that MeZO on all weights reaches in 2,000 steps.

    PERMILLE_MODELS=DIR PERMILLE_DATA=DIR python -m permille_lab.benchmarks.time_to_loss --output docs/results

One speaker of Shakespeare's plays stands for a user; held-out is the select split, on which every method
chooses its learning rate. MeZO has 16 rows of 128 tokens a step, as in the papers, and so many tuning trials
as our search may make at most; ours is the agent with its defaults, which reads as many tokens forward in a
step. "MeZO" is our best dense loop: rows packed without padding, logits of targets alone, weights changed in
place. "Plain MeZO" is the published loop on transformers, with the learning rate of the first; it does the
same arithmetic, so with `--plain-steps` only its pace is measured, and the page says so. MeZO trains the
full-precision model, ours the 4-bit package, NF4 or for the engine light-int8 int4: bases differ by what
quantization costs. With `--linear`, MeZO
also trains the linear weights alone, which is what a package can change: embeddings and norms stay.

Finished runs are kept in `--cells`.
"""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from permille.engines.factory import AUTO, LIGHT_INT8
from permille.models.loading import load_model
from permille.quantization import Scheme
from permille_agent.text.rows import Row, TrainingBatches
from permille_agent.training.options import TrainOptions
from permille_agent.training.step_size import MAX_RACES
from permille_lab.benchmarks.cells import Cells, Result, Settings
from permille_lab.benchmarks.dense import batch_loss, rows_loss
from permille_lab.benchmarks.loss_page import INT8, LEARNED, LINEAR, OURS, PLAIN, page
from permille_lab.benchmarks.loss_page import MEZO as FIGURE
from permille_lab.benchmarks.loss_pictures import write
from permille_lab.benchmarks.machine import machine
from permille_lab.benchmarks.mezo import Mezo
from permille_lab.benchmarks.model_packages import Sources, sources_from_environment
from permille_lab.benchmarks.plain_mezo import PlainMezo
from permille_lab.benchmarks.settings import settings_parser
from permille_lab.benchmarks.trajectories import BATCH_ROWS, agent_run, descend, lowest
from permille_lab.benchmarks.user_text import DENSITIES, UserText, user_text

SPEAKER = "GLOUCESTER"
EPSILON = 1e-3
LEARNING_RATES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3)
EVALUATIONS = 40


def mezo(user: UserText, *, learning_rate: float, steps: int, threads: int, linear: bool = False) -> Result:
    """Our dense loop; `linear`: on the weights alone that the package could mask."""
    torch.set_num_threads(threads)
    model = load_model(user.model_folder)
    names = {tensor.name for tensor in user.package.manifest.tensors}
    moved = [weight for name, weight in model.named_parameters() if name in names or not linear]
    optimizer = Mezo(moved, epsilon=EPSILON, learning_rate=learning_rate)
    batches = TrainingBatches(user.prepared.train, batch_rows=BATCH_ROWS, seed=user.seed)

    def step(number: int) -> None:
        optimizer.step(partial(batch_loss, model, batches(number)), number)

    return _descended(user, model, step, steps)


def plain(user: UserText, *, learning_rate: float, steps: int, threads: int) -> Result:
    """The published loop."""
    torch.set_num_threads(threads)
    model = load_model(user.model_folder)
    loop = PlainMezo(
        model,
        _unpacked(user),
        batch_rows=BATCH_ROWS,
        epsilon=EPSILON,
        learning_rate=learning_rate,
        seed=user.seed,
    )
    return _descended(user, model, loop.step, steps)


def _unpacked(user: UserText) -> list[Row]:
    """The training rows as one document each."""
    rows = []
    for row in user.prepared.train:
        starts = [0, *(i for i in range(1, len(row.ids_T)) if row.document_T[i] != row.document_T[i - 1])]
        for begin, end in zip(starts, [*starts[1:], len(row.ids_T)], strict=True):
            part = slice(begin, end)
            rows.append(Row(row.ids_T[part], row.target_T[part], row.bytes_T[part], row.document_T[part]))
    return [row for row in rows if row.target_T.any()]


def _descended(user: UserText, model: Any, step: Any, steps: int) -> Result:
    before = machine()
    every = max(1, steps // EVALUATIONS)
    points = descend(step, lambda: rows_loss(model, user.prepared.select), steps=steps, every=every)
    return {"points": points, "machine": {"before": before, "after": machine()}}


def _ours(user: UserText, *, steps: int, threads: int, engine: str) -> Result:
    before = machine()
    found = agent_run(user, steps=steps, threads=threads, options={}, engine=engine)
    return found | {"machine": {"before": before, "after": machine()}}


def run(
    cells: Cells,
    sources: Sources,
    packages: Path,
    *,
    model: str,
    seed: int,
    steps: int,
    plain_steps: int,
    our_steps: int,
    trial_steps: int,
    threads: int,
    linear: bool = False,
) -> None:
    """The runs of one model and seed that are missing."""
    common: Settings = {"model": model, "speaker": SPEAKER, "seed": seed, "threads": threads}

    def tuned(loop: Callable[..., Result], what: str) -> float:
        losses = {}
        for rate in LEARNING_RATES[:MAX_RACES]:
            settings = common | {"what": what, "steps": trial_steps, "learning_rate": rate}
            trial = partial(loop, learning_rate=rate, steps=trial_steps, threads=threads)
            losses[rate] = lowest(cells.once(FIGURE, settings, trial)["points"])["loss"]
        return min(losses, key=lambda rate: float(losses[rate]))

    with tempfile.TemporaryDirectory() as name:
        user = user_text(sources, model, SPEAKER, seed, packages, Path(name))
        if linear:
            loop = partial(mezo, user, linear=True)
            rate = tuned(loop, f"trial of {LINEAR}")
            settings = common | {"what": LINEAR, "steps": steps, "learning_rate": rate}
            cells.once(FIGURE, settings, partial(loop, learning_rate=rate, steps=steps, threads=threads))
        rate = tuned(partial(mezo, user), "trial")
        # Few steps bear a rate that many do not: as our trainer does, a run that diverged begins anew below.
        for bold in [rate, *(lower for lower in reversed(LEARNING_RATES) if lower < rate)]:
            rate = bold
            settings = common | {"what": "MeZO", "steps": steps, "learning_rate": rate}
            once = partial(mezo, user, learning_rate=rate, steps=steps, threads=threads)
            points = cells.once(FIGURE, settings, once)["points"]
            if points[-1]["loss"] < points[0]["loss"]:
                break
        settings = common | {"what": PLAIN, "steps": plain_steps, "learning_rate": rate}
        once = partial(plain, user, learning_rate=rate, steps=plain_steps, threads=threads)
        cells.once(FIGURE, settings, once)
    for what in OURS:
        with tempfile.TemporaryDirectory() as name:
            learned, int8 = what == LEARNED, what == INT8
            scheme = Scheme.INT4 if int8 else Scheme.NF4
            user = user_text(
                sources, model, SPEAKER, seed, packages, Path(name), learned=learned, scheme=scheme
            )
            # With the options in its name, a run of former defaults is not taken for one of today's.
            options = TrainOptions(seed=seed, steps=our_steps).definition()
            settings = common | {"what": what, "steps": our_steps, "options": options}
            engine = LIGHT_INT8 if int8 else AUTO
            cells.once(
                FIGURE, settings, partial(_ours, user, steps=our_steps, threads=threads, engine=engine)
            )


def main() -> None:
    """Measure what is missing and write the page."""
    parser = settings_parser(__doc__)
    parser.add_argument("--model", choices=DENSITIES, action="append", help="only these")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=2000, help="of MeZO")
    parser.add_argument("--linear", action="store_true", help="MeZO on the linear weights alone, too")
    parser.add_argument("--plain-steps", type=int, help="of plain MeZO, where its pace is enough")
    parser.add_argument("--our-steps", type=int, default=600)
    parser.add_argument("--trial-steps", type=int, default=200)
    parser.add_argument(
        "--output", type=Path, help="folder for time_to_loss.json, time_to_loss.md and figures"
    )
    arguments = parser.parse_args()
    cells = Cells(arguments.cells)
    sources = sources_from_environment()
    for model in arguments.model or list(DENSITIES):
        for seed in arguments.seeds:
            run(
                cells,
                sources,
                arguments.folder / "models",
                model=model,
                seed=seed,
                steps=arguments.steps,
                plain_steps=arguments.plain_steps or arguments.steps,
                our_steps=arguments.our_steps,
                trial_steps=arguments.trial_steps,
                threads=arguments.threads,
                linear=arguments.linear,
            )
    if arguments.output is None:
        print(page(cells))
        return
    write(arguments.output, cells)


if __name__ == "__main__":
    main()

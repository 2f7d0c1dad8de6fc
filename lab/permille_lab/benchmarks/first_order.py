"""First-order training on the same 4-bit base: time and peak memory to three held-out losses.

    PERMILLE_MODELS=DIR PERMILLE_DATA=DIR python -m permille_lab.benchmarks.first_order --output docs/results

Against the agent's default: LoRA (peft, r = 8 on all linear layers) and AdamW on the package's own sparse
values, both checkpointed, in micro-batches of 2 rows, with a learning rate from a grid of trials on another
division of the text (another seed), which goes on while the best is on its edge. First order is evaluated
after every step, ours at steps that grow by a fifth. All start from the same base, which each run checks.
Every run is a process of its own.

Finished runs are kept in `--cells`; the page is that of `time_to_loss`, so give both the same file.
"""

import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from permille.errors import InputError
from permille_agent.training.options import TrainOptions
from permille_lab.benchmarks.cells import Cells, Result, Settings
from permille_lab.benchmarks.first_order_child import METHODS
from permille_lab.benchmarks.loss_page import FIRST_ORDER as FIGURE
from permille_lab.benchmarks.loss_page import OURS, page
from permille_lab.benchmarks.loss_pictures import write
from permille_lab.benchmarks.machine import machine
from permille_lab.benchmarks.model_packages import sources_from_environment
from permille_lab.benchmarks.one_step import run_child
from permille_lab.benchmarks.settings import settings_parser
from permille_lab.benchmarks.time_to_loss import SPEAKER
from permille_lab.benchmarks.trajectories import lowest
from permille_lab.benchmarks.user_text import DENSITIES, user_text

TUNING_SEED = 1000
"""Beside the seed of the run."""
GRID_FACTOR, EXTENSIONS = 10**0.5, 4
LEARNING_RATES = {"LoRA": (3e-4, 1e-3, 3e-3, 1e-2), "sparse values": (1e-3, 3e-3, 1e-2, 3e-2)}


def measure(
    packages: Path,
    *,
    method: str,
    model: str,
    seed: int,
    steps: int,
    every: int,
    threads: int,
    learning_rate: float,
) -> Result:
    """One child.

    Raises:
        InputError: it failed; a method that cannot run is no result.
    """
    before = machine()
    with tempfile.TemporaryDirectory() as home:
        options = {
            "method": method,
            "model": model,
            "speaker": SPEAKER,
            "seed": seed,
            "packages": packages,
            "home": Path(home) / "home",
            "steps": steps,
            "every": every,
            "threads": threads,
            "learning-rate": learning_rate,
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        found = run_child([sys.executable, "-m", "permille_lab.benchmarks.first_order_child", *words])
    if "failed" in found:
        raise InputError(f"expected {method} to train, got {found['said']}")
    return found | {"machine": {"before": before, "after": machine()}}


def _make_package(packages: Path, model: str, seed: int, *, learned: bool) -> None:
    """Here, so that no child makes it, which takes torch and hundreds of megabytes."""
    with tempfile.TemporaryDirectory() as home:
        user_text(sources_from_environment(), model, SPEAKER, seed, packages, Path(home), learned=learned)


def best_rate(tried: Callable[[float], float], grid: Sequence[float]) -> float:
    """The rate of the lowest loss; the grid goes on, by `EXTENSIONS` at most, while that is on its edge."""
    losses = {rate: tried(rate) for rate in grid}
    for _ in range(EXTENSIONS):
        best = min(losses, key=lambda rate: losses[rate])
        if best not in (min(losses), max(losses)):
            break
        beyond = best * GRID_FACTOR if best == max(losses) else best / GRID_FACTOR
        beyond = float(f"{beyond:.3g}")
        losses[beyond] = tried(beyond)
    return min(losses, key=lambda rate: losses[rate])


def run(
    cells: Cells,
    packages: Path,
    *,
    model: str,
    seed: int,
    our_steps: int,
    steps: int,
    trial_steps: int,
    threads: int,
    methods: Sequence[str] = METHODS,
) -> None:
    """The runs of one model and seed that are missing."""
    common: Settings = {"model": model, "speaker": SPEAKER, "seed": seed, "threads": threads}
    for learned in (False, True):
        if any(("learned" in method) is learned for method in methods):
            _make_package(packages, model, seed, learned=learned)
    for method in methods:
        chosen = 0.0
        if method in LEARNING_RATES:

            def tried(rate: float, method: str = method) -> float:
                settings = common | {"what": "trial", "method": method, "steps": trial_steps, "rate": rate}
                trial = partial(
                    measure,
                    packages,
                    method=method,
                    model=model,
                    seed=seed + TUNING_SEED,
                    steps=trial_steps,
                    every=trial_steps,
                    threads=threads,
                    learning_rate=rate,
                )
                return float(lowest(cells.once(FIGURE, settings, trial)["points"])["loss"])

            chosen = best_rate(tried, LEARNING_RATES[method])
        count = our_steps if method in OURS else steps
        settings = common | {"what": "run", "method": method, "steps": count, "rate": chosen}
        if method in OURS:
            settings["options"] = TrainOptions(seed=seed, steps=count).definition()
        cells.once(
            FIGURE,
            settings,
            partial(
                measure,
                packages,
                method=method,
                model=model,
                seed=seed,
                steps=count,
                every=1,
                threads=threads,
                learning_rate=chosen,
            ),
        )


def main() -> None:
    """Measure what is missing and write the page."""
    parser = settings_parser(__doc__)
    parser.add_argument("--model", choices=DENSITIES, action="append", help="only these")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--method", choices=METHODS, action="append", help="only these")
    parser.add_argument("--our-steps", type=int, default=600)
    parser.add_argument("--steps", type=int, default=80, help="of first-order training")
    parser.add_argument("--trial-steps", type=int, default=20)
    parser.add_argument(
        "--output", type=Path, help="folder for time_to_loss.json, time_to_loss.md and figures"
    )
    arguments = parser.parse_args()
    cells = Cells(arguments.cells)
    for model in arguments.model or list(DENSITIES):
        for seed in arguments.seeds:
            run(
                cells,
                arguments.folder / "models",
                model=model,
                seed=seed,
                our_steps=arguments.our_steps,
                steps=arguments.steps,
                trial_steps=arguments.trial_steps,
                threads=arguments.threads,
                methods=arguments.method or METHODS,
            )
    if arguments.output is None:
        print(page(cells))
        return
    write(arguments.output, cells)


if __name__ == "__main__":
    main()

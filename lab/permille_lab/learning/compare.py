"""Compare the time to learn of the agent, first order and MeZO: `make bench-learning`.

    PERMILLE_MODELS=DIR PERMILLE_DATA=DIR python -m permille_lab.learning.compare --people 1 --seeds 0

The texts are those of one speaker in Shakespeare's plays and of people with tweets. The tweets are too few
for the agent's splits, so `person_run` divides them. The select split is the held-out text.

These are the contenders:

- Those of `OURS` are the agent's training of the NF4 package.
- MeZO trains all weights of the original model in float32.
- LoRA (r = 8, peft) trains a float32 model with the decoded weights of the package.
- `the same values, AdamW` trains the masked weights by the engine's gradient.
- Those of `TRAINED` are the agent's training of packages with other trained numbers.

The step sizes of MeZO, LoRA and AdamW are the best ones on the same held-out text, which favours these
methods. Every run is a separate process with one thread. Seconds are processor time without evaluations. The
peak of memory is that of the process.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from permille.choices import AdapterKind, EstimatorKind
from permille.errors import InputError
from permille.package.build import ChosenAdapter
from permille_lab.learning.runs import options_for, person_run, text_run
from permille_lab.measuring.cells import Cells, Result, Settings, settings_parser
from permille_lab.measuring.machine import machine, resident
from permille_lab.measuring.model_packages import (
    DENSITIES,
    Sources,
    model_package,
    sources_from_environment,
)
from permille_lab.people.user_texts import Collection, Document, cohort, read_users

SPEAKER = "GLOUCESTER"
FORWARD_ONLY, STATE = "forward-only", "gradient, a state"
OURS: Mapping[str, tuple[EstimatorKind, int, int, int]] = {
    STATE: (EstimatorKind.GRADIENT, 0, 4, 80),
    FORWARD_ONLY: (EstimatorKind.ONE_SIDED, 16, 2, 100),
}
"""Estimator, queries (0 for the gradient), rows of a step, and number of steps, by contender."""
TRAINED: Mapping[str, float | ChosenAdapter] = {
    "37 thousand values": 0.0064,
    "LoRA of rank 1": ChosenAdapter(kind=AdapterKind.LORA, rank=1, alpha=16),
    "LoRA-FA of rank 2": ChosenAdapter(kind=AdapterKind.LORA_FA, rank=2, alpha=16),
    "150 thousand values": 0.0259,
    "LoRA of rank 4": ChosenAdapter(kind=AdapterKind.LORA, rank=4, alpha=16),
    "LoRA-FA of rank 8": ChosenAdapter(kind=AdapterKind.LORA_FA, rank=8, alpha=16),
}
"""Density or adapter of a package, by contender. All train as `STATE` does.

The sparse values and the adapters of each size have about equally many numbers.
"""
THEIRS = {"the same values, AdamW": (80, 20), "LoRA, AdamW": (80, 20), "MeZO": (100, 10)}
"""Numbers of steps of a run and of a trial of a step size."""
_LEAST_CHARACTERS = 8_000


def texts(sources: Sources, people: int) -> dict[str, tuple[Document, ...]]:
    """Return the texts of the speaker, and of the first people with many tweets, by name."""
    speakers = {user.name: user for user in read_users(sources.data, Collection.SHAKESPEARE).users}
    tweets = cohort(read_users(sources.data, Collection.LAMP7).users, least_characters=_LEAST_CHARACTERS)
    found = {SPEAKER: speakers[SPEAKER].documents}
    return found | {f"tweets of {user.name}": user.documents for user in tweets[:people]}


def measure(folder: Path, settings: Settings, documents: Sequence[Document]) -> Result:
    """Measure one contender on one text, in a child process.

    Raises:
        InputError: the child process failed.
    """
    with tempfile.TemporaryDirectory() as name:
        text = Path(name) / "text.json"
        text.write_text(json.dumps([dict(document) for document in documents]))
        command = [sys.executable, "-m", "permille_lab.learning.compare", "--child", str(text)]
        command += ["--settings", json.dumps(settings), "--folder", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(f"The training of {settings['method']} failed: {done.stderr[-800:]}")
    found: Result = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(
    sources: Sources, folder: Path, settings: Settings, documents: Sequence[Document], name: Path
) -> Result:
    """Measure one contender on one text, in this process."""
    method, seed, steps = settings["method"], settings["seed"], settings["steps"]
    package = model_package(sources, settings["model"], folder, trained=TRAINED.get(method))
    opened = text_run if settings["text"] == SPEAKER else person_run
    run = opened(package, documents, name / "text", seed=seed, threads=1)
    if method in OURS or method in TRAINED:
        estimator, queries, rows, _ = OURS.get(method, OURS[STATE])
        options = options_for(package, seed=seed, steps=steps)
        options = replace(options, estimator=estimator, queries=queries, batch_rows=rows)
        found = run.train(options, name / "run") | {
            "bytes": _kept_bytes(name / "run"),
            "restarts": len([*(name / "run").glob("descent-*.jsonl")]) - 1,
        }
    else:
        import torch

        from permille_lab.learning.methods import METHODS, best_rate, descend, final_loss

        torch.set_num_threads(1)
        contender = METHODS[method]
        model = sources.models / settings["model"]
        begin = time.process_time()
        rate = best_rate(partial(final_loss, contender, run, model, steps=THEIRS[method][1]), contender.grid)
        search_s = time.process_time() - begin
        points = descend(contender.make(run, model, rate), run, steps=steps, every=4, rows=contender.rows)
        found = {"points": points, "search_s": round(search_s, 1), "rate": rate}
    return found | {"k": package.k, "peak_bytes": resident()["VmHWM"], "machine": machine()}


def _kept_bytes(run: Path) -> int:
    """Return the bytes of a run's largest journal or state."""
    kept = [path for kind in ("journal", "state") for path in run.glob(f"descent-*.{kind}")]
    return max((path.stat().st_size for path in kept), default=0)


def main() -> None:
    """Measure the missing cells."""
    parser = settings_parser(__doc__, "learning")
    parser.add_argument("--model", choices=DENSITIES, default="reference-7M")
    parser.add_argument("--people", type=int, default=3, help="number of people with tweets")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--method", action="append", choices=[*OURS, *THEIRS, *TRAINED], help="only these")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--settings", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sources = sources_from_environment()
    if options.child is not None:
        documents = json.loads(options.child.read_text())
        found = measured(sources, options.folder, options.settings, documents, options.child.parent)
        print(json.dumps(found))
        return
    cells = Cells(options.cells)
    of_text = texts(sources, options.people)
    for method in options.method or [*OURS, *THEIRS, *TRAINED]:
        # Make the package here, so that its time and memory do not count in a child.
        model_package(sources, options.model, options.folder, trained=TRAINED.get(method))
        for seed in options.seeds:
            for text, documents in of_text.items():
                steps = THEIRS[method][0] if method in THEIRS else OURS.get(method, OURS[STATE])[-1]
                settings = {
                    "model": options.model,
                    "text": text,
                    "seed": seed,
                    "method": method,
                    "steps": steps,
                }
                cells.once("learning", settings, partial(measure, options.folder, settings, documents))


if __name__ == "__main__":
    main()

"""Does an untuned agent make a model better on one person's text? `make bench-personalise`.

    PERMILLE_MODELS=DIR PERMILLE_DATA=DIR python -m permille_lab.people.personalise

A speaker of Shakespeare's plays stands for a user. Each run trains as the agent does, with its defaults;
losses are of a test split that nothing had looked at. The swap control reads another speaker's test split
under the same state: what it gains there is the kind of text, only the rest is the person.
"""

import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

from permille.package.reader import Package
from permille_agent.embed import TrainOptions, document_losses, personalise
from permille_lab.learning.runs import TextRun, options_for, text_run
from permille_lab.measuring.cells import Cells, Result, settings_parser
from permille_lab.measuring.model_packages import DENSITIES, model_package, sources_from_environment
from permille_lab.people.user_texts import Collection, User, read_users

SPEAKERS = ("GLOUCESTER", "DUKE VINCENTIO", "KING RICHARD II")
_STEPS = {"stories260K-hf": 200, "reference-7M": 160}


def measure(package: Package, users: dict[str, User], speaker: str, options: TrainOptions) -> Result:
    """One person, one seed: the state of a run on their text, on theirs and on another speaker's."""
    begun = time.process_time()
    other = SPEAKERS[(SPEAKERS.index(speaker) + 1) % len(SPEAKERS)]
    with tempfile.TemporaryDirectory() as name:
        own, swapped = (
            text_run(package, users[who].documents, Path(name) / who, seed=options.seed, threads=1)
            for who in (speaker, other)
        )
        found = personalise(package, own.engine, own.prepared, options, folder=Path(name) / "run")
    loss_base, improvement, error = _improvement(own, found.values_K)
    return {
        "k": package.k,
        "step": found.step,
        "loss_base": loss_base,
        "improvement": improvement,
        "standard_error": error,
        "cpu_seconds": round(time.process_time() - begun, 1),
        "swap": {"speaker": other, "improvement": _improvement(swapped, found.values_K)[1]},
    }


def _improvement(run: TextRun, values_K: np.ndarray) -> tuple[float, float, float]:
    """The base's loss on the test split, how much lower the state's is, and the standard error of that.

    Documents are the unit; the error is that of a ratio of sums (Cochran 1977, equation 6.4).
    """
    count = len(run.prepared.test_documents)
    base, own = (
        document_losses(run.engine, values, run.prepared.test, count)
        for values in (run.package.values(), values_K)
    )
    improvement = base.per_token - own.per_token
    left_D = base.nats_D - own.nats_D - improvement * base.tokens_D
    error = np.sqrt((left_D**2).sum() * count / (count - 1)) / base.tokens_D.sum()
    return base.per_token, float(improvement), float(error)


def main() -> None:
    """Measure what is missing."""
    parser = settings_parser(__doc__, "personalisation")
    parser.add_argument("--model", choices=DENSITIES, action="append", help="only these")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    sources, cells = sources_from_environment(), Cells(options.cells)
    users = {user.name: user for user in read_users(sources.data, Collection.SHAKESPEARE).users}
    for model in options.model or DENSITIES:
        package = model_package(sources, model, options.folder)
        for seed in options.seeds:
            for speaker in SPEAKERS:
                chosen = options_for(package, seed=seed, steps=_STEPS[model])
                settings = {
                    "model": model,
                    "density": DENSITIES[model],
                    "speaker": speaker,
                    "seed": seed,
                    "steps": _STEPS[model],
                }
                cells.once("personalisation", settings, partial(measure, package, users, speaker, chosen))


if __name__ == "__main__":
    main()

"""Does an untuned agent make a model better on one person's text? `make bench-personalise`.

    PERMILLE_MODELS=DIR PERMILLE_DATA=DIR python -m permille_lab.people.personalise

A speaker of Shakespeare's plays stands for a user. Each run goes through the agent as its command line does:
search, steps, judgement on a test split that nothing had looked at. The swap control reads another speaker's
test split under the same state: what it gains there is the kind of text, only the rest is the person.
"""

import json
import tempfile
import time
from functools import partial
from pathlib import Path

from permille.engines.factory import LIGHT, open_engine
from permille.errors import OperatorError
from permille.package.reader import Package
from permille_agent.embed import (
    RunContext,
    TrainOptions,
    document_losses,
    install_package,
    open_home,
    package_tokenizer,
    paired_bootstrap,
    personalise,
    prepare,
    read_documents,
)
from permille_agent.embed import run_training as train_agent
from permille_lab.measuring.cells import Cells, Result, settings_parser
from permille_lab.measuring.model_packages import DENSITIES, model_package, sources_from_environment
from permille_lab.people.user_texts import Collection, User, read_users

SPEAKERS = ("GLOUCESTER", "DUKE VINCENTIO", "KING RICHARD II")
_STEPS = {"stories260K-hf": 200, "reference-7M": 160}


def measure(package: Package, users: dict[str, User], speaker: str, options: TrainOptions) -> Result:
    """One person, one seed: the agent's own run, and the same state on another speaker's text."""
    begun = time.process_time()
    other = SPEAKERS[(SPEAKERS.index(speaker) + 1) % len(SPEAKERS)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = {
            who: _written(users[who], folder / f"{number}.jsonl")
            for number, who in enumerate((speaker, other))
        }
        home = open_home(folder / "home")
        install_package(home, package)
        context = RunContext(engine_of=partial(open_engine, name=LIGHT, threads=1))
        result = train_agent(home, [texts[speaker]], options, context)
        swap = _swap(package, texts, (speaker, other), options, folder / "run")
    decision, metrics = result.decision, result.metrics
    if decision is None or metrics is None:
        raise OperatorError(f"expected a decision, the run ended with {result.outcome}: {result.message}")
    # A run whose steps never beat the base on the select split is not judged: its state is the base.
    against = decision.against_base
    return {
        "k": package.k,
        "outcome": result.outcome.value,
        "loss_base": decision.loss_base,
        "improvement": against.improvement if against else 0.0,
        "standard_error": against.standard_error if against else None,
        "log_bytes": metrics.log_bytes,
        "cpu_seconds": round(time.process_time() - begun, 1),
        "swap": {"speaker": other, "improvement": swap},
    }


def _swap(
    package: Package, texts: dict[str, Path], pair: tuple[str, str], options: TrainOptions, folder: Path
) -> float:
    """The improvement that the first speaker's state brings on the second one's test split."""
    engine, tokenizer = open_engine(package, LIGHT, threads=1), package_tokenizer(package)
    own, other = (
        prepare(read_documents([texts[who]])[0], tokenizer, seed=options.seed, row_tokens=options.row_tokens)
        for who in pair
    )
    state_K = personalise(package, engine, own, options, folder=folder).values_K
    base, swapped = (
        document_losses(engine, values_K, other.test, len(other.test_documents))
        for values_K in (package.values(), state_K)
    )
    return paired_bootstrap(base.nats_D, swapped.nats_D, base.tokens_D, seed=0).improvement


def _written(user: User, path: Path) -> Path:
    path.write_text("".join(json.dumps(dict(document)) + "\n" for document in user.documents))
    return path


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
        positions = int(package.config["max_position_embeddings"])
        for seed in options.seeds:
            for speaker in SPEAKERS:
                chosen = TrainOptions(seed=seed, steps=_STEPS[model]).within(positions)
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

"""Train the agent on people's tweets, each person with a new home: `make bench-people`.

    PERMILLE_MODELS=DIR PERMILLE_DATA=DIR python -m permille_lab.people.users --users 20 --seeds 0 1

A held-out part of each person's text judges all states. On the rest, the agent trains as its command does
(`run_training`) and decides whether to adopt. Two other trainings are measured for comparison:

- forward-only: forward passes only.
- pooled: the gradient on text of other people, with the same numbers of tokens and steps.

Each seed also divides the text differently. Seconds are processor time and include the evaluations of a run.
"""

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from permille.choices import EstimatorKind
from permille.engines.factory import open_engine
from permille.errors import InputError
from permille.zo.lattice import values
from permille.zo.packed_state import decode_state
from permille_agent.embed import (
    RunContext,
    TrainOptions,
    install_package,
    list_runs,
    open_home,
    package_tokenizer,
    run_training,
)
from permille_lab.measuring.cells import Cells, Result, settings_parser
from permille_lab.measuring.machine import machine
from permille_lab.measuring.model_packages import DENSITIES, Sources, model_package, sources_from_environment
from permille_lab.people.page import State
from permille_lab.people.study import Study, targets
from permille_lab.people.user_texts import Collection, User, cohort, own_words, read_users

_LEAST_CHARACTERS = 4_000
"""Least number of characters of a person. A held-out part of less text would be too small."""
_GRADIENT_STEPS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRun:
    """The agent's result on a text: the decision, the judged values, and the processor seconds."""

    adopted: bool
    values_K: NDArray[np.float32]
    seconds: float


def open_study(sources: Sources, model: str, folder: Path, *, seed: int) -> Study:
    """Return the study of a model: its package (made once), its engine, and the options of training."""
    package = model_package(sources, model, folder)
    # The other trainings have no memory, so the state alone is compared.
    options = TrainOptions(seed=seed, steps=_GRADIENT_STEPS, memory=0)
    return Study(
        package=package,
        engine=open_engine(package, threads=1),
        tokenizer=package_tokenizer(package),
        options=options.within(int(package.config["max_position_embeddings"])),
        folder=folder / f"people-{model}",
    )


def agent_run(study: Study, documents: Sequence[str], folder: Path) -> AgentRun:
    """Run the agent's training in a new home.

    Raises:
        InputError: the run ended without a decision.
    """
    home = open_home(folder / "home")
    install_package(home, study.package)
    path = folder / "text.jsonl"
    path.write_text("".join(json.dumps({"text": words}) + "\n" for words in documents))
    begun = time.process_time()
    found = run_training(home, [path], study.options, RunContext())
    seconds = time.process_time() - begun
    if found.decision is None:
        raise InputError(f"The run ended without a decision: {found.outcome.value}: {found.message}")
    (run,) = list_runs(home)
    data = run.best_state(found.decision.descent).read_bytes()
    state = decode_state(data, max_bytes=len(data), max_k=study.package.k)
    return AgentRun(
        adopted=found.decision.adopted,
        values_K=values(study.package.values(), state.s_K, state.header.step_unit_exponent),
        seconds=seconds,
    )


def measured(study: Study, user: User, others: Sequence[User], forward_steps: int) -> Result:
    """Measure four states of one person on the held-out part."""
    person = study.person(user)
    own_text = [words for words in map(own_words, user.documents) if words not in person.test_words]
    whole = replace(person, train=[*person.train, *person.select])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        own = agent_run(study, own_text, folder)
        options = TrainOptions.of(
            EstimatorKind.ONE_SIDED,
            seed=study.options.seed,
            steps=forward_steps,
            row_tokens=study.options.row_tokens,
        )
        begun = time.process_time()
        forward = replace(study, folder=folder / "forward", options=options)
        forward_K, told = forward.train(person, "forward")
        forward_s = time.process_time() - begun
        pooled = replace(study, folder=folder / "pooled")
        pooled_K, _ = pooled.train(study.pooled(whole, others), "pooled")
    of_state = {
        State.BASE: study.package.values(),
        State.OWN: own.values_K,
        State.FORWARD: forward_K,
        State.POOLED: pooled_K,
    }
    losses = {state: study.nats(person, values_K) for state, values_K in of_state.items()}
    return {
        "user": user.name,
        "nats": {state.value: nats for state, (nats, _, _) in losses.items()},
        "tokens": losses[State.BASE][1],
        "train_tokens": targets(whole.train),
        "adopted": own.adopted,
        "seconds": {"own": round(own.seconds, 2), "forward": round(forward_s, 2)},
        "forward_run": told,
        "k": study.package.k,
        "machine": machine(),
    }


def main() -> None:
    """Measure the missing cells, one person after the other."""
    parser = settings_parser(__doc__, "people")
    parser.add_argument("--model", choices=DENSITIES, default="stories260K-hf")
    parser.add_argument("--users", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--forward-steps", type=int, default=20, help="steps of the forward-only training")
    options = parser.parse_args()
    sources, cells = sources_from_environment(), Cells(options.cells)
    people = cohort(read_users(sources.data, Collection.LAMP7).users, least_characters=_LEAST_CHARACTERS)
    for seed in options.seeds:
        study = open_study(sources, options.model, options.folder, seed=seed)
        for user in people[: options.users]:
            settings = {
                "model": options.model,
                "user": user.name,
                "seed": seed,
                "steps": _GRADIENT_STEPS,
                "forward_steps": options.forward_steps,
            }
            cells.once("people", settings, partial(measured, study, user, people, options.forward_steps))


if __name__ == "__main__":
    main()

"""Is it personal? Own, pooled and strangers' states of people of three collections: `make bench-users`.

    PERMILLE_MODELS=DIR PERMILLE_DATA=DIR python -m permille_lab.people.users --users 20 --minutes 60

Each person's text trains a state as the agent does by default, on the 4-bit package with the sensitive mask;
a second state learns equally much text of other people; and people are paired, so that each one's text is
also read under a stranger's state. Two more states train on, on the person's own text: from the pooled one,
as on a device that was given one, and, as long, from their own.

A pair is a cell, written once it is whole; within it every run goes on where a kill left it. `--minutes`
begins no pair after that time.
"""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from permille.engines.factory import open_engine
from permille.errors import InputError
from permille_agent.embed import TrainOptions, package_tokenizer
from permille_lab.measuring.cells import Cells, Result, Settings, settings_parser
from permille_lab.measuring.machine import machine
from permille_lab.measuring.model_packages import Sources, model_package, sources_from_environment
from permille_lab.people.page import State
from permille_lab.people.study import Person, Study, targets
from permille_lab.people.user_texts import Collection, User, cohort, read_users

_LEAST_CHARACTERS = {Collection.SHAKESPEARE: 8_000, Collection.LAMP7: 4_000, Collection.PERSONACHAT: 500}
"""Who wrote less is not asked: below it a split of the text says nothing."""
_STEPS = {"stories260K-hf": 200, "reference-7M": 160}


def open_study(sources: Sources, model: str, folder: Path, *, steps: int, seed: int, threads: int) -> Study:
    """The model's package (made once), its engine and the choices of every run."""
    package = model_package(sources, model, folder)
    options = TrainOptions(seed=seed, steps=steps)
    return Study(
        package=package,
        engine=open_engine(package, threads=threads),
        tokenizer=package_tokenizer(package),
        options=options.within(int(package.config["max_position_embeddings"])),
        folder=folder / f"users-{model}",
    )


def pairs(study: Study, users: Sequence[User], wanted: int) -> list[tuple[Person, Person]]:
    """The first `wanted` people with enough text, two by two; who is paired with whom depends on no count."""
    found: list[Person] = []
    for user in users:
        if len(found) >= wanted + wanted % 2:
            break
        try:
            found.append(study.person(user))
        except InputError:
            continue
    return list(zip(found[0::2], found[1::2], strict=False))


def measured(study: Study, pair: tuple[Person, Person], others: Sequence[User]) -> Result:
    """Eight runs, and the test text of each of the two under the base and five states."""
    begun = time.process_time()
    own = [study.train(person, "own") for person in pair]
    people = []
    for place, person in enumerate(pair):
        pool = study.pooled(person, others)
        pooled_K, pooled_told = study.train(pool, "pooled")
        starts = {State.POOLED_OWN: pooled_K, State.OWN_OWN: own[place][0]}
        of_state = {
            State.BASE: study.package.values(),
            State.OWN: own[place][0],
            State.POOLED: pooled_K,
            State.SWAPPED: own[1 - place][0],
            **{state: study.train(person, state.value, start_K)[0] for state, start_K in starts.items()},
        }
        losses = {state: study.nats(person, values_K) for state, values_K in of_state.items()}
        _, tokens, size = losses[State.BASE]
        people.append(
            {
                "user": person.name,
                "stranger": pair[1 - place].name,
                "nats": {state.value: nats for state, (nats, _, _) in losses.items()},
                "tokens": tokens,
                "bytes": size,
                "train_tokens": targets(person.train),
                "pooled_tokens": targets(pool.train),
                "own_run": own[place][1],
                "pooled_run": pooled_told,
            }
        )
    cpu_seconds = round(time.process_time() - begun, 1)
    return {"people": people, "k": study.package.k, "cpu_seconds": cpu_seconds, "machine": machine()}


def settings_of(study: Study, model: str, collection: Collection, pair: tuple[Person, Person]) -> Settings:
    """What a pair's cell is known by: everything that decides its numbers, but for this code."""
    return {
        "model": model,
        "collection": collection.value,
        "people": [person.name for person in pair],
        "options": study.options.definition(),
        "package": study.package.digest,
    }


def main() -> None:
    """Measure pairs of all collections in turn, so that a run that is stopped early has some of each."""
    parser = settings_parser(__doc__, "users")
    parser.add_argument("--models", nargs="+", default=list(_STEPS))
    parser.add_argument("--collections", nargs="+", type=Collection, default=list(Collection))
    parser.add_argument("--users", type=int, default=20, help="of each collection; an odd one is rounded up")
    parser.add_argument("--steps", type=int, help="of each run; default: by model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no pair after so long")
    options = parser.parse_args()
    sources, cells = sources_from_environment(), Cells(options.cells)
    end = time.monotonic() + 60 * options.minutes
    read: Mapping[Collection, Sequence[User]] = {
        collection: cohort(
            read_users(sources.data, collection).users, least_characters=_LEAST_CHARACTERS[collection]
        )
        for collection in options.collections
    }
    for model in options.models:
        steps = options.steps or _STEPS.get(model, 200)
        study = open_study(
            sources, model, options.folder, steps=steps, seed=options.seed, threads=options.threads
        )
        found = {collection: pairs(study, users, options.users) for collection, users in read.items()}
        for number in range(max(map(len, found.values()))):
            for collection, of_collection in found.items():
                if number < len(of_collection) and time.monotonic() < end:
                    pair = of_collection[number]
                    settings = settings_of(study, model, collection, pair)
                    cells.once("users", settings, partial(measured, study, pair, read[collection]))


if __name__ == "__main__":
    main()

"""Does personalisation serve a person, or only the domain? Runs over people of three collections.

    PERMILLE_MODELS=DIR PERMILLE_DATA=DIR python -m permille_lab.benchmarks.users --users 20 --minutes 60 \
        --output docs/results

Each person's text trains a state as the agent does by default, on the 4-bit package with the sensitive mask;
a second state learns equally much text of other people; and people are paired, so that each one's text is
also read under a stranger's state. Tests and tables: lab/permille_lab/evaluate/personal.py.

With `--onward` two more states of each: a person's own text trains on from the pooled state, as on a device
that was given one, and, as long, from their own.

A pair is a cell, written once it is whole; within it every run goes on where a kill left it. `--minutes`
begins no pair after that time. Writes users.json and users.md of all that is finished; `--restore users.json`
takes up what was finished before, here or elsewhere. A page that shows pairs which are not here stays, and
the new one is in `--folder`.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from permille.engines.factory import open_engine
from permille.errors import InputError, OperatorError, PermilleError
from permille.package.blobs import BlobFolder
from permille.package.reader import Package
from permille_agent.state.releases import installed_release
from permille_agent.training.options import TrainOptions
from permille_agent.training.train import package_tokenizer
from permille_lab.benchmarks.cells import Cells, Result, Settings
from permille_lab.benchmarks.machine import machine
from permille_lab.benchmarks.model_packages import Sources, installed_home, sources_from_environment
from permille_lab.benchmarks.settings import settings_parser
from permille_lab.benchmarks.user_runs import Bench, Person, targets
from permille_lab.benchmarks.user_text import DENSITIES
from permille_lab.benchmarks.users_page import FIGURE, is_onward, page, restore, write
from permille_lab.evaluate.personal import State
from permille_lab.evaluate.user_texts import Collection, User, cohort, read_users

LEAST_CHARACTERS = {Collection.SHAKESPEARE: 8_000, Collection.LAMP7: 4_000, Collection.PERSONACHAT: 500}
"""Who wrote less is not asked: below it a split of the text says nothing."""

POOL = "equal targets"
"""How a pool is filled: results of another way are others."""

STEPS = {"stories260K-hf": 200, "reference-7M": 160}
_OTHER_DENSITY, _OTHER_STEPS = 0.001, 200


def open_bench(sources: Sources, model: str, folder: Path, *, steps: int, seed: int, threads: int) -> Bench:
    """The model's package (made once), its engine and the choices of every run."""
    home = installed_home(
        folder / f"users-{model}", sources, model, folder / "packages", DENSITIES.get(model, _OTHER_DENSITY)
    )
    release = installed_release(home)
    if release is None:
        raise OperatorError(f"expected an installed package in {home.root}, found none")
    package = Package.open(BlobFolder(home.blobs), release.manifest_digest)
    options = TrainOptions(seed=seed, steps=steps).within(int(package.config["max_position_embeddings"]))
    return Bench(
        home=home,
        package=package,
        engine=open_engine(package, threads=threads),
        tokenizer=package_tokenizer(package),
        options=options,
    )


def pairs(bench: Bench, users: Sequence[User], wanted: int) -> list[tuple[Person, Person]]:
    """The first `wanted` people with enough text, two by two; who is paired with whom depends on no count."""
    found: list[Person] = []
    for user in users:
        if len(found) >= wanted + wanted % 2:
            break
        try:
            found.append(bench.person(user))
        except InputError:
            continue
    return list(zip(found[0::2], found[1::2], strict=False))


def measured(bench: Bench, pair: tuple[Person, Person], others: Sequence[User]) -> Result:
    """Four runs, and the test text of each of the two under the base and three states."""
    begun = time.process_time()
    own = [bench.train(person, "own") for person in pair]
    people = []
    for place, person in enumerate(pair):
        pool = bench.pooled(person, others)
        pooled_K, pooled_told = bench.train(pool, "pooled")
        of_state = {
            State.BASE: bench.package.values(),
            State.OWN: own[place][0],
            State.POOLED: pooled_K,
            State.SWAPPED: own[1 - place][0],
        }
        losses = {state: bench.nats(person, values_K) for state, values_K in of_state.items()}
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
                "select_tokens": targets(person.select),
                "own_run": own[place][1],
                "pooled_run": pooled_told,
            }
        )
    return {
        "people": people,
        "k": bench.package.k,
        "cpu_seconds": round(time.process_time() - begun, 1),
        "machine": machine(),
    }


def measured_onward(bench: Bench, pair: tuple[Person, Person], others: Sequence[User]) -> Result:
    """As `measured`, with the states that train on: on the person's own text, from the pooled and from the
    own state. All of them are of this machine: runs of before are read, or made anew where they are gone."""
    result = measured(bench, pair, others)
    begun = time.process_time()
    people = []
    for person, record in zip(pair, result["people"], strict=True):
        pool = bench.pooled(person, others)
        starts = {
            State.POOLED_OWN: bench.train(pool, "pooled"),
            State.OWN_OWN: bench.train(person, "own"),
        }
        nats, told = dict(record["nats"]), {}
        for state, (start_K, _) in starts.items():
            values_K, told[state.value] = bench.train(person, state.value, start_K)
            nats[state.value] = bench.nats(person, values_K)[0]
        people.append({**record, "nats": nats, "further_runs": told})
    return {**result, "people": people, "further_cpu_seconds": round(time.process_time() - begun, 1)}


def settings_of(bench: Bench, model: str, collection: Collection, pair: tuple[Person, Person]) -> Settings:
    """What a pair's cell is known by: everything that decides its numbers, but for this code."""
    return {
        "model": model,
        "density": DENSITIES.get(model, _OTHER_DENSITY),
        "collection": collection.value,
        "steps": bench.options.steps,
        "seed": bench.options.seed,
        "people": [person.name for person in pair],
        "options": bench.options.definition(),
        "pool": POOL,
        "package": bench.package.digest,
    }


def main(given: Sequence[str] | None = None) -> int:
    """Measure and write. Exit status: 0 done or out of minutes, 1 refused."""
    try:
        _measure(_parser().parse_args(given))
    except PermilleError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = settings_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=list(STEPS))
    parser.add_argument("--collections", nargs="+", type=Collection, default=list(Collection))
    parser.add_argument("--users", type=int, default=20, help="of each collection; an odd one is rounded up")
    parser.add_argument("--steps", type=int, help="of each run; default: by model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no pair after so long")
    parser.add_argument(
        "--onward", action="store_true", help="train on from the pooled and the own state, too"
    )
    parser.add_argument("--restore", type=Path, help="a users.json: its pairs are not measured again")
    parser.add_argument("--output", type=Path, help="folder for users.md and users.json; default: printed")
    parser.set_defaults(cells=Path("build/bench/users.jsonl"))
    return parser


def _measure(arguments: argparse.Namespace) -> None:
    sources = sources_from_environment()
    cells = Cells(arguments.cells)
    if arguments.restore is not None:
        restore(arguments.restore, cells)
    read = cache(partial(read_users, sources.data))
    end = time.monotonic() + 60 * arguments.minutes
    for model in arguments.models:
        _run(arguments, sources, model, cells, read, end)
    bad = {
        collection.value: [f"{row.name} ({row.reason})" for row in read(collection).bad]
        for collection in arguments.collections
    }
    if arguments.output is None:
        sys.stdout.write(page(cells.of(FIGURE), bad))
        return
    write(arguments.output, cells, page(cells.of(FIGURE), bad), elsewhere=arguments.folder / "users")


def _run(
    arguments: argparse.Namespace, sources: Sources, model: str, cells: Cells, read: Any, end: float
) -> None:
    """Pairs of all collections in turn, so that a run that is stopped early has some of each."""
    steps = arguments.steps or STEPS.get(model, _OTHER_STEPS)
    bench = open_bench(
        sources, model, arguments.folder, steps=steps, seed=arguments.seed, threads=arguments.threads
    )
    found = {}
    for collection in arguments.collections:
        users = cohort(read(collection).users, least_characters=LEAST_CHARACTERS[collection])
        found[collection] = (users, pairs(bench, users, arguments.users))
    for number in range(max(len(these) for _, these in found.values())):
        for collection, (users, these) in found.items():
            if number >= len(these) or time.monotonic() > end:
                continue
            pair = these[number]
            settings = settings_of(bench, model, collection, pair)
            result = cells.once(FIGURE, settings, partial(measured, bench, pair, users))
            if arguments.onward and not is_onward(result):
                cells.keep(FIGURE, settings, measured_onward(bench, pair, users))


if __name__ == "__main__":
    sys.exit(main())

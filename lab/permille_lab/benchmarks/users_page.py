"""The page of people and the data behind it: written, and taken up again elsewhere."""

import hashlib
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from permille.errors import InputError
from permille.files import write_atomic
from permille_lab.benchmarks.cells import Cells, Result, Settings
from permille_lab.evaluate.personal import FEWEST, FURTHER, PersonalOutcome, markdown

FIGURE, DATA = "users", "users.json"


def is_onward(result: Result) -> bool:
    """Whether a pair's result has the states that train on."""
    return all(state.value in person["nats"] for person in result["people"] for state in FURTHER)


def groups_of(pairs: Iterable[tuple[Settings, Result]]) -> dict[str, list[PersonalOutcome]]:
    """Finished people by model, collection, package and options: nothing else may stand in one group."""
    groups: dict[str, list[PersonalOutcome]] = {}
    for settings, result in pairs:
        name = (
            f"{settings['model']}, {settings['collection']}, {settings['steps']} steps, "
            f"seed {settings['seed']}, {settings['options']['estimator']} with "
            f"{settings['options']['queries']} queries, run {_run_name(settings)}"
        )
        if "pool" not in settings:  # of before pools were cut to length
            name += ", pools of up to 8 % fewer tokens than one's own"
        groups.setdefault(name, []).extend(PersonalOutcome.of(record) for record in result["people"])
    return groups


def _run_name(settings: Settings) -> str:
    """Of the package, all options and the pool: short, and another one for every other choice."""
    whole = json.dumps([settings["package"], settings["options"], settings.get("pool")], sort_keys=True)
    return hashlib.sha256(whole.encode()).hexdigest()[:8]


def restore(file: Path, cells: Cells) -> None:
    """Take up the pairs of a users.json that `cells` lacks.

    Raises:
        InputError: the file cannot be read, or is none of this benchmark; nothing is taken up then.
    """
    new = [
        (at, result) for at, result in _read(file) if _lacks(cells, at, result) and _agrees(cells, at, result)
    ]
    replaced = [at for at, _ in new]
    try:
        # As it will be shown: what makes no page is not taken up.
        page([*(pair for pair in cells.of(FIGURE) if pair[0] not in replaced), *new], {}).encode()
    except _UNFIT as exc:
        raise _unfit(file, exc) from exc
    for settings, result in new:
        cells.keep(FIGURE, settings, result)


def _lacks(cells: Cells, at: Settings, result: Result) -> bool:
    """Whether the pair is not here, or here without the states that train on."""
    here = _here(cells, at)
    return here is None or (is_onward(result) and not is_onward(here))


def _agrees(cells: Cells, at: Settings, result: Result) -> bool:
    """Whether the pair is not here, or the same but for the states that train on."""
    here = _here(cells, at)
    return here is None or _shared(result) == _shared(here)


def _here(cells: Cells, at: Settings) -> Result | None:
    return next((found for settings, found in cells.of(FIGURE) if settings == at), None)


def _shared(result: Result) -> list[dict[str, float]]:
    """Each person's losses under the states that every pair has."""
    return [
        {state: nats for state, nats in person["nats"].items() if state not in FURTHER}
        for person in result["people"]
    ]


_UNFIT = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, InputError)


def _unfit(file: Path, exc: Exception) -> InputError:
    return InputError(f"expected a users.json of this benchmark at {file}, got {exc!r:.200}")


def _read(file: Path) -> list[tuple[Settings, Result]]:
    try:
        found = json.loads(file.read_text("utf-8"))
        if not isinstance(found, list):
            raise TypeError(f"no list, but {type(found).__name__}")
        rows = [(row["settings"], row["result"]) for row in found]
        for settings, result in rows:
            people = [PersonalOutcome.of(record).user for record in result["people"]]
            if len(people) != 2 or people != settings["people"]:
                raise ValueError(f"people {people}, not {settings['people']}")
    except (OSError, *_UNFIT) as exc:
        raise _unfit(file, exc) from exc
    return rows


def page(pairs: Sequence[tuple[Settings, Result]], bad_rows: dict[str, list[str]]) -> str:
    """All that is finished."""
    chosen = [settings["options"] for settings, _ in pairs]
    told = dict.fromkeys(
        f"{options['estimator']} with {options['queries']} queries, {options['schedule']} schedule"
        for options in chosen
    )
    trained = "; ".join(told) or "nothing finished yet"
    lines = [
        "# People: own, pooled and swapped states",
        "",
        "Made by `python -m permille_lab.benchmarks.users`; every run is in `users.json`. Trained by the agent's",
        f"phases ({trained}; search for epsilon and step size, state",
        "chosen on a select part) on the NF4 package with the",
        "sensitive mask; losses on a test part of each person's text that nothing had looked at. *Pooled*:",
        "the same training on as many tokens of other people, step size and state selected on the same",
        "select part. *Swapped*: the state of a stranger from the same collection. *Pooled-own*, *own-own*,",
        "where a group has them (`--onward`): on the person's own text, from the pooled and from the own",
        "state (twice the steps in all). A gain is positive where the first is better; p of all comparisons",
        f"on this page are corrected together. Groups of fewer than {FEWEST} people have no p: none could be",
        "below 0.05.",
        "",
    ]
    for name, reasons in bad_rows.items():
        if reasons:
            lines += [f"Lines of {name} that are no person and are left out: {'; '.join(reasons)}.", ""]
    return "\n".join(lines) + "\n" + markdown(groups_of(pairs))


def write(output: Path, cells: Cells, text: str, *, elsewhere: Path) -> Path:
    """Write page and data; returns their folder.

    Args:
        elsewhere: written to where the page in `output` shows pairs that `cells` lacks.

    Raises:
        InputError: the data in `output` are none of this benchmark.
    """
    if (output / DATA).exists() and any(_lacks(cells, at, result) for at, result in _read(output / DATA)):
        sys.stderr.write(
            f"{output} shows pairs that are not here: it stays, the new page is in {elsewhere}\n"
        )
        output = elsewhere
    rows = [{"settings": settings, "result": result} for settings, result in cells.of(FIGURE)]
    output.mkdir(parents=True, exist_ok=True)
    write_atomic(output / DATA, (json.dumps(rows, indent=1) + "\n").encode())
    write_atomic(output / "users.md", text.encode())
    return output

"""One person's text with a package, and the agent's training on it.

Every method is judged by the same rows: the select split of the text. Seconds are processor seconds since
training began, without evaluations.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from permille.engines.factory import AUTO, open_engine
from permille.engines.interface import Engine
from permille.package.reader import Package
from permille_agent.embed import (
    Prepared,
    TrainOptions,
    mean_loss,
    package_tokenizer,
    personalise,
    prepare,
    read_documents,
)
from permille_lab.measuring.cells import Result
from permille_lab.people.study import Study
from permille_lab.people.user_texts import Document, User


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRun:
    """A package, its engine, and the splits of a text."""

    package: Package
    engine: Engine
    prepared: Prepared
    seed: int

    def loss(self) -> float:
        """Return the loss of the select split with the package's values."""
        return mean_loss(self.engine, self.package.values(), self.prepared.select)

    def train(self, options: TrainOptions, folder: Path) -> Result:
        """Train with these options. Return the losses and times of the evaluations."""
        begin = time.perf_counter()
        self.loss()
        evaluation_s = time.perf_counter() - begin
        passes = self.engine.layer_passes
        wall, cpu = time.perf_counter(), time.process_time()
        found = personalise(self.package, self.engine, self.prepared, options, folder=folder)
        # Convert to processor seconds, which other load on the machine disturbs less.
        begun = found.curve[0].seconds
        pace = (time.process_time() - cpu) / (time.perf_counter() - wall)
        spent = [pace * (at.seconds - begun - number * evaluation_s) for number, at in enumerate(found.curve)]
        points = [
            {"step": at.step, "loss": at.loss, "seconds": round(float(seconds), 3)}
            for at, seconds in zip(found.curve, np.maximum.accumulate([0.0, *spent[1:]]), strict=True)
        ]
        return {
            "points": points,
            "search_s": 0.0,
            "steps": found.steps,
            "layer_passes": self.engine.layer_passes - passes,  # with evaluations
        }


def text_run(
    package: Package,
    documents: Sequence[Document],
    folder: Path,
    *,
    seed: int,
    threads: int,
    engine: str = AUTO,
) -> TextRun:
    """Divide a text as the agent does. The agent reads it from a file in `folder`.

    Raises:
        InputError: there is too little text.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "text.jsonl"
    path.write_text("".join(json.dumps(dict(document)) + "\n" for document in documents))
    read, _ = read_documents([path])
    row_tokens = options_for(package, seed=seed, steps=1).row_tokens
    return TextRun(
        package=package,
        engine=open_engine(package, engine, threads=threads),
        prepared=prepare(read, package_tokenizer(package), row_tokens=row_tokens),
        seed=seed,
    )


def person_run(
    package: Package, documents: Sequence[Document], folder: Path, *, seed: int, threads: int
) -> TextRun:
    """Divide a text that is too short for the agent's three splits, as in the study of people.

    Raises:
        InputError: there is too little text.
    """
    study = Study(
        package=package,
        engine=open_engine(package, AUTO, threads=threads),
        tokenizer=package_tokenizer(package),
        options=options_for(package, seed=0, steps=1),  # one division for all seeds
        folder=folder,
    )
    person = study.person(User(name="", documents=tuple(documents)))
    person = replace(person, select=[*person.select, *person.test])  # no test split is needed
    return TextRun(package=package, engine=study.engine, prepared=study.prepared(person), seed=seed)


def options_for(package: Package, *, seed: int, steps: int) -> TrainOptions:
    """Return the agent's default options, with rows that fit the model."""
    positions = int(package.config["max_position_embeddings"])
    return TrainOptions(seed=seed, steps=steps).within(positions)

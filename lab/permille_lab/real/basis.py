"""Compare steps along a basis learned from public text with steps in groups, on SmolLM2: `make bench-basis`.

    PERMILLE_DATA=DIR python -m permille_lab.real.basis --person gardener --seed 0 1

The packages are made as a build makes them: one without a basis, one with a basis of C4. Each run is the
agent's own training, with the lengths and the reference of its package. No pseudo-user is a judged person.

    groups                8 steps in groups, from the package without a basis
    basis                 4 steps in the basis
    basis, then groups    4 steps in the basis, then 4 in groups
    better base           no step: the base plus twice the mean displacement of the pseudo-users
    gradient              12 steps of the default method, for an engine with a reverse pass

A cell is one run on one person's text. The state that the run selects is judged on held-out text of the
person, on general text and in chats.

# Legend: K masked weights, U pseudo-users.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from permille.choices import EstimatorKind
from permille.corpora.sources import ReadReport, file_texts
from permille.engines.factory import open_engine
from permille.models.gguf.folder import model_folder
from permille.models.loading import FileTokenizer
from permille.package.build import write_manifest
from permille.package.reader import Package
from permille.pipeline.basis import basis_sampling, with_basis
from permille.pipeline.draw import Corpus
from permille.training.adam import Moments, learning_rate, unit_exponent
from permille.training.lengths import measure_lengths
from permille.training.reference import Reference
from permille.zo.estimators import Batch
from permille_agent.embed import (
    Personalised,
    TrainOptions,
    base_answers,
    compare_answers,
    mean_loss,
    package_tokenizer,
    personalise,
)
from permille_lab.learning.runs import TextRun, person_run, text_run
from permille_lab.measuring.cells import Cells, Result, settings_parser
from permille_lab.measuring.machine import machine, timed
from permille_lab.measuring.model_packages import SMOLLM2_FILE, Sources, folder_from_environment
from permille_lab.people.user_texts import Collection, Document, cohort, read_users
from permille_lab.real.basis_page import BASIS, BETTER, GRADIENT, GROUPS, THEN
from permille_lab.real.facts import MOST_CHARACTERS, diary
from permille_lab.real.subjects import (
    A_FIFTH,
    GENERAL_TEXTS,
    LEAST_CHARACTERS,
    gardener,
    general_batches,
    general_of,
    open_subject,
)

TEXTS = ("gardener", "pepys", "muir")
"""Texts other than tweets."""
AUTHORS = 10
_TIMES_MEAN = 2.0


METHODS = {BASIS: 4, GROUPS: 8, THEN: 8, BETTER: 0, GRADIENT: 12}
"""The number of steps of each method."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Packages:
    """The packages of one model, and the values of the better base.

    Attributes:
        bare: the package without a basis.
        taught: the same package with a basis.
        better_K: the base plus twice the mean displacement, float32.
        model: the transformers folder of the model.
    """

    bare: Package
    taught: Package
    better_K: NDArray[np.float32]
    model: Path


def packages_of(gguf: Path, data: Path, folder: Path, threads: int) -> Packages:
    """Return the packages. They are made once in `folder`."""
    options = TrainOptions(seed=0, steps=1)
    sources = Sources(models=folder, data=data)
    referring = open_subject(sources, gguf, folder, trained=0.001, options=options).study.package
    work, model = folder / f"basis-{referring.digest[7:23]}", model_folder(gguf, folder)
    work.mkdir(exist_ok=True)

    def made() -> tuple[str, str]:
        manifest = measure_lengths(open_engine(referring, threads=threads), referring, work=work)
        bare = Package.open(referring.blobs, write_manifest(referring.blobs, manifest))
        corpus = Corpus(texts=partial(_teaching_texts, data))
        drawn = corpus.draw(FileTokenizer(model), basis_sampling(bare.config))
        return bare.digest, with_basis(bare, drawn, threads=threads, work=work).digest

    known = work / "digests"
    if not known.exists():
        known.write_text("\n".join(made()))
    bare, taught = (Package.open(referring.blobs, digest) for digest in known.read_text().split())
    moved_UK = [_displacement(bare, path) for path in work.glob("pseudo-user-*.moments")]
    better_K = np.asarray(bare.values() + _TIMES_MEAN * np.mean(moved_UK, axis=0), np.float32)
    return Packages(bare=bare, taught=taught, better_K=better_K, model=model)


def _teaching_texts(data: Path, report: ReadReport) -> Sequence[str]:
    # The last texts are general text, which judges.
    return list(file_texts(data / "text/c4_en/c4_sample.jsonl", report))[:-GENERAL_TEXTS]


def _displacement(package: Package, path: Path) -> NDArray[np.float64]:
    moments = Moments.load(path)
    assert moments is not None  # `with_basis` keeps the moments of each pseudo-user
    return np.ldexp(moments.s_K.astype(np.float64), unit_exponent(learning_rate(package)))


class General:
    """Measures of any values of a package: the losses on general text and on chat turns, and lost answers.

    Each chat turn has the base's own answer. None is used to train.
    """

    def __init__(self, package: Package, batches: Sequence[Batch], threads: int) -> None:
        self._engine = open_engine(package, threads=threads)
        self._base_K, self._tokenizer = package.values(), package_tokenizer(package)
        reference = Reference.of(package)
        assert reference is not None  # `open_subject` adds one
        self._texts = {"general": batches, "chat": reference.texts(pulls=False, chat=True)}

    def of(self, values_K: NDArray[np.float32]) -> Result:
        """Return the losses of the base and of these values, and the first answer that is lost, or ""."""
        fault = compare_answers(self._engine, values_K, self._tokenizer, self._answers)[1]
        return {
            name: [before, general_of(self._engine, values_K, batches)]
            for (name, batches), before in zip(self._texts.items(), self._before, strict=True)
        } | {"fault": fault}

    @cached_property
    def _before(self) -> list[float]:
        return [general_of(self._engine, self._base_K, batches) for batches in self._texts.values()]

    @cached_property
    def _answers(self) -> Any:
        return base_answers(self._engine, self._base_K, self._tokenizer)


def measure(
    run: TextRun, options: TrainOptions | None, better_K: NDArray[np.float32], general: General, folder: Path
) -> Result:
    """Train, and judge the selected state. Without options, judge the better base.

    A killed run continues in `folder`, which is removed when it is done.
    """
    found = list[Personalised]()

    def train() -> None:
        if options is not None:
            found.append(personalise(run.package, run.engine, run.prepared, options, folder=folder))

    spent = timed(train)
    values_K = found[0].values_K if found else better_K
    shutil.rmtree(folder, ignore_errors=True)
    return {
        "before": run.loss(),
        "after": mean_loss(run.engine, values_K, run.prepared.select),
        "curve": [[at.step, at.loss] for each in found for at in each.curve],
        **general.of(values_K),
        "cpu_s": round(spent.cpu_s, 1),
        "machine": machine(),
    }


def documents_of(person: str, data: Path) -> Sequence[Document]:
    """Return one of `TEXTS`. For a diary, return its beginning."""
    if person == "gardener":
        return gardener().documents
    kept: list[Document] = []
    for document in diary(data, person).documents:
        if sum(len(each["text"]) for each in kept) <= MOST_CHARACTERS:
            kept.append(document)
    return kept


def main() -> None:
    """Measure the missing cells: all people for each seed and method."""
    parser = settings_parser(__doc__, "basis")
    parser.add_argument("--gguf", type=Path, default=SMOLLM2_FILE)
    parser.add_argument("--person", nargs="+", help="gardener, pepys, muir, or authors of tweets by number")
    parser.add_argument("--method", choices=METHODS, nargs="+", default=list(METHODS))
    parser.add_argument("--seed", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    data, cells = folder_from_environment("PERMILLE_DATA"), Cells(options.cells)
    packages = packages_of(options.gguf, data, options.folder, options.threads)
    general = General(packages.bare, general_batches(packages.model, data)[A_FIFTH], options.threads)
    everybody = cohort(read_users(data, Collection.LAMP7).users, least_characters=LEAST_CHARACTERS)
    authors = {user.name: user.documents for user in everybody[:AUTHORS]}

    @cache
    def opened(person: str, basis: bool) -> TextRun:
        package = packages.taught if basis else packages.bare
        folder, threads = options.folder / "taught" / person, options.threads
        if person in authors:
            return person_run(package, authors[person], folder, seed=0, threads=threads)
        return text_run(package, documents_of(person, data), folder, seed=0, threads=threads)

    def measured(person: str, method: str, seed: int) -> Result:
        run, train = opened(person, method in (BASIS, THEN)), None
        if steps := METHODS[method]:
            kind = EstimatorKind.GRADIENT if method == GRADIENT else EstimatorKind.ONE_SIDED
            train = TrainOptions.of(kind, steps=steps, seed=seed)
        folder = options.folder / "taught" / person / f"{method}-{seed}"
        return measure(run, train, packages.better_K, general, folder)

    people = options.person or [*TEXTS, *authors]
    for seed, method, person in product(options.seed, options.method, people):
        if seed and not METHODS[method]:
            continue  # no step, no chance
        settings = {"person": person, "method": method, "steps": METHODS[method], "seed": seed}
        cells.once("basis", settings, partial(measured, person, method, seed))


if __name__ == "__main__":
    main()

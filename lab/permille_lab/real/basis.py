"""Learn a basis of directions from public text, and compare its steps with groups on SmolLM2.

    PERMILLE_DATA=DIR python -m permille_lab.real.basis --person gardener --method basis groups

Pseudo-users are clusters of windows of public text. For each, a few steps of Adam move the masked values. The
singular vectors of these displacements, rounded to int8, are the columns of the basis. A step perturbs each
column once, with a random sign, and compares the losses with their mean. The length of a step and of a
perturbation is a share of the mean displacement.

A cell is one method on one person's text. Its result is a curve: the held-out loss by the number of passes
of one row. At the end, it has the loss on general text and the first wrong answer of a chat.

    basis      steps in the basis
    better     no step: the base plus twice the mean displacement
    groups     one-sided steps in groups, the agent's default
    then       steps in the basis, then in groups

# Legend: K masked weights, R columns, U pseudo-users, N windows, T tokens, F features.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from permille.choices import Embeddings
from permille.corpora.included import included_corpus
from permille.corpora.sequences import row_order, token_sequences
from permille.corpora.sources import ReadReport, file_texts
from permille.engines.factory import open_engine
from permille.engines.interface import GradientEngine
from permille.engines.light.engine import LightEngine
from permille.models.gguf.folder import model_folder
from permille.models.loading import FileTokenizer
from permille.package.reader import Package
from permille.training.adam import Moments, adam_step, learning_rate, unit_exponent
from permille.zo.estimators import Batch, estimate
from permille.zo.lattice import values
from permille.zo.steps import apply_record, rounded_step
from permille_agent.embed import (
    TrainingBatches,
    base_answers,
    compare_answers,
    mean_loss,
    package_tokenizer,
)
from permille_lab.learning.runs import TextRun, person_run, text_run
from permille_lab.measuring.cells import Cells, Result, settings_parser
from permille_lab.measuring.machine import machine, timed
from permille_lab.measuring.model_packages import (
    SMOLLM2_FILE,
    Sources,
    folder_from_environment,
    model_package,
)
from permille_lab.people.user_texts import Collection, Document, cohort, read_users
from permille_lab.real.facts import MOST_CHARACTERS, diary
from permille_lab.real.subjects import LEAST_CHARACTERS, gardener, general_batches, general_of
from permille_lab.real.zeroth_order import GROUPS, Contender, descent_of

METHODS = ("basis", "better", "groups", "then")
TEXTS = ("gardener", "pepys", "muir")
"""The texts that are no tweets."""
AUTHORS = 10
ROWS = 2
_TIMES_MEAN = 2.0
_EVERY_GROUPS, _EVERY_BASIS = 5, 2
_FEATURES, _ROUNDS = 4096, 8
_GENERAL_TEXTS = 32
_LARGEST = 127


@dataclass(frozen=True, slots=True, kw_only=True)
class Lessons:
    """How a basis is learned.

    Attributes:
        corpus: `c4` or `included`.
        users: number of pseudo-users, and of columns.
        steps: Adam steps of a pseudo-user.
        rows: windows of a step.
        windows: windows that are divided among the pseudo-users.
    """

    corpus: str = "c4"
    users: int = 16
    steps: int = 4
    rows: int = 3
    windows: int = 1024

    @property
    def name(self) -> str:
        """Return a name that no other lessons have."""
        return f"basis-{self.corpus}-{self.users}-{self.steps}-{self.rows}-{self.windows}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Basis:
    """Columns of equal norms, and what is known of the displacements.

    Attributes:
        columns_RK: int8.
        mean_K: mean displacement of the pseudo-users, float64.
        norm: mean norm of the displacements.
        singular_R: singular values of the displacements.
    """

    columns_RK: NDArray[np.int8]
    mean_K: NDArray[np.float64]
    norm: float
    singular_R: NDArray[np.float64]

    def units(self) -> NDArray[np.float64]:
        """Return the columns with a norm of 1."""
        wide_RK = self.columns_RK.astype(np.float64)
        return np.asarray(wide_RK / np.linalg.norm(wide_RK, axis=1, keepdims=True))


def clusters(windows_NT: NDArray[np.int64], users: int, rows: int) -> Iterator[NDArray[np.int64]]:
    """Yield the windows of each pseudo-user: the `rows` nearest to the centre of a cluster.

    Clusters are those of spherical k-means on tf-idf of hashed tokens.
    """
    counts_NF = np.zeros((len(windows_NT), _FEATURES), np.float32)
    np.add.at(counts_NF, (np.arange(len(windows_NT))[:, None], windows_NT % _FEATURES), 1)
    idf_F = np.log(len(windows_NT) / (1 + (counts_NF > 0).sum(axis=0))).clip(0)
    found_NF = _normal(np.log1p(counts_NF) * idf_F)
    centre_UF = found_NF[np.random.default_rng(0).choice(len(found_NF), users, replace=False)]
    for _ in range(_ROUNDS):
        nearest_N = (found_NF @ centre_UF.T).argmax(axis=1)
        sums_UF = np.zeros_like(centre_UF)
        np.add.at(sums_UF, nearest_N, found_NF)
        centre_UF = _normal(sums_UF)
    for centre_F in centre_UF:
        yield windows_NT[np.argsort(-(found_NF @ centre_F), kind="stable")[:rows]]


def _normal(rows_NF: NDArray[np.float32]) -> NDArray[np.float32]:
    norms_N1 = np.linalg.norm(rows_NF, axis=1, keepdims=True)
    return np.asarray(rows_NF / np.maximum(norms_N1, 1e-9), np.float32)


def displacement(
    engine: GradientEngine, package: Package, rows_NT: NDArray[np.int64], lessons: Lessons
) -> NDArray[np.float64]:
    """Return how far Adam moves the masked values on some windows, float64 [K]."""
    rate, base_K = learning_rate(package), package.values()
    exponent = unit_exponent(rate)
    moments = Moments.first(len(base_K), np.zeros(len(base_K), np.int64))
    for step in range(lessons.steps):
        batch = _batch(rows_NT[row_order(len(rows_NT), lessons.rows, 0, step)])
        loss, gradient_K = engine.gradient(values(base_K, moments.s_K, exponent), batch)
        step_rate = rate * (1 - step / lessons.steps)
        moments = adam_step(moments, loss, gradient_K, rate=step_rate, step_unit_exponent=exponent)
    moved_K: NDArray[np.float64] = np.ldexp(moments.s_K.astype(np.float64), exponent)
    return moved_K


def _batch(ids_BT: NDArray[np.int64]) -> Batch:
    target_BT = np.ones(ids_BT.shape, np.bool_)
    target_BT[:, 0] = False
    return Batch(input_ids_BT=ids_BT, attention_BT=np.ones(ids_BT.shape, np.bool_), target_BT=target_BT)


def basis_of(moved_UK: NDArray[np.float64]) -> Basis:
    """Return the singular vectors of displacements, rounded to int8."""
    squares_U, turned_UU = np.linalg.eigh(moved_UK @ moved_UK.T)
    unit_RK = (moved_UK.T @ turned_UU / np.sqrt(squares_U)).T[::-1]
    columns_RK = np.rint(unit_RK * (_LARGEST / np.abs(unit_RK).max())).astype(np.int8)
    return Basis(
        columns_RK=columns_RK,
        mean_K=moved_UK.mean(axis=0),
        norm=float(np.linalg.norm(moved_UK, axis=1).mean()),
        singular_R=np.sqrt(squares_U[::-1]),
    )


def learned(
    package: Package, model: Path, data: Path, folder: Path, lessons: Lessons, users: int, threads: int
) -> Basis:
    """Return the basis of the first `users` pseudo-users. Each displacement is kept in `folder`."""
    kept = folder / lessons.name
    kept.mkdir(parents=True, exist_ok=True)
    paths = [kept / f"{user}.npy" for user in range(users)]
    if not all(path.exists() for path in paths):
        texts = _texts(lessons.corpus, data)
        windows_NT = token_sequences(FileTokenizer(model), texts, lessons.windows, 128, 0)
        engine = LightEngine(package, threads=threads)
        divided = clusters(windows_NT, lessons.users, lessons.steps * lessons.rows)
        for path, rows_NT in zip(paths, divided, strict=False):
            if not path.exists():
                np.save(path, displacement(engine, package, rows_NT, lessons))
                sys.stderr.write(f"{path}\n")
    return basis_of(np.stack([np.load(path) for path in paths]))


def _texts(corpus: str, data: Path) -> list[str]:
    if corpus == "c4":
        # The last texts are the general text that judges.
        return list(file_texts(data / "text/c4_en/c4_sample.jsonl", ReadReport()))[:-_GENERAL_TEXTS]
    path = included_corpus()
    assert path is not None  # a checkout has it
    return list(file_texts(path, ReadReport()))


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Settings of one cell.

    Attributes:
        person: one of `TEXTS`, or an author of tweets.
        method: one of `METHODS`.
        steps: number of steps of each phase.
        users: number of pseudo-users whose displacements make the basis.
        length: length of a step in the basis, as a share of the mean displacement. With `better`, the length
            of the only step.
        reach: length of a perturbation, as a share of the mean displacement.
        momentum: share of the velocity that remains.
    """

    person: str
    method: str
    steps: tuple[int, ...]
    seed: int = 0
    corpus: str = "c4"
    users: int = 16
    length: float = 0.1
    reach: float = 0.05
    momentum: float = 0.8


class Curve:
    """The held-out loss by passes of one row. The passes of the evaluations themselves do not count."""

    def __init__(self, run: TextRun) -> None:
        self._run = run
        self._layers = int(run.package.config["num_hidden_layers"])
        self.points = [[0.0, run.loss()]]
        self._before = run.engine.layer_passes

    def add(self, values_K: NDArray[np.float32]) -> None:
        """Evaluate these values."""
        engine = self._run.engine
        passes = engine.layer_passes
        loss = mean_loss(engine, values_K, self._run.prepared.select)
        self.points.append([round((passes - self._before) / self._layers, 1), loss])
        self._before += engine.layer_passes - passes
        sys.stderr.write(f"{self.points[-1]}\n")


def basis_steps(run: TextRun, basis: Basis, how: Steps, steps: int, curve: Curve) -> NDArray[np.float32]:
    """Take steps in the basis. Return the values after them."""
    unit_RK, base_K = basis.units(), run.package.values().astype(np.float64)
    batches = TrainingBatches(run.prepared.train, batch_rows=ROWS, seed=how.seed)
    at_R, velocity_R = np.zeros(len(unit_RK)), np.zeros(len(unit_RK))
    values_K = run.package.values()
    for step in range(steps):
        # The mean of the losses hides the sum of all directions, so each step has other signs.
        sign_R = np.random.default_rng([how.seed, step]).choice([-1.0, 1.0], len(unit_RK))
        here_K = base_K + at_R @ unit_RK
        moved_VK = (here_K + (how.reach * basis.norm * sign_R)[:, None] * unit_RK).astype(np.float32)
        losses_V = run.engine.losses(moved_VK, batches(step)).astype(np.float64)
        slope_R = sign_R * (losses_V - losses_V.mean())
        velocity_R = how.momentum * velocity_R + slope_R / np.linalg.norm(slope_R)
        at_R = at_R - how.length * basis.norm * velocity_R
        values_K = np.asarray(base_K + at_R @ unit_RK, np.float32)
        if (step + 1) % _EVERY_BASIS == 0:
            curve.add(values_K)
    return values_K


def group_steps(
    run: TextRun, start_K: NDArray[np.float32], how: Steps, steps: int, curve: Curve
) -> NDArray[np.float32]:
    """Take the agent's default steps. Return the values after them."""
    contender = Contender(density=None, kind=GROUPS, normalised=True, first_layer=0, norm=0.5, seed=how.seed)
    layers = int(run.package.config["num_hidden_layers"])
    descent = descent_of(run, contender, layers, 16, start_K)
    batches = TrainingBatches(run.prepared.train, batch_rows=ROWS, seed=how.seed)
    s_K, values_K = np.zeros(run.package.k, np.int64), start_K
    for step in range(steps):
        loss, slope_Q = estimate(run.engine, batches(step), descent, s_K, step)
        apply_record(s_K, rounded_step(loss, slope_Q, descent.header, step, normalised=True), descent.header)
        values_K = values(start_K, s_K, descent.header.step_unit_exponent)
        if (step + 1) % _EVERY_GROUPS == 0 or step + 1 == steps:
            curve.add(values_K)
    return values_K


def trained(run: TextRun, basis: Basis, how: Steps, curve: Curve) -> NDArray[np.float32]:
    """Run one method. Return the values that it reaches."""
    base_K = run.package.values()
    if how.method == "better":
        values_K = (base_K + how.length * basis.mean_K).astype(np.float32)
        curve.add(values_K)
        return values_K
    if how.method == "groups":
        return group_steps(run, base_K, how, how.steps[0], curve)
    values_K = basis_steps(run, basis, how, how.steps[0], curve)
    return group_steps(run, values_K, how, how.steps[1], curve) if how.method == "then" else values_K


class General:
    """The loss on general text, and the answers of a chat, of any values of a package."""

    def __init__(self, package: Package, batches: Sequence[Batch], threads: int) -> None:
        self._engine = open_engine(package, threads=threads)
        self._base_K, self._batches = package.values(), batches
        self._tokenizer = package_tokenizer(package)
        self._known: dict[bytes, Result] = {}

    def of(self, values_K: NDArray[np.float32]) -> Result:
        """Return the losses of the base and of these values, and the first answer that is lost, or ""."""
        key = values_K.tobytes()
        if key not in self._known:
            fault = compare_answers(self._engine, values_K, self._tokenizer, self._answers)[1]
            general = [self._base, general_of(self._engine, values_K, self._batches)]
            self._known[key] = {"general": general, "fault": fault}
        return self._known[key]

    @cached_property
    def _base(self) -> float:
        return general_of(self._engine, self._base_K, self._batches)

    @cached_property
    def _answers(self) -> Any:
        return base_answers(self._engine, self._base_K, self._tokenizer)


def measure(run: TextRun, basis: Basis, how: Steps, general: General) -> Result:
    """Run one method. Return its curve, the loss on general text and the first wrong answer."""
    curve, found = Curve(run), list[NDArray[np.float32]]()
    spent = timed(lambda: found.append(trained(run, basis, how, curve)))
    moved_K = (found[0] - run.package.values()).astype(np.float64)
    return {
        "curve": curve.points,
        **general.of(found[0]),
        "moved": float(np.linalg.norm(moved_K)),
        "cpu_s": round(spent.cpu_s, 1),
        "machine": machine(),
    }


def documents_of(person: str, data: Path) -> Sequence[Document]:
    """Return one of `TEXTS`. Of a diary, it is the beginning."""
    if person == "gardener":
        return gardener().documents
    kept: list[Document] = []
    for document in diary(data, person).documents:
        if sum(len(each["text"]) for each in kept) <= MOST_CHARACTERS:
            kept.append(document)
    return kept


def main() -> None:
    """Measure the missing cells: for each method, all people."""
    parser = settings_parser(__doc__, "basis")
    parser.add_argument("--gguf", type=Path, default=SMOLLM2_FILE)
    parser.add_argument("--person", nargs="+", help="gardener, pepys, muir, or authors of tweets by number")
    parser.add_argument("--method", choices=METHODS, nargs="+", default=list(METHODS))
    parser.add_argument("--basis-steps", type=int, default=4)
    parser.add_argument("--group-steps", type=int, default=25)
    parser.add_argument("--then-steps", type=int, default=12, help="group steps after those in the basis")
    parser.add_argument("--corpus", choices=("c4", "included"), default="c4")
    parser.add_argument("--users", type=int, default=Steps.users, help="pseudo-users of the 16")
    parser.add_argument("--length", type=float, nargs="+", default=[Steps.length])
    parser.add_argument("--reach", type=float, nargs="+", default=[Steps.reach])
    parser.add_argument("--momentum", type=float, nargs="+", default=[Steps.momentum])
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    options = parser.parse_args()
    data, cells = folder_from_environment("PERMILLE_DATA"), Cells(options.cells)
    model = model_folder(options.gguf, options.folder)
    package = model_package(
        Sources(models=model.parent, data=data), model.name, options.folder,
        trained=0.001, embeddings=Embeddings.Q8_0,
    )  # fmt: skip
    lessons, threads = Lessons(corpus=options.corpus), options.threads
    basis = learned(package, model, data, options.folder, lessons, options.users, threads)
    general = General(package, general_batches(model, data), threads)
    everybody = cohort(read_users(data, Collection.LAMP7).users, least_characters=LEAST_CHARACTERS)
    authors = {user.name: user.documents for user in everybody[:AUTHORS]}
    first, *others = authors
    steps = {
        "basis": (options.basis_steps,),
        "better": (0,),
        "groups": (options.group_steps,),
        "then": (options.basis_steps, options.then_steps),
    }

    @cache
    def opened(person: str) -> TextRun:
        if person in authors:
            return person_run(package, authors[person], options.folder / "people", seed=0, threads=threads)
        documents = documents_of(person, data)
        return text_run(package, documents, options.folder / "basis-text", seed=0, threads=threads)

    def measured(how: Steps) -> Result:
        return measure(opened(how.person), basis, how, general)

    people = options.person or ["gardener", first, others[0], *TEXTS[1:], *others[1:]]
    for method, person, length, reach, momentum, seed in product(
        options.method, people, options.length, options.reach, options.momentum, options.seed
    ):
        how = Steps(
            person=person, method=method, steps=steps[method], seed=seed, corpus=options.corpus,
            users=options.users, length=_TIMES_MEAN if method == "better" else length, reach=reach,
            momentum=momentum,
        )  # fmt: skip
        cells.once("basis", asdict(how), partial(measured, how))


if __name__ == "__main__":
    main()

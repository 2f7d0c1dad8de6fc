"""Compare the gain of the estimators at equal cost: `make bench-estimators`.

    PERMILLE_MODELS=DIR PERMILLE_DATA=DIR python -m permille_lab.learning.estimators

Every contender trains as the agent does, on the speeches of one of Shakespeare's speakers and on the tweets
of one person. A row pass is one pass of a batch's row through the whole model. Each contender has as many row
passes as the default estimator has in `--steps` steps. Each seed also takes another person.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from permille.choices import EstimatorKind
from permille.engines.factory import LIGHT
from permille.engines.interface import REVERSE_PASSES
from permille.package.reader import Package
from permille_agent.embed import RunFailed, TrainOptions
from permille_lab.learning.runs import options_for, text_run
from permille_lab.measuring.cells import Cells, Result, settings_parser
from permille_lab.measuring.model_packages import DENSITIES, model_package, sources_from_environment
from permille_lab.people.user_texts import Collection, Document, cohort, read_users

_COLLECTIONS = {"speeches": Collection.SHAKESPEARE, "tweets": Collection.LAMP7}
_LEAST_CHARACTERS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """An estimator with its number of queries and rows."""

    estimator: EstimatorKind
    queries: int
    batch_rows: int = 2

    def row_passes(self) -> int:
        """Return the row passes of one step. For a split, both blocks count as equally large."""
        passes = {
            EstimatorKind.SPSA: 2 * self.queries,
            EstimatorKind.ONE_SIDED: self.queries,
            EstimatorKind.FORWARD: REVERSE_PASSES,
            EstimatorKind.SPLIT: self.queries,
        }
        return passes[self.estimator] * self.batch_rows


DEFAULT = Contender(estimator=EstimatorKind.ONE_SIDED, queries=16)
CONTENDERS = (
    DEFAULT,
    Contender(estimator=EstimatorKind.SPSA, queries=8),
    Contender(estimator=EstimatorKind.FORWARD, queries=8),
    Contender(estimator=EstimatorKind.SPLIT, queries=15),
)


def measure(
    package: Package,
    documents: Sequence[Document],
    contender: Contender,
    options: TrainOptions,
    *,
    threads: int,
) -> Result:
    """Return the result of one contender's run, or `failed` if it cannot train."""
    steps = max(1, (options.steps or 1) * DEFAULT.row_passes() // contender.row_passes())
    with tempfile.TemporaryDirectory() as folder:
        run = text_run(package, documents, Path(folder), seed=options.seed, threads=threads, engine=LIGHT)
        try:
            return run.train(replace(options, steps=steps, **asdict(contender)), Path(folder) / "run")
        except RunFailed as exc:
            return {"failed": str(exc)}


def main() -> None:
    """Measure the missing cells."""
    parser = settings_parser(__doc__, "estimators")
    parser.add_argument("--model", choices=DENSITIES, action="append", help="measure only these")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=400, help="steps of the default estimator")
    arguments = parser.parse_args()
    sources = sources_from_environment()
    cells = Cells(arguments.cells)
    for model in arguments.model or DENSITIES:
        package = model_package(sources, model, arguments.folder)
        for text, collection in _COLLECTIONS.items():
            people = cohort(read_users(sources.data, collection).users, least_characters=_LEAST_CHARACTERS)
            for seed in arguments.seeds:
                options = options_for(package, seed=seed, steps=arguments.steps)
                for contender in CONTENDERS:
                    settings = {"model": model, "text": text, "seed": seed, **asdict(contender)}
                    documents = people[seed % len(people)].documents
                    run = partial(measure, package, documents, contender, options, threads=arguments.threads)
                    cells.once("estimators", settings | {"estimator": contender.estimator.value}, run)


if __name__ == "__main__":
    main()

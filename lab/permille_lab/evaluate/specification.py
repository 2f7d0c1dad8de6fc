"""The TOML file that defines a sweep. Unknown keys and wrong values are refused.

    models = ["models/reference-7M"]
    corpus = "c4_sample.jsonl"          # JSON lines with `text`, for sensitive-c4
    bases = ["bf16", "nf4"]
    methods = ["zero-shot", "zo:sensitive-c4", "zo:random", "fo:lora-8"]
    seeds = [0, 1, 2]

    [tasks.sst2]
    train = "SST-2/train.tsv"
    test = "SST-2/dev.tsv"              # optional: without it, the train file is split in three

Paths are relative to the file's folder.
"""

import importlib.util
import json
import tomllib
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from permille.choices import EstimatorKind
from permille.errors import InputError
from permille.extras import install_line
from permille_lab.evaluate.methods import Method, TrainedSet, method
from permille_lab.evaluate.tuning import GRID_FACTOR, TUNING_SEED_OFFSET
from permille_lab.tasks.examples import Task
from permille_lab.tasks.splits import PAPER_SIZES


class Base(StrEnum):
    """The format in which the frozen weights are stored. Matrix products are computed in float32."""

    FLOAT32 = "float32"
    BF16 = "bf16"
    NF4 = "nf4"
    INT4_G32 = "int4-g32"
    INT4_G128 = "int4-g128"
    AUTO_ROUND_INT4 = "auto-round-int4"
    INT8 = "int8"


def _existing(value: object, info: ValidationInfo) -> Path:
    if not isinstance(value, str):
        raise ValueError(f"expected a path, got {value!r:.80}")
    path: Path = (info.context or {})["folder"] / value
    if not path.exists():
        raise ValueError(f"expected it to exist, got {path}")
    return path


def _method(value: object) -> Method:
    try:
        return method(str(value))
    except InputError as exc:
        raise ValueError(str(exc)) from exc


def _each_once(values: Any) -> Any:
    if isinstance(values, list | dict) and (not values or len(set(map(str, values))) < len(values)):
        raise ValueError(f"expected one or more, each once, got {len(values)}")
    return values


_Existing = Annotated[Path, BeforeValidator(_existing)]
_Method = Annotated[Method, BeforeValidator(_method)]
_Count = Annotated[int, Field(ge=1, strict=True)]
_Positive = Annotated[float, Field(gt=0)]
_Seed = Annotated[int, Field(ge=0, lt=TUNING_SEED_OFFSET, strict=True)]
_Once = BeforeValidator(_each_once)


class TaskFiles(BaseModel):
    """Files of one task. If `test` is None, the train file is split into train, validation and test."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    train: _Existing
    test: _Existing | None = None


class Sweep(BaseModel):
    """The settings of a comparison.

    Attributes:
        trials: number of step factors that each trained method tries first (odd). If it is 1, nothing is
            searched and the factor is 1.
        grid_middle: step factor in the middle of these.
        grid_factor: ratio of two neighbours of the grid.
        trial_steps: number of steps of a run that tries a step factor. None for as many as any other run.
        tuning_seeds: number of seeds that compare the first seed's best step factor with its neighbours
            (odd). The search continues while a neighbour is better.
        sizes: numbers of examples of train, validation and test.
        max_tokens: length of the longest example. The front of a longer prompt is cut.
        estimator: `spsa` takes two forward passes for each query. `forward` computes exact directional
            derivatives of all queries from one gradient. On small models it is several times cheaper.
        refresh_steps: number of steps between two selections of a dynamic mask.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    models: Annotated[tuple[_Existing, ...], _Once]
    corpus: _Existing
    tasks: Annotated[dict[Task, TaskFiles], _Once]
    methods: Annotated[tuple[_Method, ...], _Once]
    bases: Annotated[tuple[Base, ...], _Once] = (Base.BF16,)
    seeds: Annotated[tuple[_Seed, ...], _Once] = (0, 1, 2)
    density: float = Field(default=0.001, gt=0, le=1)
    zo_steps: _Count = 1000
    fo_steps: _Count = 100
    queries: _Count = 4
    estimator: EstimatorKind = EstimatorKind.SPSA
    batch_size: _Count = 16
    trials: _Count = 3
    grid_middle: _Positive = 1.0
    grid_factor: Annotated[float, Field(gt=1)] = GRID_FACTOR
    trial_steps: _Count | None = None
    tuning_seeds: _Count = 1
    evaluations: _Count = 10
    sizes: tuple[_Count, _Count, _Count] = PAPER_SIZES
    max_tokens: _Count = 256
    refresh_steps: _Count = 100
    corpus_sequences: _Count = 64
    corpus_tokens: _Count = 128

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if problem := next(self._problems(), None):
            raise ValueError(problem)
        return self

    def _problems(self) -> Iterator[str]:
        for name in ("trials", "tuning_seeds"):
            if getattr(self, name) % 2 == 0:
                yield f"expected an odd number of {name}, got {getattr(self, name)}"
        if self.estimator is EstimatorKind.SPLIT:
            yield "expected an estimator without blocks, got split"
        if len({model.name for model in self.models}) < len(self.models):
            yield "expected models in folders of different names, got a name twice"
        for model in self.models:
            yield from self._problems_of(model)
        for needed, library in (
            (any(item.size for item in self.methods), "peft"),
            (bool({Base.AUTO_ROUND_INT4} & set(self.bases)), "auto_round"),
        ):
            if needed and importlib.util.find_spec(library) is None:
                yield f"{library} is not installed: run {install_line('lab')}"

    def _problems_of(self, model: Path) -> Iterator[str]:
        """Yield the problems of a model. Losses beyond the positions of its training would be meaningless."""
        if missing := [name for name in ("config.json", "tokenizer.json") if not (model / name).is_file()]:
            yield f"expected {' and '.join(missing)} in {model}, got none"
            return
        try:
            positions = json.loads((model / "config.json").read_text("utf-8")).get("max_position_embeddings")
        except (OSError, ValueError, RecursionError, AttributeError) as exc:
            yield f"expected a JSON object in {model / 'config.json'}, got {exc!r:.200}"
            return
        numbers = {"max_tokens": self.max_tokens}
        if any(item.trained is TrainedSet.SENSITIVE_C4 for item in self.methods):
            numbers["corpus_tokens"] = self.corpus_tokens
        for name, number in numbers.items():
            if type(positions) is int and number > positions:
                yield f"expected {name} of at most the {positions} positions of {model.name}, got {number}"


def read_sweep(path: Path) -> Sweep:
    """Read and check a sweep file.

    Raises:
        InputError: the file is not TOML, a key is unknown or missing, or a value does not suit its key.
    """
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise InputError(f"expected a sweep as TOML in {path}, got {exc}") from exc
    return sweep_of(found, path.parent)


def sweep_of(found: dict[str, Any], folder: Path) -> Sweep:
    """Check the keys of a sweep.

    Args:
        folder: base of relative paths.

    Raises:
        InputError: a key is unknown or missing, or a value does not suit its key.
    """
    try:
        return Sweep.model_validate(found, context={"folder": folder})
    except ValidationError as exc:
        first, *others = exc.errors(include_url=False)
        place = ".".join(map(str, first["loc"]))
        more = f"; and {len(others)} more" if others else ""
        said = str(first["msg"]).removeprefix("Value error, ")
        got = "" if "got" in said else f", got {first['input']!r:.80}"
        raise InputError(f"{place}: {said}{got}{more}" if place else f"{said}{more}") from exc

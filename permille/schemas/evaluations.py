"""Evaluations: methods compared on tasks; the keys of a sweep file over REST."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StringConstraints

from permille.schemas.fields import Closed, Count, Density, Digest, Id, Timestamp, WholeNumber
from permille.schemas.models import RelativePath
from permille.zo.log import EstimatorKind
from permille_lab.evaluate.methods import TrainedSet
from permille_lab.evaluate.prompts import Task, Wording
from permille_lab.evaluate.specification import Base
from permille_lab.evaluate.tuning import TUNING_SEED_OFFSET

_SIZE = "([1-9][0-9]?|1[0-9]{2}|2[0-4][0-9]|25[0-6])"
_SIZED = (TrainedSet.LORA, TrainedSet.LORA_FA, TrainedSet.PREFIX, TrainedSet.PREFIX_REAL)
_PLAIN = "|".join(kind for kind in TrainedSet if kind not in _SIZED)
METHOD_PATTERN = rf"^(zero-shot|icl:{_SIZE}|(zo|fo):({_PLAIN}|({'|'.join(_SIZED)})-{_SIZE}))$"
"""What `permille_lab.evaluate.methods.method` parses, written out for a validator and a document alike."""

TASK_PATTERN = f"^({'|'.join(Task)})$"


def _each_once(values: list[Any]) -> list[Any]:
    if len(set(values)) < len(values):
        raise ValueError("expected each of them once")
    return values


def _odd(number: int) -> int:
    if number % 2 == 0:
        raise ValueError(f"expected an odd number, got {number}")
    return number


EachOnce = AfterValidator(_each_once)
_UNIQUE = {"uniqueItems": True}

MethodName = Annotated[str, StringConstraints(pattern=METHOD_PATTERN), Field(examples=["zo:sensitive-c4"])]
TaskName = Annotated[str, StringConstraints(pattern=TASK_PATTERN)]
SweepSeed = Annotated[int, Field(strict=True, ge=0, lt=TUNING_SEED_OFFSET, examples=[0]), WholeNumber]
Steps = Annotated[int, Field(strict=True, ge=1, le=100_000, examples=[1000]), WholeNumber]
Few = Annotated[int, Field(strict=True, ge=1, le=64, examples=[4]), WholeNumber]
BatchSize = Annotated[int, Field(strict=True, ge=1, le=256, examples=[16]), WholeNumber]
Evaluations = Annotated[int, Field(strict=True, ge=1, le=1000, examples=[10]), WholeNumber]
Examples = Annotated[int, Field(strict=True, ge=1, le=100_000, examples=[1000]), WholeNumber]
Tokens = Annotated[int, Field(strict=True, ge=8, le=32_768, examples=[256]), WholeNumber]
Sequences = Annotated[int, Field(strict=True, ge=1, le=8192, examples=[64]), WholeNumber]
OddNumber = Annotated[
    int,
    Field(strict=True, ge=1, le=9, json_schema_extra={"enum": [1, 3, 5, 7, 9]}),
    AfterValidator(_odd),
    WholeNumber,
]
Trials = Annotated[
    OddNumber, Field(examples=[3], description="step sizes that every trained method tries first; odd")
]
TuningSeeds = Annotated[
    OddNumber,
    Field(
        examples=[1],
        description="seeds that choose among the first one's best step size and its neighbours, going on "
        "while a neighbour is better; odd",
    ),
]


class TaskSource(Closed):
    """A task's files below the service's corpus root: JSON lines as SuperGLUE writes them, SST-2 also as
    GLUE's `.tsv`, SQuAD its `.json`, documents (`text`) as an agent's rows. Without `test` the train file is
    divided into all three parts."""

    train: RelativePath = Field(examples=["SST-2/train.tsv"])
    test: RelativePath | None = Field(default=None, examples=["SST-2/dev.tsv"])


class EvaluationOptions(Closed):
    """What is compared, and how much of it; the keys and defaults of a sweep file.

    A cell is one model, base, task, method and seed; there may be 4096.
    """

    tasks: dict[TaskName, TaskSource] = Field(
        min_length=1,
        max_length=len(Task),
        examples=[{"sst2": {"train": "SST-2/train.tsv", "test": "SST-2/dev.tsv"}}],
        json_schema_extra={"additionalProperties": False},
    )
    methods: Annotated[list[MethodName], EachOnce, Field(json_schema_extra=_UNIQUE)] = Field(
        min_length=1, max_length=64, examples=[["zero-shot", "zo:sensitive-c4", "zo:random", "fo:lora-8"]]
    )
    bases: Annotated[list[Base], EachOnce, Field(json_schema_extra=_UNIQUE)] = Field(
        default=[Base.BF16], min_length=1, max_length=len(Base), examples=[["bf16", "nf4"]]
    )
    seeds: Annotated[list[SweepSeed], EachOnce, Field(json_schema_extra=_UNIQUE)] = Field(
        default=[0, 1, 2], min_length=1, max_length=32
    )
    density: Density = 0.001
    zo_steps: Steps = 1000
    fo_steps: Steps = 100
    queries: Few = 4
    estimator: Literal[EstimatorKind.SPSA, EstimatorKind.FORWARD] = EstimatorKind.SPSA
    batch_size: BatchSize = 16
    trials: Trials = 3
    tuning_seeds: TuningSeeds = 1
    evaluations: Evaluations = 10
    sizes: list[Examples] = Field(
        default=[1000, 500, 1000],
        min_length=3,
        max_length=3,
        description="examples of train, validation and test",
    )
    max_tokens: Tokens = 256
    refresh_steps: Steps = 100
    corpus_sequences: Sequences = 64
    corpus_tokens: Tokens = 128
    wording: Wording = Wording.SENSITIVE


class EvaluationCreate(EvaluationOptions):
    """Compare methods on tasks. The corpus, a file, is what `sensitive-c4` takes gradients of, and what
    calibrates bases that need text."""

    model_ids: Annotated[list[Id], EachOnce, Field(json_schema_extra=_UNIQUE)] = Field(
        min_length=1, max_length=16, examples=[["model_01jd3kq8z7m4n5p6r7s8t9v0wx"]]
    )
    corpus_id: Id


class Evaluation(Closed):
    """A finished evaluation. Its results are JSON lines, its report the tables as Markdown."""

    id: Id
    model_ids: list[Id]
    corpus_id: Id
    job_id: Id
    options: EvaluationOptions
    cells: Count = Field(description="that were measured")
    failed_cells: Count = Field(
        description="that could not be measured, their input being wrong; the report names them and says why"
    )
    bad_rows: Count = Field(
        description="rows of task files that could not be read, and examples whose answer does not fit "
        "`max_tokens`, these once for each model; the results name them"
    )
    digest: Digest = Field(description="of the results")
    size_bytes: Count
    created_at: Timestamp

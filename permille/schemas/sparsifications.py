"""Sparsifications: a model with weights set to zero, registered as a model of its own."""

from typing import Annotated, Literal

from pydantic import Field

from permille.pruning.plan import Pattern, PruningMethod, PruningPlan, RecoveryPlan
from permille.schemas.fields import Closed, Id, Name, Seed, WholeNumber
from permille.schemas.jobs import Made

_HALF = 0.5
_LEARNING_RATE = 0.003
_MOST_SEQUENCES = 4096
Rate = Annotated[
    float,
    Field(
        strict=True,
        gt=0,
        lt=1,
        examples=[_HALF],
    ),
]
Rows = Annotated[
    int,
    Field(strict=True, ge=1, le=4096, examples=[128], description="sequences whose inputs decide"),
    WholeNumber,
]
RowLength = Annotated[
    int,
    Field(
        strict=True,
        ge=8,
        le=8192,
        examples=[512],
        description="tokens of a sequence; at most the model's positions",
    ),
    WholeNumber,
]
EvaluationRows = Annotated[
    int,
    Field(strict=True, ge=0, le=4096, examples=[16], description="other sequences, to measure perplexity on"),
    WholeNumber,
]


class Recovery(Closed):
    """Fine-tune LoRA adapters on the corpus and merge them into the weights that stay.

    The whole model is held in memory.
    """

    steps: Annotated[
        int,
        Field(
            strict=True,
            ge=1,
            le=100_000,
            examples=[200],
            description="steps of fine-tuning; a recovery needs them",
        ),
        WholeNumber,
    ]
    rank: Annotated[
        int, Field(strict=True, ge=1, le=256, examples=[8], description="of LoRA"), WholeNumber
    ] = 8
    rows: Annotated[
        int,
        Field(strict=True, ge=1, le=1024, examples=[8], description="sequences of a step"),
        WholeNumber,
    ] = 8
    learning_rate: Annotated[
        float,
        Field(strict=True, gt=0, le=1, examples=[_LEARNING_RATE], description="Adam's at the first step"),
    ] = _LEARNING_RATE

    @property
    def sequences(self) -> int:
        """Of the corpus: each is trained on once, up to a limit."""
        return min(self.steps * self.rows, _MOST_SEQUENCES)

    def plan(self, seed: int) -> RecoveryPlan:
        """Return what the library is asked for."""
        return RecoveryPlan(
            steps=self.steps, rows=self.rows, rate=self.learning_rate, rank=self.rank, seed=seed
        )


class SparsificationCreate(Closed):
    """Set weights of a model to zero, and register the result as a model."""

    model_id: Id = Field(description="the model to make sparse")
    corpus_id: Id = Field(description="text whose inputs decide which weights go")
    name: Name = Field(description="of the model that is made")
    method: PruningMethod = Field(
        default=PruningMethod.WANDA,
        description="by the size of weights and inputs; sparsegpt also changes the weights that stay",
    )
    rate: Rate | None = Field(
        default=None,
        description="share of zeros in each linear; where it is left out, one half or the pattern's own",
    )
    pattern: Literal["2:4", "4:8"] | None = Field(
        default=None, description="so many of so many neighbours stay; without it zeros may be anywhere"
    )
    sequences: Rows = 128
    length: RowLength = 512
    seed: Seed = Field(default=0, description="of the choice of sequences")
    evaluation_sequences: EvaluationRows = 16
    recovery: Recovery | None = Field(default=None, description="fine-tune what is left")

    def plan(self) -> PruningPlan:
        """Return the library's options."""
        pattern = None if self.pattern is None else Pattern.parse(self.pattern)
        own = _HALF if pattern is None else pattern.rate
        return PruningPlan(method=self.method, rates=self.rate or own, pattern=pattern)


class Sparsification(Made):
    """A model that was made sparse. `model_id` is the model before, `made_model_id` the sparse one (null once
    that was removed), the digest that of its files."""

    id: Id
    made_model_id: Id | None
    request: SparsificationCreate

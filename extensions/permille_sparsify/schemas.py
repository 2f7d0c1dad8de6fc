"""Sparsifications: models with weights set to zero, registered as models of their own."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from permille.schemas.fields import (
    EXAMPLE_CORPUS,
    EXAMPLE_MODEL,
    Closed,
    Examples,
    Id,
    Name,
    Seed,
    WholeNumber,
)
from permille.schemas.jobs import Result
from permille_sparsify.plan import Pattern, PruningMethod, PruningPlan, RecoveryPlan

_HALF = 0.5
_LEARNING_RATE = 0.003
# A recovery reads at most this many sequences. If its steps need more, sequences are repeated.
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
    Field(
        strict=True,
        ge=1,
        le=4096,
        examples=[128],
        description="number of sequences whose activations decide which weights to remove",
    ),
    WholeNumber,
]
RowLength = Annotated[
    int,
    Field(
        strict=True,
        ge=8,
        le=8192,
        examples=[512],
        description="tokens in a sequence; at most as many as the model has positions",
    ),
    WholeNumber,
]
EvaluationRows = Annotated[
    int,
    Field(
        strict=True,
        ge=0,
        le=4096,
        examples=[16],
        description="number of other sequences to measure perplexity on",
    ),
    WholeNumber,
]


class Recovery(Closed):
    """Fine-tune LoRA adapters on the corpus, and merge them into the remaining weights.

    This needs the whole model in memory.
    """

    steps: Annotated[
        int,
        Field(
            strict=True,
            ge=1,
            le=100_000,
            examples=[200],
            description="steps of fine-tuning; required for a recovery",
        ),
        WholeNumber,
    ]
    rank: Annotated[
        int, Field(strict=True, ge=1, le=256, examples=[8], description="rank of LoRA"), WholeNumber
    ] = 8
    rows: Annotated[
        int,
        Field(strict=True, ge=1, le=1024, examples=[8], description="sequences in a step"),
        WholeNumber,
    ] = 8
    learning_rate: Annotated[
        float,
        Field(
            strict=True, gt=0, le=1, examples=[_LEARNING_RATE], description="learning rate of the first step"
        ),
    ] = _LEARNING_RATE

    @property
    def sequences(self) -> int:
        """The number of sequences to read: as many as all steps need together, but at most
        `_MOST_SEQUENCES`.
        """
        return min(self.steps * self.rows, _MOST_SEQUENCES)

    def plan(self, seed: int) -> RecoveryPlan:
        """Return the options for `permille_sparsify`."""
        return RecoveryPlan(
            steps=self.steps, rows=self.rows, rate=self.learning_rate, rank=self.rank, seed=seed
        )


class SparsificationCreate(Closed):
    """Set weights of a model to zero, and register the result as a model."""

    examples: ClassVar[Examples] = {
        "half of the weights": {"model_id": EXAMPLE_MODEL, "corpus_id": EXAMPLE_CORPUS, "name": "half"},
        "two of four weights, with the others adjusted": {
            "model_id": EXAMPLE_MODEL,
            "corpus_id": EXAMPLE_CORPUS,
            "name": "two-of-four",
            "method": "sparsegpt",
            "pattern": "2:4",
        },
        "60 % of the weights, then fine-tuning with LoRA": {
            "model_id": EXAMPLE_MODEL,
            "corpus_id": EXAMPLE_CORPUS,
            "name": "tuned",
            "rate": 0.6,
            "recovery": {"steps": 400},
        },
    }

    model_id: Id = Field(description="model to make sparse")
    corpus_id: Id = Field(description="corpus whose activations decide which weights to remove")
    name: Name = Field(description="name of the sparse model")
    method: PruningMethod = Field(
        default=PruningMethod.WANDA,
        description="wanda removes the weights whose size times the size of their inputs is lowest; "
        "sparsegpt also adjusts the remaining weights",
    )
    rate: Rate | None = Field(
        default=None,
        description="share of zeros in each linear layer (default: one half); with a pattern, at most one "
        "half",
    )
    pattern: Literal["2:4", "4:8"] | None = Field(
        default=None,
        description="keep 2 of 4, or 4 of 8, neighbouring weights; with a rate below one half, some groups "
        "keep more (default: zeros may be anywhere)",
    )
    sequences: Rows = 128
    length: RowLength = 512
    seed: Seed = Field(default=0, description="seed of the choice of sequences")
    evaluation_sequences: EvaluationRows = 16
    recovery: Recovery | None = Field(default=None, description="fine-tuning of the remaining weights")

    def plan(self) -> PruningPlan:
        """Return the options for `permille_sparsify`."""
        pattern = None if self.pattern is None else Pattern.parse(self.pattern)
        # Without a rate, remove as many weights as the pattern allows: one half for both 2:4 and 4:8.
        own = _HALF if pattern is None else pattern.rate
        return PruningPlan(method=self.method, rates=self.rate or own, pattern=pattern)


class Sparsification(Result):
    """A sparse model. `digest` is the digest of its files.

    `model_id` is the original model, and `made_model_id` the sparse one. `made_model_id` is null once the
    sparse model was removed.
    """

    id: Id
    made_model_id: Id | None
    request: SparsificationCreate

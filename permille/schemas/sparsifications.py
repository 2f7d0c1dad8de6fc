"""Sparsifications: a model with weights set to zero, registered as a model of its own."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from permille.errors import InputError
from permille.pruning.plan import (
    LONGER,
    SPREAD,
    AdapterKind,
    IterativePlan,
    Pattern,
    PruningMethod,
    PruningPlan,
    RecoveryPlan,
)
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


class LayerRates(StrEnum):
    """How zeros are spread over the decoder layers: equally, or more where layers are alike."""

    EQUAL = "equal"
    SIMILARITY = "similarity"


class Recovery(Closed):
    """Fine-tune small adapters on the corpus, in one turn or in rounds of pruning and fine-tuning, and merge
    them into the weights that stay. The whole model is held in memory."""

    steps: Annotated[
        int,
        Field(
            strict=True,
            ge=1,
            le=100_000,
            examples=[200],
            description="steps of fine-tuning in all; a recovery needs them",
        ),
        WholeNumber,
    ]
    rounds: Annotated[
        int,
        Field(
            strict=True,
            ge=1,
            le=50,
            examples=[1],
            description="of pruning and fine-tuning, each to a higher rate; the last of several has "
            f"{LONGER} times the steps of the others",
        ),
        WholeNumber,
    ] = 1
    adapter: AdapterKind = Field(default=AdapterKind.LORA, description="what is trained beside each linear")
    rank: Annotated[
        int,
        Field(
            strict=True,
            ge=1,
            le=256,
            examples=[8],
            description="of LoRA; pooling takes as many numbers as LoRA of this rank",
        ),
        WholeNumber,
    ] = 8
    rows: Annotated[
        int,
        Field(strict=True, ge=1, le=1024, examples=[8], description="sequences of a step"),
        WholeNumber,
    ] = 8
    learning_rate: Annotated[
        float,
        Field(
            strict=True, gt=0, le=1, examples=[_LEARNING_RATE], description="Adam's at a round's first step"
        ),
    ] = _LEARNING_RATE
    norm_control: Annotated[
        float,
        Field(
            strict=True, ge=0, le=1, examples=[0.0], description="weight of the adapters' squares in the loss"
        ),
    ] = 0.0
    layer_rates: LayerRates = Field(
        default=LayerRates.EQUAL, description="equal ones, or more zeros in layers that are like others"
    )

    @property
    def sequences(self) -> int:
        """Of the corpus: each is trained on once, up to a limit."""
        return min(self.steps * self.rows, _MOST_SEQUENCES)


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
        """What the library is asked for."""
        pattern = None if self.pattern is None else Pattern.parse(self.pattern)
        own = _HALF if pattern is None else pattern.rate
        return PruningPlan(method=self.method, rates=self.rate or own, pattern=pattern)

    def rounds(self) -> IterativePlan:
        """What the library is asked for where there is a recovery.

        Raises:
            InputError: fewer steps than rounds take.
        """
        asked, pruning = self.recovery, self.plan()
        if asked is None:
            raise InputError("expected a recovery, got none")
        longer = LONGER if asked.rounds > 1 else 1
        turns = asked.rounds - 1 + longer
        if asked.steps < turns:
            raise InputError(f"expected {turns} steps or more for {asked.rounds} rounds, got {asked.steps}")
        steps = RecoveryPlan(
            steps=asked.steps // turns,
            rows=asked.rows,
            rate=asked.learning_rate,
            l2=asked.norm_control,
            seed=self.seed,
        )
        return IterativePlan(
            rate=pruning.rate(0),
            method=pruning.method,
            pattern=pruning.pattern,
            rounds=asked.rounds,
            adapter=asked.adapter,
            rank=asked.rank,
            spread=SPREAD if asked.layer_rates is LayerRates.SIMILARITY else 0.0,
            recovery=steps,
            longer=longer,
        )


class Sparsification(Made):
    """A model that was made sparse. `model_id` is the model before, `made_model_id` the sparse one (null once
    that was removed), the digest that of its files."""

    id: Id
    made_model_id: Id | None
    request: SparsificationCreate

"""Bases: directions learned from texts, along which a device takes its first steps."""

from typing import Annotated

from pydantic import Field

from permille.schemas.fields import Closed, Count, Digest, Id, Seed, Timestamp, WholeNumber

BasisSequences = Annotated[int, Field(strict=True, ge=2, le=8192, examples=[256]), WholeNumber]
BasisLength = Annotated[int, Field(strict=True, ge=8, le=32_768, examples=[128]), WholeNumber]
Rank = Annotated[
    int,
    Field(strict=True, ge=1, le=256, examples=[32], description="directions; at most 7/8 of the sequences"),
    WholeNumber,
]


class BasisOptions(Closed):
    """How a basis is learned: one gradient a sequence; every eighth is kept to measure the basis on."""

    sequences: BasisSequences = 256
    length: BasisLength = 128
    rank: Rank = 32
    seed: Seed = 0


class BasisRequest(BasisOptions):
    """Learn a basis from a corpus of public texts, or of texts whose authors agreed: what was learned from
    them is on every device of the release."""

    corpus_id: Id


class BasisCreate(BasisRequest):
    """Learn directions for a mask's weights. Use public texts, or texts whose authors agreed."""

    mask_id: Id


class Basis(Closed):
    """A learned basis. It fits packages of the very same mask."""

    id: Id
    model_id: Id
    mask_id: Id
    corpus_id: Id
    job_id: Id
    options: BasisOptions
    k: Count
    digest: Digest = Field(description="of the basis layer")
    size_bytes: Count
    created_at: Timestamp

"""Releases: a name and a growing version for a package, aliases of them, and what devices make of them."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from permille.choices import Method
from permille.schemas.fields import (
    MAX_INTEGER,
    TEXT_PATTERN,
    Closed,
    Count,
    Digest,
    Finite,
    Name,
    Timestamp,
    WholeNumber,
)

Version = Annotated[int, Field(strict=True, ge=1, le=MAX_INTEGER, examples=[1]), WholeNumber]


class ReleaseTraining(Closed):
    """Training options that a release signs for its devices. Each device's owner may override them."""

    method: Method | None = Field(
        default=None, description="how devices find their steps; else the engine decides"
    )
    steps: Annotated[int, Field(strict=True, ge=1, le=1_000_000), WholeNumber] | None = Field(
        default=None, description="of a run; else what its minutes give"
    )
    first_layer: Annotated[int, Field(strict=True, ge=0, le=1000), WholeNumber] | None = Field(
        default=None, description="train the masked weights of this decoder layer and those above; else all"
    )


class ReleaseCreate(Closed):
    """Publish a package under a name, as its next version."""

    name: Name = Field(description="of the release")
    package_digest: Digest = Field(description="the package to publish")
    alias: Name | None = Field(default=None, description="alias to point at this version, e.g. `stable`")
    training: ReleaseTraining | None = Field(default=None, description="how devices train")


class Release(Closed):
    """A published version. Devices check all of it against the signed trust metadata."""

    name: Name
    version: Version
    manifest_digest: Digest
    size_bytes: Count = Field(description="bytes of the manifest and all layers")
    yanked: bool


class ReleaseRecord(Release):
    """A published version as operators see it."""

    published_at: Timestamp
    aliases: list[Name]
    yanked_reason: str | None = None


class ReleaseYank(Closed):
    """Reason for withdrawing a version."""

    reason: Annotated[str, Field(min_length=1, max_length=500, pattern=TEXT_PATTERN)] = "withdrawn"


class ReleaseYanked(ReleaseRecord):
    """A version that was withdrawn. Whoever has it keeps it, until its alias points at another one."""

    devices: Count = Field(description="active devices that were told this version last")


class AliasPut(Closed):
    """Version that an alias points at."""

    version: Version


class Alias(Closed):
    """An alias of a release, such as `stable` or `canary`."""

    release: Name
    alias: Name
    version: Version


class Band(Closed):
    """The median of many devices, and between which values it lies with 95 % confidence; null: too few."""

    median: Finite
    low: Finite | None
    high: Finite | None


class Outcomes(Closed):
    """Numbers of devices by the outcome of their newest run on a version. Null means too few."""

    adopted: Count | None
    kept_base: Count | None
    refused_data: Count | None
    interrupted: Count | None
    failed: Count | None


class VersionResults(Closed):
    """Results of devices on a version. Only the newest run of each device counts.

    Null: nobody, or too few devices to be told to who may not see each.
    """

    name: Name
    version: Version
    aliases: list[Name]
    yanked: bool
    published_at: Timestamp
    devices: Count | None = Field(description="that were told this version last, as the one of their alias")
    reported: Count | None = Field(description="that have reported a run on it")
    outcomes: Outcomes
    adopted_fraction: Finite | None = Field(description="of those that reported")
    improvement: Band | None = Field(description="nats per token that the personal state takes off the base")
    general_rise: Finite | None = Field(
        description="median of the nats per token by which the personal state raises the loss on general text"
    )
    peak_rss_bytes: Count | None = Field(description="median")


class Measure(StrEnum):
    """Measure for comparing two versions.

    The loss is that after training, for devices that have reported both.
    """

    ADOPTED = "adopted"
    FAILED = "failed"
    IMPROVEMENT = "improvement"
    LOSS = "loss"


class Verdict(StrEnum):
    """Verdict of a comparison, with 95% confidence."""

    WORSE = "worse"
    BETTER = "better"
    UNSURE = "unsure"
    TOO_FEW = "too-few"


class Change(Closed):
    """A measure of two versions, and its change: `low` to `high` with 95% confidence."""

    measure: Measure
    before: Finite
    after: Finite
    difference: Finite
    low: Finite | None
    high: Finite | None
    verdict: Verdict


class Comparison(Closed):
    """Comparison of two versions. A version is worse if any measure is significantly worse."""

    version: VersionResults
    against: VersionResults
    both: Count = Field(description="devices that have reported both")
    verdict: Verdict
    changes: list[Change]

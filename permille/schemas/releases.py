"""Releases: packages under a name and a version, their aliases, and the results of devices."""

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from permille.choices import Method
from permille.schemas.fields import (
    EXAMPLE_DIGEST,
    MAX_INTEGER,
    TEXT_PATTERN,
    Closed,
    Count,
    Digest,
    Examples,
    Finite,
    Name,
    Timestamp,
    WholeNumber,
)

Version = Annotated[int, Field(strict=True, ge=1, le=MAX_INTEGER, examples=[1]), WholeNumber]


class ReleaseTraining(Closed):
    """Training options that a release signs for its devices. The owner of a device may override them."""

    method: Method | None = Field(
        default=None, description="training method of devices (default: the engine decides)"
    )
    # `permille.trust.roles` has the same limit, for the signed form.
    steps: Annotated[int, Field(strict=True, ge=1, le=1_000_000), WholeNumber] | None = Field(
        default=None, description="steps of a run (default: as many as its minutes allow)"
    )
    first_layer: Annotated[int, Field(strict=True, ge=0, le=1000), WholeNumber] | None = Field(
        default=None, description="train only masked weights of this decoder layer and above (default: all)"
    )


class ReleaseCreate(Closed):
    """Publish a package under a name, as its next version."""

    examples: ClassVar[Examples] = {
        "a version that devices install": {
            "name": "tiny-llama",
            "package_digest": EXAMPLE_DIGEST,
            "alias": "stable",
        },
        "a version without an alias, with options for the training": {
            "name": "tiny-llama",
            "package_digest": EXAMPLE_DIGEST,
            "training": {"method": "zeroth-order", "steps": 500},
        },
    }

    name: Name = Field(description="name of the release")
    package_digest: Digest = Field(description="package to publish")
    alias: Name | None = Field(default=None, description="alias to point at this version, e.g. `stable`")
    training: ReleaseTraining | None = Field(default=None, description="training options for devices")
    yanked: bool = Field(default=False, description="publish the package although a version of it was yanked")


class Release(Closed):
    """A published version. Devices check all of it against the signed trust metadata."""

    name: Name
    version: Version
    manifest_digest: Digest
    size_bytes: Count = Field(description="bytes of the manifest and of all layers")
    yanked: bool


class ReleaseRecord(Release):
    """A published version as operators see it."""

    published_at: Timestamp
    aliases: list[Name]
    yanked_reason: str | None = None


class ReleaseYank(Closed):
    """The reason for yanking a version."""

    examples: ClassVar[Examples] = {"with a reason": {"reason": "it forgets general text"}}

    # The pages and the command line print the reason, so it has no control characters.
    reason: Annotated[str, Field(min_length=1, max_length=500, pattern=TEXT_PATTERN)] = "withdrawn"


class ReleaseYanked(ReleaseRecord):
    """A yanked version. Devices that have it keep it until their alias points at another version."""

    devices: Count = Field(description="active devices that were last told this version")


class AliasPut(Closed):
    """The version to which an alias should point."""

    examples: ClassVar[Examples] = {"the first version": {"version": 1}}

    version: Version


class Alias(Closed):
    """An alias of a release, such as `stable` or `canary`."""

    release: Name
    alias: Name
    version: Version


class Band(Closed):
    """The median over devices, with its 95 % confidence interval. The bounds are null for too few
    devices.
    """

    median: Finite
    low: Finite | None
    high: Finite | None


class Outcomes(Closed):
    """The number of devices by the outcome of their newest run on a version. Null means that there are too
    few to show.
    """

    adopted: Count | None
    kept_base: Count | None
    refused_data: Count | None
    interrupted: Count | None
    failed: Count | None


class VersionResults(Closed):
    """Results of devices on a version. Only the newest run of each device counts.

    Null means that there are no devices, or too few to show.
    """

    name: Name
    version: Version
    aliases: list[Name]
    yanked: bool
    published_at: Timestamp
    devices: Count | None = Field(description="devices that were last told this version")
    reported: Count | None = Field(description="devices that reported a run on this version")
    outcomes: Outcomes
    adopted_fraction: Finite | None = Field(
        description="share of the reporting devices that adopted the result of their newest run"
    )
    improvement: Band | None = Field(
        description="by how much the personal state lowers the loss, in nats per token"
    )
    general_rise: Finite | None = Field(
        description="median rise of the loss on general text by the personal state, in nats per token"
    )
    peak_rss_bytes: Count | None = Field(description="median peak memory")


class Measure(StrEnum):
    """A measure for comparing two versions.

    `loss` is the loss after training. It is compared over the devices that reported both versions.
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
    """A measure of two versions, and its change with the 95 % confidence interval `low` to `high`."""

    measure: Measure
    before: Finite
    after: Finite
    difference: Finite
    low: Finite | None
    high: Finite | None
    verdict: Verdict


class Comparison(Closed):
    """A comparison of two versions. A version is worse if any measure is significantly worse."""

    version: VersionResults
    against: VersionResults
    # The loss is compared over these devices only.
    both: Count = Field(description="devices that reported both versions")
    verdict: Verdict
    changes: list[Change]

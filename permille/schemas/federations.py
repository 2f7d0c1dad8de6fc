"""Federations: many devices improve one state in rounds. What operators ask for, what they and devices see.

What a device sends and what a round publishes are bytes (FORMAT 13), not records.
"""

from enum import StrEnum
from typing import Annotated, Final, Literal

from pydantic import Field

from permille.choices import EstimatorKind, Method
from permille.schemas.fields import (
    TEXT_PATTERN,
    Closed,
    Count,
    Digest,
    Finite,
    Id,
    Name,
    Positive,
    Timestamp,
    WholeNumber,
)
from permille.schemas.releases import Version

CONTRIBUTION_MEDIA_TYPE: Final = "application/vnd.permille.contribution"
CATCH_UP_MEDIA_TYPE: Final = "application/vnd.permille.catch-up"
ROUND_MEDIA_TYPE: Final = "application/vnd.permille.round"
DEFINITION_MEDIA_TYPE: Final = "application/vnd.permille.federation+json"
# The most integers of a contribution: they fit the body of a request.
MAX_INTEGERS: Final = 200_000
# The most rounds of a federation: a column of 32 bits holds their numbers.
MAX_ROUNDS: Final = 1 << 20
# The most devices of a round.
MAX_DEVICES: Final = 65536
MAX_DP_EPSILON: Final = 1000
# The largest learning rate and perturbation: values of weights lie below one.
MAX_RATE: Final = 10
# So many devices' gains say whether a state may be adopted.
EVIDENCE_DEVICES: Final = 30

_Rate = Annotated[float, Field(strict=True, gt=0, le=MAX_RATE, allow_inf_nan=False)]


class FederationState(StrEnum):
    """State of a federation. Only a running one opens rounds; a finished one never runs again."""

    DRAFT = "draft"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"


class RoundState(StrEnum):
    """State of a round. A void one changed no state. Published and void are final."""

    OPEN = "open"
    CLOSING = "closing"
    PUBLISHED = "published"
    VOID = "void"


class ChargeState(StrEnum):
    """State of a device's charge for a round. Spent is final."""

    RESERVED = "reserved"
    SPENT = "spent"
    RELEASED = "released"


class ScheduleCreate(Closed):
    """End of a round, and the number of rounds."""

    rounds: Annotated[
        int, Field(strict=True, ge=1, le=MAX_ROUNDS, description="the most rounds there will be"), WholeNumber
    ] = 100
    target: Annotated[
        int,
        Field(strict=True, ge=1, le=MAX_DEVICES, description="a round closes with so many devices"),
        WholeNumber,
    ] = 100
    minimum: Annotated[
        int, Field(strict=True, ge=1, le=MAX_DEVICES, description="a round of fewer is void"), WholeNumber
    ] = 10
    deadline_s: Annotated[
        int,
        Field(strict=True, ge=1, le=30 * 86400, description="seconds until a round closes in any case"),
        WholeNumber,
    ] = 86400


class TrainingCreate(Closed):
    """Computation of a device in a round."""

    method: Method = Field(default=Method.GRADIENT, description="how a device finds its steps")
    estimator: EstimatorKind | None = Field(
        default=None, description="of zeroth order, how a step is estimated; else one_sided"
    )
    steps: Annotated[
        int, Field(strict=True, ge=1, le=65535, description="logged steps of a round"), WholeNumber
    ] = 1
    queries: Annotated[
        int, Field(strict=True, ge=1, le=8192, description="integers a step of one device"), WholeNumber
    ] = 1024
    local_steps: Annotated[
        int,
        Field(
            strict=True,
            ge=1,
            le=1024,
            description="of Adam on every weight, whose sum one logged step holds; 1 in zeroth order",
        ),
        WholeNumber,
    ] = 1
    learning_rate: _Rate | None = Field(
        default=None, description="along the gradient by default that of the package's weights"
    )
    epsilon: _Rate | None = Field(default=None, description="perturbation scale, of zeroth order")
    batch_rows: Annotated[
        int, Field(strict=True, ge=1, le=1024, description="texts of a device's batch"), WholeNumber
    ] = 4
    row_tokens: Annotated[
        int, Field(strict=True, ge=8, le=8192, description="the most tokens of a text"), WholeNumber
    ] = 128


class AggregationCreate(Closed):
    """Rule that joins the integers of a round's devices."""

    rule: Literal["mean", "trimmed"] = Field(default="mean", description="how devices' integers become one")
    trim_percent: Annotated[
        int,
        Field(strict=True, ge=0, le=50, description="left out at each end, for trimmed; 50: the median"),
        WholeNumber,
    ] = 0
    clip: Annotated[
        int | None,
        Field(strict=True, ge=10, le=(1 << 31) - 1, description="bound on the norm of a device's integers"),
        WholeNumber,
    ] = None
    few_devices: bool = Field(
        default=False,
        description="publish sums without noise over fewer than ten devices, each of which they expose",
    )


class PrivacyCreate(Closed):
    """Privacy of each device: noise in every sum, and a limit of participations."""

    dp_epsilon: Annotated[float, Field(strict=True, gt=0, le=MAX_DP_EPSILON, allow_inf_nan=False)] = Field(
        description="the most that all rounds of one device cost; decides the noise"
    )
    participations: Annotated[
        int, Field(strict=True, ge=1, le=1 << 20, description="the most rounds of one device"), WholeNumber
    ]
    delta_exponent: Annotated[
        int,
        Field(strict=True, ge=3, le=12, description="of delta: 6 is a millionth; below one over all devices"),
        WholeNumber,
    ] = 6
    keeper_key: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{43}$")] | None = Field(
        default=None, description="public key of a keeper, who adds the noise so that no one sees a vector"
    )
    keeper_url: Annotated[str, Field(min_length=1, max_length=200, pattern=TEXT_PATTERN)] | None = Field(
        default=None, description="where the keeper answers"
    )


class FederationCreate(Closed):
    """Define a federation on a release; devices join it by their own choice once it runs.

    Example:

        FederationCreate(name="readers", release="chat", schedule=ScheduleCreate(rounds=50, minimum=30))
    """

    name: Name = Field(description="of the federation")
    release: Name = Field(description="the release whose devices may join")
    version: Version | None = Field(default=None, description="of the release; else its newest")
    schedule: ScheduleCreate = Field(default=ScheduleCreate(), description="when rounds end")
    training: TrainingCreate = Field(default=TrainingCreate(), description="what devices compute")
    aggregation: AggregationCreate = Field(
        default=AggregationCreate(), description="how devices' integers become one"
    )
    privacy: PrivacyCreate | None = Field(default=None, description="noise in the sums; wants a clip")


class FederationSummary(Closed):
    """Public view of a federation. Its definition is a signed target named by the digest."""

    id: Id
    name: Name
    state: FederationState
    release: Name
    version: Version
    package_digest: Digest
    definition_digest: Digest
    number: Count = Field(description="rounds done")
    rounds: Positive = Field(description="the most there will be")
    adopted_round: Count | None = Field(description="devices begin with the state after so many rounds")


class FederationOffer(FederationSummary):
    """A federation that a device may join, or is a member of."""

    member: bool
    target: Positive = Field(description="a round closes with so many devices")


class Federation(FederationSummary):
    """A federation as operators see it."""

    target: Positive
    minimum: Positive
    deadline_s: Positive
    members: Count = Field(description="devices that joined and may still come")
    chain: Digest = Field(description="of all rounds so far")
    state_digest: Digest
    created_at: Timestamp


class PrivacySpent(Closed):
    """Number of devices with this number of rounds, and the cost to each."""

    rounds: Count
    devices: Count
    dp_epsilon: Finite


class FederationPrivacy(Closed):
    """Privacy guarantee of a federation, and the part that is spent."""

    mode: Literal["central", "keeper"] = Field(description="who adds the noise: the service, or a keeper")
    noise_multiplier: Finite = Field(description="of each integer of a sum, over the clip")
    clip: Positive
    delta: Finite
    participations: Positive = Field(description="the most rounds of one device")
    dp_epsilon: Finite = Field(description="after so many")
    dp_epsilon_of_one: Finite = Field(description="after one round")
    signal_to_noise: Finite = Field(description="predicted, of a round that reaches its target")
    keeper_url: str | None
    spent: list[PrivacySpent] = Field(description="by rounds; devices that took part in none are not listed")


class RoundRecord(Closed):
    """A round, as operators see it.

    Its gain, in nats per token, is that of the state that devices started from.
    """

    number: Count
    state: RoundState
    opened_at: Timestamp
    deadline_at: Timestamp
    closed_at: Timestamp | None
    invited: Count
    received: Count = Field(description="contributions accepted so far, those of devices that left excluded")
    counted: Count | None = Field(description="devices of the published round")
    refused: dict[str, Count] = Field(description="how many were refused, by the code of the refusal")
    reason: str | None = Field(description="why it is void")
    job_id: Id | None = Field(description="that closes it")
    mean_gain: float | None
    gain_low: float | None = Field(description="lower end of the 95 % interval of the mean")
    chain: Digest | None
    state_digest: Digest | None


class RoundRequest(Closed):
    """Close a round: the payload of a job that the service starts itself."""

    federation_id: Id
    number: Count


class RoundInvitation(Closed):
    """Inputs of a device's part in the open round."""

    round: Count
    seconds_left: Annotated[float, Field(ge=0)] = Field(
        description="to the deadline, so that no device's clock need be right"
    )
    start_digest: Digest = Field(description="of the state to begin from")


class ContributionReceipt(Closed):
    """That a contribution is kept; the same bytes may be sent again."""

    round: Count
    digest: Digest


class AdoptionCreate(Closed):
    """Have members' devices begin with the federation's state after `round` rounds."""

    round: Count | None = Field(default=None, description="else the newest whose gain is known")
    reason: Annotated[str, Field(min_length=1, max_length=500, pattern=TEXT_PATTERN)] | None = Field(
        default=None, description="adopt it even where its gain is not sure, for this reason"
    )


class Adoption(Closed):
    """A state that devices begin with, and the evidence."""

    round: Count
    state_digest: Digest
    devices: Count = Field(description="whose gains were measured")
    mean_gain: float | None = Field(description="nats per token")
    gain_low: float | None
    sure: bool = Field(description=f"the lower end is above 0, of at least {EVIDENCE_DEVICES} devices")

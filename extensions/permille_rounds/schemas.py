"""Federations, in which many devices improve one state in rounds: the requests and records of the API.

The models below are JSON. Contributions and published rounds are binary: FORMAT 13 defines them.
"""

from enum import StrEnum
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from permille.choices import EstimatorKind, Method
from permille.schemas.fields import (
    TEXT_PATTERN,
    Closed,
    Count,
    Digest,
    Examples,
    Finite,
    Id,
    Name,
    Positive,
    Timestamp,
    WholeNumber,
)
from permille.schemas.releases import Version

CONTRIBUTION_MEDIA_TYPE: Final = "application/vnd.permille.contribution"
_CONTRIBUTION: Final = {
    "one step of three integers, in base64": (
        "UE1MQ1RCMQoBI0VniavN7wEjRWeJq83vASNFZ4mrze8BI0VniavN7wEAAAABAQABI0VniavN7wEjRWeJq83vASNFZ4mrze8B"
        "I0VniavN7wUAAAAGAwrIAYHpwvYIUBkLrxIBSMMwqdbbTE2LXHSVdlUYa6H1THRxQtMcO1t6Ud88CM/ufOlqbCUsI3Cm5747"
        "YC5mpAeltw0="
    )
}
CONTRIBUTION_EXAMPLES: Final = {
    CONTRIBUTION_MEDIA_TYPE: _CONTRIBUTION,
    "application/octet-stream": _CONTRIBUTION,
}
CATCH_UP_MEDIA_TYPE: Final = "application/vnd.permille.catch-up"
ROUND_MEDIA_TYPE: Final = "application/vnd.permille.round"
DEFINITION_MEDIA_TYPE: Final = "application/vnd.permille.federation+json"
# A contribution has at most this many integers, so that it fits into the body of a request.
MAX_INTEGERS: Final = 200_000
# A federation has at most this many rounds. A column of 32 bits holds their numbers.
MAX_ROUNDS: Final = 1 << 20
# At most this many devices contribute to a round.
MAX_DEVICES: Final = 65536
MAX_DP_EPSILON: Final = 1000
# The largest learning rate and epsilon. Weights lie below one, so larger values make no sense.
MAX_RATE: Final = 10
# The longest time from the opening of a round to its deadline.
MAX_DEADLINE_S: Final = 30 * 86400
# Without a reason, a state is adopted only if at least this many devices measured its gain.
EVIDENCE_DEVICES: Final = 30

# A device computes with the numbers of these records, so each has a limit that a wrong service cannot exceed.
_Rounds = Annotated[int, Field(strict=True, ge=0, le=MAX_ROUNDS, examples=[1]), WholeNumber]
_Devices = Annotated[int, Field(strict=True, ge=1, le=MAX_DEVICES, examples=[1]), WholeNumber]
# Zero would train nothing.
_Rate = Annotated[float, Field(strict=True, gt=0, le=MAX_RATE, allow_inf_nan=False)]


class FederationState(StrEnum):
    """State of a federation. Only a running federation opens rounds. A finished one never runs again."""

    DRAFT = "draft"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"


class RoundState(StrEnum):
    """State of a round. A void round did not change the federation's state. Both `published` and `void`
    are final.
    """

    OPEN = "open"
    CLOSING = "closing"
    PUBLISHED = "published"
    VOID = "void"


class ChargeState(StrEnum):
    """State of a device's privacy charge for a round. `spent` is final."""

    RESERVED = "reserved"
    SPENT = "spent"
    RELEASED = "released"


class ScheduleCreate(Closed):
    """The number of rounds, and the conditions that end a round."""

    rounds: Annotated[
        int,
        Field(strict=True, ge=1, le=MAX_ROUNDS, description="rounds after which the federation is finished"),
        WholeNumber,
    ] = 100
    target: Annotated[
        int,
        Field(
            strict=True, ge=1, le=MAX_DEVICES, description="a round closes once this many devices contributed"
        ),
        WholeNumber,
    ] = 100
    minimum: Annotated[
        int,
        Field(strict=True, ge=1, le=MAX_DEVICES, description="a round with fewer devices is void"),
        WholeNumber,
    ] = 10
    deadline_s: Annotated[
        int,
        Field(
            strict=True,
            ge=1,
            le=MAX_DEADLINE_S,
            description="seconds until the deadline, at which a round closes; if no device was invited, the "
            "deadline is postponed",
        ),
        WholeNumber,
    ] = 86400


class TrainingCreate(Closed):
    """The training on each device in a round."""

    method: Method = Field(default=Method.GRADIENT, description="training method")
    estimator: EstimatorKind | None = Field(
        default=None, description="estimator of zeroth-order steps (default: one_sided)"
    )
    steps: Annotated[
        # FORMAT 13.2: a contribution counts its steps in a u16.
        int, Field(strict=True, ge=1, le=65535, description="logged steps in a round"), WholeNumber
    ] = 1
    queries: Annotated[
        # FORMAT 8.1: with groups, a step has at most 8192 coefficients.
        int,
        Field(strict=True, ge=1, le=8192, description="integers that a device contributes per logged step"),
        WholeNumber,
    ] = 1024
    local_steps: Annotated[
        int,
        Field(
            strict=True,
            ge=1,
            le=1024,
            # FORMAT 13.1: several local steps need the gradient.
            description="local Adam steps whose sum is one logged step; 1 for zeroth order",
        ),
        WholeNumber,
    ] = 1
    learning_rate: _Rate | None = Field(
        default=None, description="learning rate (default: derived from the package)"
    )
    epsilon: _Rate | None = Field(
        default=None, description="perturbation scale of zeroth order (default: derived from the package)"
    )
    batch_rows: Annotated[
        # FORMAT 13.1 limits both `batch_rows` and `row_tokens`.
        int, Field(strict=True, ge=1, le=1024, description="texts in a device's batch"), WholeNumber
    ] = 4
    row_tokens: Annotated[
        int,
        Field(
            strict=True,
            ge=8,
            le=8192,
            description="largest number of tokens of a text that a device trains on",
        ),
        WholeNumber,
    ] = 128


class AggregationCreate(Closed):
    """The rule that combines the integers that devices contribute to a round."""

    rule: Literal["mean", "trimmed"] = Field(
        default="mean", description="rule that combines the integers of the devices"
    )
    trim_percent: Annotated[
        int,
        Field(
            # FORMAT 13.1: 0 with `mean`, and at least 1 with `trimmed`.
            strict=True,
            ge=0,
            le=50,
            description="percent of the devices' values that the rule `trimmed` drops at each end; 50 gives "
            "the median",
        ),
        WholeNumber,
    ] = 0
    clip: Annotated[
        int | None,
        # FORMAT 13.1 sets these limits.
        Field(strict=True, ge=10, le=(1 << 31) - 1, description="bound on the norm of a device's integers"),
        WholeNumber,
    ] = None
    few_devices: bool = Field(
        default=False,
        description="allow sums without noise over fewer than ten devices, although they expose each device",
    )


class PrivacyCreate(Closed):
    """The privacy of each device: noise in every sum, and a limit on the rounds in which it takes part."""

    dp_epsilon: Annotated[float, Field(strict=True, gt=0, le=MAX_DP_EPSILON, allow_inf_nan=False)] = Field(
        description="privacy budget of one device over all rounds; determines the noise"
    )
    participations: Annotated[
        int,
        Field(strict=True, ge=1, le=1 << 20, description="a device takes part in at most this many rounds"),
        WholeNumber,
    ]
    delta_exponent: Annotated[
        int,
        Field(
            strict=True, ge=3, le=12, description="n; delta is 1e-n and should be below 1 / number of devices"
        ),
        WholeNumber,
    ] = 6
    # 32 bytes in base64url without padding.
    keeper_key: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{43}$")] | None = Field(
        default=None,
        description="public key of a keeper, which adds the noise so that nobody sees a device's integers",
    )
    keeper_url: Annotated[str, Field(min_length=1, max_length=200, pattern=TEXT_PATTERN)] | None = Field(
        default=None, description="address of the keeper"
    )


class FederationCreate(Closed):
    """Define a federation on a release. Devices join it by their own choice once it runs.

    For example:

        FederationCreate(name="readers", release="chat", schedule=ScheduleCreate(rounds=50,
        minimum=30))
    """

    examples: ClassVar[Examples] = {
        "50 rounds of at least 30 devices": {
            "name": "readers",
            "release": "tiny-llama",
            "schedule": {"rounds": 50, "minimum": 30},
        },
        "the median of all devices": {
            "name": "writers",
            "release": "tiny-llama",
            "aggregation": {"rule": "trimmed", "trim_percent": 50},
        },
        "noise in every sum": {
            "name": "doctors",
            "release": "tiny-llama",
            "schedule": {"target": 1000, "minimum": 500},
            "aggregation": {"clip": 1000},
            "privacy": {"dp_epsilon": 8.0, "participations": 20},
        },
    }

    name: Name = Field(description="name of the federation")
    release: Name = Field(description="release whose devices may join")
    version: Version | None = Field(default=None, description="version of the release (default: the newest)")
    schedule: ScheduleCreate = Field(
        default=ScheduleCreate(), description="number of rounds, and conditions that end a round"
    )
    training: TrainingCreate = Field(default=TrainingCreate(), description="training on the devices")
    aggregation: AggregationCreate = Field(
        default=AggregationCreate(), description="rule that combines the integers of the devices"
    )
    privacy: PrivacyCreate | None = Field(default=None, description="noise in the sums; needs a clip")


class FederationSummary(Closed):
    """The public view of a federation. `definition_digest` names its definition, which is a signed target."""

    id: Id
    name: Name
    state: FederationState
    release: Name
    version: Version
    package_digest: Digest
    definition_digest: Digest
    number: _Rounds = Field(description="number of rounds that have ended")
    rounds: _Rounds = Field(description="rounds after which the federation is finished")
    adopted_round: _Rounds | None = Field(
        description="devices begin with the state after this many rounds; null before an adoption"
    )


class FederationOffer(FederationSummary):
    """A federation that a device may join, or is a member of."""

    member: bool
    target: _Devices = Field(description="a round closes once this many devices contributed")


class Federation(FederationSummary):
    """A federation as operators see it."""

    target: Positive
    minimum: Positive
    deadline_s: Positive
    members: Count = Field(description="number of devices that joined and did not leave")
    chain: Digest = Field(description="digest of all rounds so far")
    state_digest: Digest
    created_at: Timestamp


class PrivacySpent(Closed):
    """The number of devices that took part in `rounds` rounds, and the epsilon that each has spent."""

    rounds: Count
    devices: Count
    dp_epsilon: Finite


class FederationPrivacy(Closed):
    """The privacy guarantee of a federation, and the part that is spent."""

    mode: Literal["central", "keeper"] = Field(
        description="who adds the noise: the service (`central`) or a keeper"
    )
    noise_multiplier: Finite = Field(
        description="standard deviation of the noise in each integer of a sum, divided by the clip"
    )
    clip: Positive
    delta: Finite
    participations: Positive = Field(description="a device takes part in at most this many rounds")
    dp_epsilon: Finite = Field(description="epsilon of a device after `participations` rounds")
    dp_epsilon_of_one: Finite = Field(description="epsilon of a device after one round")
    signal_to_noise: Finite = Field(
        description="predicted signal-to-noise ratio of a round that reaches its target"
    )
    keeper_url: str | None
    spent: list[PrivacySpent] = Field(
        description="devices by the number of their rounds, without those that took part in none"
    )


class RoundRecord(Closed):
    """A round, as operators see it.

    `mean_gain` and `gain_low`, in nats per token, are gains of the state from which the devices started.
    """

    number: Count
    state: RoundState
    opened_at: Timestamp
    deadline_at: Timestamp
    closed_at: Timestamp | None
    invited: Count
    received: Count = Field(
        description="accepted contributions, without those of devices that left or were dropped"
    )
    counted: Count | None = Field(description="number of devices in the published round")
    refused: dict[str, Count] = Field(description="number of refused contributions, by error code")
    dropped: dict[Id, str] = Field(
        description="devices whose accepted contributions were left out, with the error codes; `round-seal`: "
        "the keeper could not open the device's seal"
    )
    reason: str | None = Field(description="reason of a void round")
    job_id: Id | None = Field(description="job that closes the round")
    mean_gain: float | None
    # An adoption without a reason needs a `gain_low` above 0, measured by at least EVIDENCE_DEVICES devices.
    gain_low: float | None = Field(description="lower end of the 95 % interval of the mean")
    chain: Digest | None
    state_digest: Digest | None


class RoundRequest(Closed):
    """Close a round. This is the payload of a job that the service starts itself."""

    federation_id: Id
    number: Count


class RoundInvitation(Closed):
    """Data with which a device takes part in the open round."""

    round: _Rounds
    seconds_left: Annotated[float, Field(strict=True, ge=0, le=MAX_DEADLINE_S, allow_inf_nan=False)] = Field(
        description="seconds until the deadline: a duration, since a device's clock may be wrong"
    )
    start_digest: Digest = Field(description="digest of the state to begin from")


class ContributionReceipt(Closed):
    """The receipt of a stored contribution. The device may send the same bytes again."""

    round: Count
    digest: Digest


class AdoptionCreate(Closed):
    """Let the devices that are members begin with the federation's state after `round` rounds."""

    examples: ClassVar[Examples] = {
        "the newest state whose gain is sure": {},
        "a state whose gain is not sure": {"round": 12, "reason": "a trial with few devices"},
    }

    round: Count | None = Field(
        default=None,
        description="take the state after this many rounds (default: the newest state with a known gain)",
    )
    reason: Annotated[str, Field(min_length=1, max_length=500, pattern=TEXT_PATTERN)] | None = Field(
        default=None, description="reason to adopt the state even if its gain is not sure"
    )


class Adoption(Closed):
    """A state with which devices begin, and the evidence for it."""

    round: Count
    state_digest: Digest
    devices: Count = Field(description="number of devices that measured the gain")
    mean_gain: float | None = Field(description="mean gain in nats per token")
    gain_low: float | None
    sure: bool = Field(
        description=f"whether `gain_low` is above 0, measured by at least {EVIDENCE_DEVICES} devices"
    )

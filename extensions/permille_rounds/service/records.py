"""Conversion of the database rows of federations and rounds to records of the API."""

import math

from sqlalchemy.orm import Session

from permille.confidence import lower_mean
from permille.store import tables
from permille.store.errors import NotFoundError
from permille_rounds.definition import Definition
from permille_rounds.privacy.zcdp import signal_to_noise
from permille_rounds.schemas import (
    EVIDENCE_DEVICES,
    Adoption,
    Federation,
    FederationOffer,
    FederationPrivacy,
    FederationState,
    FederationSummary,
    PrivacySpent,
    RoundRecord,
    RoundState,
)
from permille_rounds.store import members, rounds

_FEWEST = 6
"""Minimum number of devices in a round whose gain gets a confidence interval.

Student's t assumes gains that are nearly normally distributed. With fewer devices, the interval depends too
much on this assumption.
"""


def present(session: Session, row: tables.Federation) -> Federation:
    """Return the record of a federation as operators see it."""
    return Federation(
        **_summary(row).model_dump(),
        target=row.target,
        minimum=row.minimum,
        deadline_s=row.deadline_s,
        members=members.count(session, row.id),
        chain=row.chain,
        state_digest=row.state_digest,
        created_at=row.created_at,
    )


def present_offer(row: tables.Federation, *, member: bool) -> FederationOffer:
    """Return the record of a federation as devices see it."""
    return FederationOffer(**_summary(row).model_dump(), member=member, target=row.target)


def present_privacy(row: tables.Federation, distribution: dict[int, int]) -> FederationPrivacy:
    """Return the privacy guarantee of a federation. Raises NotFoundError if there is none."""
    definition = Definition.from_bytes(row.definition)
    privacy, clip = definition.privacy, definition.clip
    if privacy is None or clip is None:
        raise NotFoundError(f"The federation {row.id!r} gives no privacy guarantee.")
    integers = definition.steps * definition.log.queries
    return FederationPrivacy(
        mode=privacy.mode.value,
        noise_multiplier=privacy.noise_multiplier,
        clip=clip,
        delta=10.0**-privacy.delta_exponent,
        participations=privacy.participations,
        dp_epsilon=privacy.dp_epsilon(privacy.participations),
        dp_epsilon_of_one=privacy.dp_epsilon(1),
        signal_to_noise=signal_to_noise(row.target, integers, privacy.noise_multiplier),
        keeper_url=None if privacy.keeper is None else privacy.keeper.url,
        spent=[
            PrivacySpent(rounds=rounds, devices=devices, dp_epsilon=privacy.dp_epsilon(rounds))
            for rounds, devices in distribution.items()
        ],
    )


def present_round(session: Session, row: tables.Round) -> RoundRecord:
    """Return the record of a round as operators see it."""
    invited, received = rounds.counts(session, row)
    return RoundRecord(
        number=row.number,
        state=RoundState(row.state),
        opened_at=row.opened_at,
        deadline_at=row.deadline_at,
        closed_at=row.closed_at,
        invited=invited,
        received=received,
        counted=row.counted,
        # The values of a JSON column can be of any type. Keep only counts.
        refused={code: count for code, count in row.refused.items() if isinstance(count, int)},
        dropped={device_id: code for device_id, code in row.dropped.items() if isinstance(code, str)},
        reason=row.reason,
        job_id=row.job_id,
        mean_gain=row.gain_mean,
        gain_low=gain_low(row),
        chain=row.chain,
        state_digest=row.state_digest,
    )


def adoption_of(row: tables.Round) -> Adoption:
    """Return the gain of the state from which a round started, as the devices of the round measured it."""
    low = gain_low(row)
    return Adoption(
        round=row.number,
        state_digest=row.start_digest,
        devices=row.counted or 0,
        mean_gain=row.gain_mean,
        gain_low=low,
        sure=low is not None and low > 0 and (row.counted or 0) >= EVIDENCE_DEVICES,
    )


def gain_low(row: tables.Round) -> float | None:
    """Return the lower end of the 95 % confidence interval of the mean gain (Student's t).

    Return None if no gain was measured, or if too few devices took part.
    """
    devices = row.counted or 0
    if row.gain_mean is None or row.gain_error is None or devices < _FEWEST:
        return None
    return lower_mean(row.gain_mean, row.gain_error * math.sqrt(devices), devices, alpha=0.025)


def _summary(row: tables.Federation) -> FederationSummary:
    return FederationSummary(
        id=row.id,
        name=row.name,
        state=FederationState(row.state),
        release=row.release,
        version=row.version,
        package_digest=row.package_digest,
        definition_digest=row.definition_digest,
        number=row.number,
        rounds=row.rounds,
        adopted_round=row.adopted_round,
    )

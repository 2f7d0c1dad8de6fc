"""Conversion of the database rows of groups and rollouts to records of the API."""

from collections.abc import Iterable

from sqlalchemy.orm import Session

from permille.store import tables
from permille_rollouts.schemas.groups import DeviceGroup
from permille_rollouts.schemas.rollouts import Rollout, RolloutRules, WaveFunnel
from permille_rollouts.store import groups, rollouts


def present_group(row: tables.DeviceGroup, found: Iterable[groups.Candidate]) -> DeviceGroup:
    """Return the record of a group as operators see it. `found` are all devices of the tenant."""
    rule = groups.rule_of(row)
    return DeviceGroup(
        id=row.id,
        name=row.name,
        rule=rule,
        devices=len(groups.chosen(rule, found)),
        created_at=row.created_at,
    )


def present(session: Session, row: tables.Rollout) -> Rollout:
    """Return the record of a rollout as operators see it.

    It includes the funnel, which counts for each wave how far its devices have come.
    """
    rules = RolloutRules.model_validate(row.rules)
    funnel = rollouts.funnel(session, row.id, len(rules.waves))
    return Rollout.model_validate(
        {
            "id": row.id,
            "release": row.release,
            "version": row.version,
            "before": row.before,
            "alias": row.alias,
            "group_id": row.group_id,
            "state": row.state,
            "wave": row.wave + 1,
            "wave_devices": row.wave_devices,
            "awaits_approval": row.awaits_approval,
            "rules": rules,
            "window": row.window,
            "on_stop": row.on_stop,
            "reason": row.reason,
            "numbers": None
            if row.numbers is None
            else {key: float(str(value)) for key, value in row.numbers.items()},
            "opened_at": row.opened_at,
            "created_at": row.created_at,
            "ended_at": row.ended_at,
            "funnel": [
                WaveFunnel(size=size, **counts) for size, counts in zip(rules.waves, funnel, strict=True)
            ],
        }
    )

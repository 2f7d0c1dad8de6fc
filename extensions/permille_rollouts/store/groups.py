"""Groups of devices. A group is a rule, and its members follow from the current rows of the devices."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import select
from sqlalchemy.orm import Session

from permille.store import rows
from permille.store.database import now
from permille.store.errors import ConflictError
from permille.store.fleet.versions import active
from permille.store.ids import Prefix, new_id
from permille.store.tables import Device, DeviceGroup, Rollout
from permille_rollouts.offer import Choice, Facts, members_of
from permille_rollouts.schemas.groups import GroupRule

MAX_GROUPS: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The facts about a device that rules examine."""

    id: str
    tags: frozenset[str]
    facts: Facts


def create(session: Session, *, tenant_id: str, name: str, rule: GroupRule) -> DeviceGroup:
    """Add a group.

    Raises:
        ConflictError: the name is taken, or the tenant has too many groups.
        NotFoundError: the rule names an unknown device.
    """
    rows.check_room(session, DeviceGroup, tenant_id=tenant_id, most=MAX_GROUPS)
    taken = select(DeviceGroup.id).where(DeviceGroup.tenant_id == tenant_id, DeviceGroup.name == name)
    if session.scalar(taken) is not None:
        raise ConflictError(
            f"There is a group {name!r} already. Choose another name, or remove the "
            f"existing one with `permille groups delete {name}`."
        )
    known = set(session.scalars(select(Device.id).where(*active(tenant_id), Device.id.in_(rule.devices))))
    for device_id in rule.devices:
        # `rows.get` raises for an unknown device. A device that left is accepted, but never selected.
        if device_id not in known:
            rows.get(session, Device, tenant_id=tenant_id, row_id=device_id)
    return rows.add(
        session,
        DeviceGroup(
            id=new_id(Prefix.GROUP),
            tenant_id=tenant_id,
            created_at=now(session),
            name=name,
            rule=rule.model_dump(mode="json"),
        ),
    )


def delete(session: Session, *, tenant_id: str, group_id: str) -> None:
    """Remove a group for which no rollout was ever made. Raises NotFoundError, ConflictError."""
    row = rows.lock(session, DeviceGroup, tenant_id=tenant_id, row_id=group_id, to_remove=True)
    if session.scalar(select(Rollout.id).where(Rollout.group_id == group_id).limit(1)) is not None:
        raise ConflictError(f"A rollout was made for the group {row.name!r}, so it cannot be deleted.")
    session.delete(row)


def put_tags(session: Session, *, tenant_id: str, device_id: str, tags: list[str]) -> None:
    """Replace the tags of a device. Raises NotFoundError."""
    row = rows.get(session, Device, tenant_id=tenant_id, row_id=device_id)
    row.tags = sorted(set(tags))


def put_facts(session: Session, *, device_id: str, facts: Facts) -> None:
    """Store the facts that a device reports about itself."""
    row = session.get(Device, device_id)
    if row is not None:
        row.agent_version, row.memory_bytes = facts.agent_version, facts.memory_bytes
        # A device without a training run reports no engine. Then the stored engine is kept.
        row.engine = facts.engine or row.engine
        row.own_tags = list(facts.tags)


def candidates(
    session: Session, *, tenant_id: str, release: str | None = None, alias: str | None = None
) -> list[Candidate]:
    """Read the active devices of a tenant, optionally only those that follow an alias of a release."""
    # Read columns instead of objects, since there may be ten thousand devices.
    query = select(
        Device.id, Device.tags, Device.own_tags, Device.agent_version, Device.engine, Device.memory_bytes
    )
    query = query.where(*active(tenant_id))
    if release is not None:
        query = query.where(Device.release == release, Device.alias == alias)
    return [
        Candidate(
            id=device_id,
            tags=frozenset((*(tags or ()), *(own or ()))),
            facts=Facts(agent_version=agent or "", engine=engine, memory_bytes=memory),
        )
        for device_id, tags, own, agent, engine, memory in session.execute(query)
    ]


def chosen(rule: GroupRule, found: Iterable[Candidate]) -> list[Candidate]:
    """Return the devices that a rule selects."""
    choice, ids, tags = choice_of(rule, None), set(rule.devices), set(rule.tags)
    return [
        one
        for one in found
        if (not ids or one.id in ids) and (not tags or one.tags & tags) and choice.fits(one.facts)
    ]


def choice_of(rule: GroupRule, members: tuple[str, ...] | None) -> Choice:
    """Convert a rule to the form that is signed."""
    engines = tuple(engine.value for engine in rule.engines)
    return Choice(
        agent_version=rule.agent_version, engines=engines, memory_bytes=rule.memory_bytes, members=members
    )


def signed_choice(rollout_id: str, rule: GroupRule, found: Iterable[Candidate]) -> Choice:
    """Convert a rule to the form that is signed for a rollout.

    A rule by device or tag is replaced by the list of its current members.

    Raises:
        InputError: the group has too many members for a list.
    """
    members = None
    if rule.devices or rule.tags:
        members = members_of(rollout_id, (one.id for one in chosen(rule, found)))
    return choice_of(rule, members)


def rule_of(row: DeviceGroup | None) -> GroupRule:
    """Return the rule of a group. None stands for all devices."""
    document: dict[str, Any] = {} if row is None else row.rule
    return GroupRule.model_validate(document)

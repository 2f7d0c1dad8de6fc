"""Database rows of rollouts and of their reports.

Operators change a rollout, and the sweeper of the workers advances it. The pure module
`permille_rollouts.state_machine` decides whether to wait, open the next wave or halt. This module counts the
reports and stores the decision, in one short transaction for each rollout.

Each change that devices must see makes a new revision of the rollout. The sweeper only changes the row,
since only the API has the keys. The API signs a new revision when a device next requests the role
`timestamp` of the trust metadata. No device sees the change before that. Devices report into rows of
their own, and do not lock the rollout.
"""

from collections import Counter
from datetime import timedelta
from functools import partial
from typing import Any, Final, cast

from sqlalchemy import ColumnElement, and_, case, func, select, update
from sqlalchemy.orm import Session

from permille.errors import InputError
from permille.store import audit, releases, rows
from permille.store.database import Database, now, run_each
from permille.store.errors import ConflictError, NotFoundError
from permille.store.ids import Prefix, new_id
from permille.store.tables import Device, DeviceGroup, Rollout, RolloutReport, Run
from permille_rollouts.offer import Choice, Offer, ReportCode, RolloutState, member_digest, place_of
from permille_rollouts.schemas.groups import GroupRule
from permille_rollouts.schemas.rollouts import OnStop, RolloutCreate, RolloutRules
from permille_rollouts.schemas.rollouts import RolloutReport as Report
from permille_rollouts.schemas.webhooks import EventType
from permille_rollouts.state_machine import (
    Position,
    Reason,
    Rules,
    Statistics,
    Step,
    Tally,
    advance,
    bounds_of,
    look_at,
)
from permille_rollouts.store import groups, webhooks
from permille_rollouts.windows import Window

UNENDED: Final = (RolloutState.DRAFT, RolloutState.RUNNING, RolloutState.PAUSED)
_LISTED: Final = (RolloutState.RUNNING, RolloutState.PAUSED, RolloutState.STOPPED)


def create(session: Session, *, tenant_id: str, token_id: str, body: RolloutCreate) -> Rollout:
    """Add a rollout in state `draft`.

    Raises:
        NotFoundError: no such version, alias or group.
        ConflictError: the version is yanked, the alias already points at it, or another rollout of
            the alias has not ended.
    """
    # The newest version may be yanked, which the check below refuses.
    version = body.version or releases.latest_version(session, tenant_id=tenant_id, name=body.release)
    release = releases.get(session, tenant_id=tenant_id, name=body.release, version=version)
    if release.yanked_at is not None:
        raise ConflictError(f"Version {version} of {body.release!r} was yanked: roll out another one.")
    alias = releases.get_alias(session, tenant_id=tenant_id, name=body.release, alias=body.alias)
    if alias.version == version:
        raise ConflictError(
            f"{body.alias!r} points at version {version} already, so all devices have it. Publish without an "
            "alias, then roll out."
        )
    other = unended(session, tenant_id=tenant_id, release=body.release, alias=body.alias)
    if other is not None:
        raise ConflictError(f"The rollout {other} of {body.release!r} {body.alias!r} has not ended: stop it.")
    if body.group_id is not None:
        rows.get(session, DeviceGroup, tenant_id=tenant_id, row_id=body.group_id)
    return rows.add(
        session,
        Rollout(
            id=new_id(Prefix.ROLLOUT),
            tenant_id=tenant_id,
            created_at=now(session),
            token_id=token_id,
            release=body.release,
            alias=body.alias,
            version=version,
            before=alias.version,
            group_id=body.group_id,
            choice={},
            bounds=[],
            rules=body.rules.model_dump(mode="json"),
            window=None if body.window is None else body.window.model_dump(),
            on_stop=body.on_stop.value,
            state=RolloutState.DRAFT.value,
            wave=0,
            wave_devices=0,
            approved=1,
            awaits_approval=False,
            looks=0,
            reverting=False,
            revision=0,
            signed_revision=0,
        ),
    )


def unended(session: Session, *, tenant_id: str, release: str, alias: str) -> str | None:
    """Return the id of the alias's rollout that has not ended yet, or None."""
    query = select(Rollout.id).where(
        Rollout.tenant_id == tenant_id,
        Rollout.release == release,
        Rollout.alias == alias,
        Rollout.state.in_(UNENDED),
    )
    return session.scalar(query)


def resume(session: Session, row: Rollout) -> None:
    """Start a draft, or continue a paused rollout. The caller must have locked the row. Idempotent.

    Continuing accepts all earlier results: their reports are marked `acknowledged` and no longer counted.

    Raises:
        ConflictError: the rollout was stopped or has ended.
    """
    _require(row, RolloutState.DRAFT, RolloutState.RUNNING, RolloutState.PAUSED)
    if row.state == RolloutState.RUNNING:
        return
    if row.state == RolloutState.DRAFT:
        rule, found = _rule_and_candidates(session, row)
        try:
            choice = groups.signed_choice(row.id, rule, found)
            chosen = groups.chosen(rule, found)
            row.bounds = bounds_of(_rules(row).waves, [place_of(row.id, one.id) for one in chosen])
        except InputError as exc:
            raise ConflictError(str(exc)) from exc
        row.choice = {**Offer(**_offer_fields(row, choice)).to_document()["choice"]}
        _open_wave(session, row, 0)
    else:
        # Mark each earlier report. It would not be enough to store the time of this resume: if the clock is
        # set back, a later report can have an earlier time.
        ended = update(RolloutReport).where(
            RolloutReport.rollout_id == row.id, RolloutReport.code.is_not(None)
        )
        session.execute(ended.values(acknowledged=True).execution_options(synchronize_session=False))
        # The counts restart at zero, so the number of statistical tests made (`looks`) restarts, too.
        row.looks = 0
        # The reports count anew, so the devices also get the whole deadline again. Otherwise a wave that has
        # been open for long would halt at once, for silence. A soak time that is over stays over.
        earliest = now(session) - timedelta(seconds=_rules(row).soak_s)
        row.opened_at = max(row.opened_at or earliest, earliest)
    row.reason = row.numbers = None
    _move(row, RolloutState.RUNNING)


def pause(row: Rollout) -> None:
    """Let no further device begin to install until `resume`. Idempotent. Raises ConflictError."""
    _require(row, RolloutState.RUNNING, RolloutState.PAUSED)
    if row.state == RolloutState.RUNNING:
        _move(row, RolloutState.PAUSED)


def approve(row: Rollout, wave: int) -> None:
    """Allow the next wave to open once its other conditions hold. Idempotent.

    Args:
        wave: the number of the next wave, from 2. The number ensures that a repeated request cannot
            approve another wave. The number of an earlier wave (from 2) is accepted, but opens nothing.

    Raises:
        ConflictError: the rollout has ended or needs no approval, or the wave is below 2 or after the next
            one.
    """
    _require(row, *UNENDED)
    rules = _rules(row)
    if not rules.approval:
        raise ConflictError("The rollout needs no approval: it was made without `approval`.")
    if not 2 <= wave <= min(row.wave + 2, len(rules.waves)):
        following = row.wave + 2
        advice = f"Approve wave {following}." if following <= len(rules.waves) else "All waves are open."
        raise ConflictError(f"Wave {wave} is not the next one. {advice}")
    # `max`, because an older approval may arrive late.
    row.approved, row.awaits_approval = max(row.approved, wave), False


def stop(session: Session, row: Rollout) -> None:
    """Stop a rollout. Devices that have the version keep it. Idempotent. Raises ConflictError."""
    _require(row, *UNENDED, RolloutState.STOPPED)
    if row.state != RolloutState.STOPPED:
        row.ended_at = now(session)
        _move(row, RolloutState.STOPPED)
        _tell(session, row, EventType.STOPPED)


def want_revert(session: Session, row: Rollout) -> None:
    """Stop a rollout and mark it for a revert. The API then publishes the earlier package when it next
    signs the metadata.

    Raises:
        ConflictError: the rollout never started, is done or reverted, or a later rollout of the alias has not
            ended.
    """
    later = unended(session, tenant_id=row.tenant_id, release=row.release, alias=row.alias)
    if later not in (None, row.id):
        raise ConflictError(f"The later rollout {later} has not ended: revert that one, or stop it first.")
    if row.opened_at is None:
        raise ConflictError("The rollout has not started, so there is nothing to revert. Stop it instead.")
    if row.state not in (RolloutState.DONE, RolloutState.REVERTED):
        stop(session, row)
    else:
        _require(row, RolloutState.STOPPED)
    row.reverting = True
    _move(row, RolloutState.STOPPED)


def unsigned(session: Session, *, tenant_id: str) -> list[Rollout]:
    """Lock and return the rollouts whose newest revision is not signed yet."""
    query = select(Rollout).where(Rollout.tenant_id == tenant_id, Rollout.signed_revision < Rollout.revision)
    return list(session.scalars(query.with_for_update(key_share=True).order_by(Rollout.id)))


def offer_of(row: Rollout) -> Offer | None:
    """Return the record of a rollout to sign, or None if the metadata needs no record.

    It needs none for a draft, for a rollout that was stopped as a draft, and for a rollout that is done or
    reverted. Devices then follow the alias. Raises ValueError if the state is unknown.
    """
    # `opened_at` is None if it was stopped as a draft.
    if RolloutState(row.state) not in _LISTED or row.opened_at is None:
        return None
    document: dict[str, Any] = {**_offer_fields(row, Choice()), "choice": row.choice, "window": row.window}
    return Offer.parse(document)


def signed(row: Rollout) -> None:
    """Record that the trust metadata contains the current revision."""
    row.signed_revision = row.revision


def reverted(session: Session, row: Rollout) -> None:
    """Record that a stopped rollout was reverted."""
    row.state, row.reverting = RolloutState.REVERTED.value, False
    row.ended_at = row.ended_at or now(session)
    _tell(session, row, EventType.REVERTED)


def report(session: Session, *, device: Device, rollout_id: str, report: Report) -> None:
    """Store the report of a device, in place of its earlier report.

    Raises:
        NotFoundError: there is no such rollout for the device, or it never started.
        ConflictError: the device may not begin: the rollout is not running, the device's wave is
            not open, or the device is not in the group.
    """
    row = rows.get(session, Rollout, tenant_id=device.tenant_id, row_id=rollout_id)
    if (row.release, row.alias) != (device.release, device.alias) or row.opened_at is None:
        raise NotFoundError(f"There is no rollout {rollout_id!r} for this device.")
    found = session.get(RolloutReport, (row.id, device.id), with_for_update={"key_share": True})
    at, place = now(session), place_of(row.id, device.id)
    if found is None:
        members = _members(row)
        is_chosen = members is None or member_digest(row.id, device.id) in members
        if row.state != RolloutState.RUNNING or place >= row.bounds[row.wave] or not is_chosen:
            raise ConflictError("The device's wave is not open: ask again at the next poll.")
        # A device counts for the wave of its place (`place_of`), even if a later wave is open when it begins.
        wave = next(number for number, bound in enumerate(row.bounds) if place < bound)
        found = RolloutReport(
            rollout_id=row.id, device_id=device.id, tenant_id=row.tenant_id, wave=wave, began_at=at
        )
        session.add(found)
    # A report with the same result is a retry, and must not reset `acknowledged`.
    ends = report.code is not None and report.code != found.code
    found.installed, found.damage = report.installed, report.damage
    found.worse, found.difference = report.worse, report.difference
    if ends:
        found.code, found.ended_at, found.acknowledged = str(report.code), at, False
    if report.installed:
        device.version = row.version


def funnel(session: Session, rollout_id: str, waves: int) -> list[dict[str, int]]:
    """Count the reports of each wave by progress, in one statement."""
    compared = RolloutReport.worse.is_not(None)
    counts = {
        "offered": func.count(),
        "installed": _count(RolloutReport.installed),
        "trained": _count(compared),
        "better": _count(and_(compared, RolloutReport.worse.is_(False))),
        "worse": _count(RolloutReport.worse.is_(True)),
        "failed": _count(and_(RolloutReport.code.is_not(None), RolloutReport.code.not_in(_NOT_FAILED))),
        "silent": _count(RolloutReport.code == ReportCode.SILENT.value),
    }
    query = select(RolloutReport.wave, *counts.values()).where(RolloutReport.rollout_id == rollout_id)
    found = {wave: numbers for wave, *numbers in session.execute(query.group_by(RolloutReport.wave))}
    nothing = [0] * len(counts)
    return [dict(zip(counts, found.get(wave, nothing), strict=True)) for wave in range(waves)]


_NOT_FAILED: Final = (ReportCode.OK.value, ReportCode.SILENT.value)


def sweep(db: Database) -> None:
    """Advance every running rollout. If one fails, the others still advance.

    After a kill, the next sweep continues.
    """
    with db.read() as session:
        running = session.execute(
            select(Rollout.tenant_id, Rollout.id).where(Rollout.state == RolloutState.RUNNING.value)
        ).all()
    run_each(partial(_sweep_one, db, *key) for key in running)


def _sweep_one(db: Database, tenant_id: str, rollout_id: str) -> None:
    with db.write() as session:
        row = rows.lock(session, Rollout, tenant_id=tenant_id, row_id=rollout_id)
        if row.state == RolloutState.RUNNING:
            _advance(session, row)


def _advance(session: Session, row: Rollout) -> None:
    rules, at = _rules(row), now(session)
    _mark_silent(session, row, rules)
    # If the database's clock has gone back, the wave counts as having opened now.
    row.opened_at = min(row.opened_at or at, at)
    step = advance(
        Position(wave=row.wave, opened_at=row.opened_at, looks=row.looks, approved=row.approved),
        rules,
        tally(session, row),
        at,
    )
    release = releases.get(session, tenant_id=row.tenant_id, name=row.release, version=row.version)
    if release.yanked_at is not None:
        step = Step(state=RolloutState.STOPPED, wave=row.wave, looks=row.looks, reason=Reason.YANKED)
    row.looks, row.awaits_approval = step.looks, step.awaits_approval
    if step.reason is not None:
        _halt(session, row, step)
    elif step.state is RolloutState.DONE:
        row.ended_at = at
        _move(row, RolloutState.DONE)
        _tell(session, row, EventType.DONE)
    elif step.wave != row.wave:
        _open_wave(session, row, step.wave)
        _move(row, RolloutState.RUNNING)


def _halt(session: Session, row: Rollout, step: Step) -> None:
    """Pause the rollout, or stop or revert it, and write an entry into the audit log."""
    row.reason, row.numbers = str(step.reason), {**step.numbers}
    _tell(session, row, EventType.HALTED)
    if step.state is RolloutState.STOPPED:
        stop(session, row)
    elif row.on_stop == OnStop.REVERT:
        want_revert(session, row)
    else:
        _move(row, step.state)
    numbers: dict[str, object] = {"reason": str(step.reason), "wave": step.wave + 1, **step.numbers}
    change = audit.Change(
        token_id=row.token_id, action="halt_rollout", subject=f"/v1/rollouts/{row.id}", request=numbers
    )
    audit.append(session, tenant_id=row.tenant_id, change=change)


def _tell(session: Session, row: Rollout, event: EventType) -> None:
    told = {
        "rollout_id": row.id,
        "release": row.release,
        "version": row.version,
        "alias": row.alias,
        "wave": row.wave + 1,
        "reason": row.reason,
        "numbers": row.numbers,
    }
    webhooks.tell(session, tenant_id=row.tenant_id, event=event, data=told)


def tally(session: Session, row: Rollout) -> Tally:
    """Count the reports that have ended since the start, or since the last `resume`."""
    ended = and_(
        RolloutReport.rollout_id == row.id,
        RolloutReport.code.is_not(None),
        RolloutReport.acknowledged.is_(False),
    )
    value = RolloutReport.difference
    codes, damage = Counter[ReportCode](), Counter[str]()
    by_code = select(RolloutReport.code, RolloutReport.damage, func.count()).where(ended)
    for code, what, count in session.execute(by_code.group_by(RolloutReport.code, RolloutReport.damage)):
        codes[ReportCode(str(code))] += count
        if code == ReportCode.INTEGRITY:
            damage[what or ""] += count
    sums = select(
        func.count(RolloutReport.worse),
        _count(RolloutReport.worse.is_(True)),
        func.count(value),
        func.sum(value),
        func.sum(value * value),
    ).where(ended)
    judged, worse, compared, total, squares = session.execute(sums).one()
    began, wave_ended, wave_ok, before = session.execute(_of_wave(row)).one()
    return Tally(
        codes=codes,
        damage=damage,
        judged=judged,
        worse=worse,
        losses=Statistics.of_sums(compared, total or 0.0, squares or 0.0),
        general=_general(session, row, ended) if codes.total() >= look_at(row.looks) else Statistics(),
        wave_devices=row.wave_devices - before,
        wave_began=began,
        wave_ended=wave_ended,
        wave_ok=wave_ok,
    )


def _of_wave(row: Rollout) -> Any:
    """Return the query for four counts of devices of the open wave.

    The first three count the devices that began, ended and succeeded, without those whose result a `resume`
    has acknowledged. The fourth counts the devices whose result was acknowledged.
    """
    before = RolloutReport.acknowledged.is_(True)
    counted = RolloutReport.acknowledged.is_(False)
    return select(
        _count(counted),
        _count(and_(counted, RolloutReport.code.is_not(None))),
        _count(and_(counted, RolloutReport.code == ReportCode.OK.value)),
        _count(before),
    ).where(RolloutReport.rollout_id == row.id, RolloutReport.wave == row.wave)


def _general(session: Session, row: Rollout, ended: ColumnElement[bool]) -> Statistics:
    """Compare the versions by how much training raises the loss on general text.

    A device gives one difference if it has reported a run on each of the two versions.
    """
    # Join in Python: for a join by device, databases choose a slow index.
    after, before = (_rises(session, row, version) for version in (row.version, row.before))
    devices = session.scalars(select(RolloutReport.device_id).where(ended))
    changes = [after[one] - before[one] for one in devices if one in after and one in before]
    return Statistics.of_sums(len(changes), sum(changes), sum(change * change for change in changes))


def _rises(session: Session, row: Rollout, version: int) -> dict[str, float]:
    query = select(Run.device_id, Run.rise).where(
        Run.newest,
        Run.tenant_id == row.tenant_id,
        Run.release == row.release,
        Run.version == version,
    )
    found = session.execute(query.where(Run.rise.is_not(None)))
    return {device_id: rise for device_id, rise in found if rise is not None}


def _mark_silent(session: Session, row: Rollout, rules: Rules) -> None:
    at = now(session)
    change = (
        update(RolloutReport)
        .where(RolloutReport.rollout_id == row.id, RolloutReport.code.is_(None))
        .execution_options(synchronize_session=False)
    )
    # If the database's clock has gone back, a device counts as having begun now.
    session.execute(change.where(RolloutReport.began_at > at).values(began_at=at))
    late = RolloutReport.began_at <= at - timedelta(seconds=rules.deadline_s)
    session.execute(change.where(late).values(code=ReportCode.SILENT.value, ended_at=at))


def _open_wave(session: Session, row: Rollout, wave: int) -> None:
    row.wave, row.opened_at = wave, now(session)
    low, high = [0, *row.bounds][wave : wave + 2]
    rule, found = _rule_and_candidates(session, row)
    # Only the signed members can take part. Tags may have changed since the rollout started.
    choice, members = groups.choice_of(rule, None), _members(row)
    row.wave_devices = sum(
        low <= place_of(row.id, one.id) < high
        and choice.fits(one.facts)
        and (members is None or member_digest(row.id, one.id) in members)
        for one in found
    )


def _members(row: Rollout) -> frozenset[str] | None:
    """Return the digests of the members in the signed choice, or None if every device may be a member."""
    members = row.choice["members"]
    return frozenset(members) if isinstance(members, list) else None


def _rule_and_candidates(session: Session, row: Rollout) -> tuple[GroupRule, list[groups.Candidate]]:
    group = None if row.group_id is None else session.get(DeviceGroup, row.group_id)
    found = groups.candidates(session, tenant_id=row.tenant_id, release=row.release, alias=row.alias)
    return groups.rule_of(group), found


def _move(row: Rollout, state: RolloutState) -> None:
    row.awaits_approval = False
    # A new revision makes the API sign the record again.
    row.state, row.revision = state.value, row.revision + 1


def _require(row: Rollout, *states: RolloutState) -> None:
    if row.state not in states:
        raise ConflictError(f"The rollout is {row.state}. For this, it must be {' or '.join(states)}.")


def _rules(row: Rollout) -> Rules:
    return RolloutRules.model_validate(row.rules).parsed()


def _offer_fields(row: Rollout, choice: Choice) -> dict[str, Any]:
    return {
        "rollout": row.id,
        "version": row.version,
        "state": RolloutState(row.state),
        "places": row.bounds[row.wave],
        "window": None if row.window is None else Window(**cast(dict[str, Any], row.window)),
        "choice": choice,
    }


def _count(condition: Any) -> Any:
    return func.coalesce(func.sum(case((condition, 1), else_=0)), 0)

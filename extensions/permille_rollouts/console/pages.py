"""Pages of rollouts: their list, the live progress of the devices of each wave, and what operators can do."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from fastapi import APIRouter, Response
from pydantic import BaseModel
from sqlalchemy.orm import Session

from permille.store import releases, rows, tables
from permille_console import forms
from permille_console.actions import CONFIRMED, Action, Effect, TypedForm, count_words, find
from permille_console.names import names_of
from permille_console.rendering import MakerPage, Page, PageRoute, ViewerPage
from permille_rollouts.offer import RolloutState
from permille_rollouts.schemas.rollouts import Rollout, RolloutApproval, RolloutCreate
from permille_rollouts.service import routes
from permille_rollouts.service.records import present
from permille_rollouts.service.routes import RolloutId
from permille_rollouts.store import groups
from permille_service.forms import form_of
from permille_service.parameters import Paging, page_of

router = APIRouter(prefix="/ui", include_in_schema=False, route_class=PageRoute)
_PAUSE, _STOP, _REVERT = (
    ("pause", "Pause", "quiet"),
    ("stop", "Stop", "danger"),
    ("revert", "Revert", "danger"),
)
MOVES: dict[RolloutState, tuple[tuple[str, str, str], ...]] = {
    RolloutState.DRAFT: (("resume", "Start", ""), _STOP),
    RolloutState.RUNNING: (_PAUSE, _STOP, _REVERT),
    RolloutState.PAUSED: (("resume", "Resume", ""), _STOP, _REVERT),
    RolloutState.STOPPED: (_REVERT,),
    RolloutState.DONE: (_REVERT,),
}
"""The buttons to show in each state of a rollout.

Whether an action is allowed is checked when it is called.
"""
_REVERT_WORDS = "Revert the rollout"
STAGES = ("offered", "installed", "trained", "better", "worse", "failed", "silent")


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """An action on an existing rollout, for example to pause it.

    Attributes:
        call: the function of the API's route.
        words: the text that describes the effect on devices, with places for numbers and versions.
        request: the model of the route's body, or None if the route takes no body.
    """

    button: str
    call: Callable[..., Rollout]
    words: str
    request: type[BaseModel] | None = None


@router.get("/rollouts")
def show_rollouts(page: ViewerPage, window: Paging) -> Response:
    """Show rollouts, newest first."""
    with page.service.database.read() as session:
        found = rows.list_all(session, tables.Rollout, tenant_id=page.tenant_id, window=window)
        listed = page_of(found, lambda row: present(session, row))
    return page.render("rollouts", rollouts=listed)


@router.get("/rollouts/{rollout_id}")
def show_rollout(rollout_id: RolloutId, page: ViewerPage) -> Response:
    """Show one rollout. For each wave, show how far its devices have come."""
    with page.service.database.read() as session:
        row = rows.get(session, tables.Rollout, tenant_id=page.tenant_id, row_id=rollout_id)
        rollout = present(session, row)
        names = names_of(session, page.tenant_id, [row.group_id])
    live = rollout.state in (RolloutState.RUNNING, RolloutState.PAUSED)
    most = max((wave.offered for wave in rollout.funnel), default=0) or 1
    moves = MOVES.get(rollout.state, ())
    if rollout.rules.approval and live and rollout.wave < len(rollout.funnel):
        moves = (("approve", f"Approve wave {rollout.wave + 1}", ""), *moves)
    return page.render(
        "rollout", rollout=rollout, stages=STAGES, live=live, most=most, moves=moves, names=names
    )


@router.get("/rollouts/{rollout_id}/{move}")
def show_move(rollout_id: RolloutId, move: str, page: MakerPage) -> Response:
    """Show the effect of an action on a rollout, and ask for a confirmation."""
    return _ask_move(page, rollout_id, move)


@router.post("/rollouts/{rollout_id}/{move}")
def move_rollout(rollout_id: RolloutId, move: str, page: MakerPage, typed: TypedForm) -> Response:
    """Run an action on a rollout after its confirmation."""
    operator = page.acting(f"{move}_rollout", f"/v1/rollouts/{rollout_id}/{move}")
    known = find(move, _MOVES)
    if not _effect_of(page, rollout_id, known)[1].is_confirmed(typed):
        return _ask_move(page, rollout_id, move, changed=typed.get("step") == CONFIRMED)
    try:
        asked = known.request
        body = () if asked is None else (forms.parse(form_of(asked), asked, typed),)
        known.call(rollout_id, *body, page.service, operator)
    except Exception as exc:  # noqa: BLE001 - any error is shown on the page of the confirmation
        return _ask_move(page, rollout_id, move, exc=exc)
    return page.go_to(f"rollouts/{rollout_id}")


def _effect_of(page: Page, rollout_id: str, move: Move) -> tuple[Rollout, Effect]:
    """Return a rollout, and the effect that an action on it has on devices."""
    with page.service.database.read() as session:
        row = rows.get(session, tables.Rollout, tenant_id=page.tenant_id, row_id=rollout_id)
        # A revert moves the alias, so count all devices that follow the alias, not only those of the group.
        group_id = None if move.button == _REVERT_WORDS else row.group_id
        found = _followers(session, page.tenant_id, row.release, row.alias, group_id)
        rollout, facts = present(session, row), (row.revision, row.approved)
    words = move.words.format(
        all=count_words(found),
        begun=count_words(sum(wave.offered for wave in rollout.funnel)),
        version=f"{rollout.release} {rollout.version}",
        before=rollout.before,
        wave=f"Wave {rollout.wave} of {len(rollout.funnel)}",
        following=rollout.wave + 1,
        following_size=rollout.funnel[min(rollout.wave, len(rollout.funnel) - 1)].size,
        size=rollout.funnel[rollout.wave - 1].size,
    )
    return rollout, Effect(words=words, facts=facts)


def _ask_move(
    page: Page, rollout_id: str, move: str, *, changed: bool = False, exc: Exception | None = None
) -> Response:
    known = find(move, _MOVES)
    rollout, effect = _effect_of(page, rollout_id, known)
    problem = None if exc is None else page.problem_of(exc)
    return page.render(
        "confirm",
        status=200 if problem is None else problem.status,
        title=f"{known.button} of {rollout.release} {rollout.version}",
        button=known.button,
        effect=effect,
        typed={} if known.request is None else {"wave": rollout.wave + 1},
        changed=changed,
        problem=problem,
        back=f"/ui/rollouts/{rollout_id}",
    )


def _rollout_effect(session: Session, tenant_id: str, body: RolloutCreate) -> Effect | None:
    if body.draft:
        return None
    found = _followers(session, tenant_id, body.release, body.alias, body.group_id)
    version = body.version or releases.latest_version(session, tenant_id=tenant_id, name=body.release)
    # Refuse an unknown version before the operator is asked to confirm.
    releases.get(session, tenant_id=tenant_id, name=body.release, version=version)
    before = session.get(tables.Alias, (tenant_id, body.release, body.alias))
    return Effect(
        words=f"{count_words(found)} may get {body.release} {version}. The first wave "
        f"({body.rules.waves[0]} of them) opens at once. The other waves follow as long as the rollout does "
        "not halt.",
        facts=(version, None if before is None else before.version, body.model_dump_json()),
    )


def _followers(
    session: Session, tenant_id: str, release: str, alias: str, group_id: str | None = None
) -> int:
    """Count the devices that follow an alias. With a group, count only its members."""
    group = None
    if group_id is not None:
        group = rows.get(session, tables.DeviceGroup, tenant_id=tenant_id, row_id=group_id)
    found = groups.candidates(session, tenant_id=tenant_id, release=release, alias=alias)
    return len(groups.chosen(groups.rule_of(group), found))


ACTION: Final = Action(
    title="Roll out a version in waves",
    button="Roll out",
    path="/v1/rollouts",
    operation="create_rollout",
    request=RolloutCreate,
    first=("release", "version", "alias", "group_id", "rules_waves", "on_stop", "draft"),
    call=routes.create_rollout,
    after=lambda page, made: page.go_to(f"rollouts/{made.id}"),
    effect=_rollout_effect,
)
_MOVES: Final[dict[str, Move]] = {
    "resume": Move(
        button="Resume the rollout",
        call=routes.resume_rollout,
        words="{wave} will be open to {size} of {all}, which will get {version}. Failures until now no "
        "longer count.",
    ),
    "approve": Move(
        button="Approve the next wave",
        call=routes.approve_rollout,
        words="{wave} is open. Wave {following} will open to {following_size} of {all} as soon as its other "
        "conditions hold. These devices will then get {version}.",
        request=RolloutApproval,
    ),
    "pause": Move(
        button="Pause the rollout",
        call=routes.pause_rollout,
        words="Until you resume the rollout, no other device starts the update to {version}. The update has "
        "started on {begun} of {all}, and goes on there.",
    ),
    "stop": Move(
        button="Stop the rollout",
        call=routes.stop_rollout,
        words="The update to {version} has started on {begun} of {all}. Devices that have started keep that "
        "version. No other device will get it. A stopped rollout cannot be resumed.",
    ),
    "revert": Move(
        button=_REVERT_WORDS,
        call=routes.revert_rollout,
        words="The package of version {before} will be published as a new version, which {all} will install. "
        "The update to {version} has started on {begun} of them.",
    ),
}

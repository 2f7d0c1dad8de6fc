"""Pages of rollouts: their list, and the live progress of the devices of each wave."""

from fastapi import APIRouter, Response

from permille.fleet.offer import RolloutState
from permille.store import rows, tables
from permille_service.pages.names import names_of
from permille_service.pages.rendering import PageRoute, ViewerPage
from permille_service.parameters import Paging, page_of
from permille_service.rollouts.records import present
from permille_service.rollouts.routes import RolloutId

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
STAGES = ("offered", "installed", "trained", "better", "worse", "failed", "silent")


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

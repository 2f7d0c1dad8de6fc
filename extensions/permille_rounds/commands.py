"""Commands to define, start and watch federations, and to adopt their states."""

from typing import Annotated, Any

import typer

from permille_rounds.schemas import AdoptionCreate, FederationCreate
from permille_service.cli.commands import Key, Rows, add_action, add_list, add_show, command
from permille_service.cli.session import Session
from permille_service.forms import form_of

federations = typer.Typer(
    no_args_is_help=True, help="Run rounds, in which many devices train one shared state."
)

_FEDERATIONS = ("id", "name", "state", "release", "version", "number", "members", "adopted_round")
_ROUNDS = (
    *("number", "state", "opened_at", "deadline_at", "invited", "received", "counted"),
    *("mean_gain", "gain_low", "dropped", "reason"),
)
Federation = Annotated[str, typer.Argument(help="Name or id, or the first characters of the id.")]


@command(federations, "create", form=form_of(FederationCreate, "name"))
def create_federation(session: Session, body: dict[str, Any], key: Key = None) -> None:
    """Define a federation on a release. Devices may join it after its start.

    Example:

      permille federations create readers --release chat --rounds 50 --target 100 --minimum 30

      permille federations create quiet --release chat --queries 64 --target 500 --clip 2000 \
--dp-epsilon 4 --participations 10
    """
    from permille_rounds.definition import FEW_DEVICES  # imports numpy, which would delay `--help`

    made = session.client.post("/v1/federations", body, key=key)
    session.output.show(made)
    if made["minimum"] < FEW_DEVICES and body.get("privacy") is None:
        session.output.say(
            f"Warning: a sum over {made['minimum']} to {FEW_DEVICES - 1} devices exposes each of them. The "
            "agents warn the owners of the devices."
        )
    session.output.say_next(f"permille federations start {body['name']}")


add_list(federations, "federations", _FEDERATIONS)
add_show(federations, "federations")
add_action(federations, "federations", "start", "Start a federation, or continue it after a pause.")
add_action(federations, "federations", "pause", "Pause a federation after the open round.")
add_action(federations, "federations", "finish", "End a federation for good. The open round closes early.")


@command(federations, "rounds")
def list_rounds(session: Session, federation: Federation, limit: Rows = 20) -> None:
    """List the rounds of a federation, newest first."""
    path = f"/v1/federations/{session.id_of('federations', federation)}/rounds"
    session.output.show(session.client.pages(path, limit=limit), _ROUNDS)


@command(federations, "privacy")
def show_privacy(session: Session, federation: Federation) -> Any:
    """Show the privacy guarantee of a federation, and how much of it the devices have used.

    Example:

      permille federations privacy readers
    """
    return session.client.get(f"/v1/federations/{session.id_of('federations', federation)}/privacy")


@command(federations, "adopt", form=form_of(AdoptionCreate))
def adopt(session: Session, body: dict[str, Any], federation: Federation) -> Any:
    """Let the devices of a federation start their training from one of its states. If the gain of this state
    is uncertain, give a reason with --reason.

    Example:

      permille federations adopt readers --round 12
    """
    path = f"/v1/federations/{session.id_of('federations', federation)}/adoptions"
    return session.client.post(path, body)

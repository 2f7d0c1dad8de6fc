"""Commands for federated rounds: federations list, join, leave, status, run, and privacy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from permille.arguments import named_path
from permille.errors import InputError
from permille.exits import ExitCode
from permille_agent.cli.console import (
    COMPUTING,
    EngineOption,
    JsonOption,
    agrees,
    home_of,
    sentences,
    show,
)
from permille_agent.state.choices import read_references
from permille_agent.training.engines import AUTO, EngineChoice

if TYPE_CHECKING:
    from permille_rounds.definition import Definition

_CONTRIBUTION_BYTES = 180  # largest size of a contribution without its integers
_INTEGER_BYTES = 3  # largest size of an integer

federations = typer.Typer(
    no_args_is_help=True,
    help="Take part in rounds, in which many devices improve one model. No device joins by itself.",
)


def privacy(context: typer.Context, as_json: JsonOption = False) -> None:
    """Show how much privacy the rounds have cost, from this device's own ledger.

    [bold]Examples[/bold]

      permille-agent privacy

    A smaller epsilon is a stronger promise. `forget` keeps the ledger, because it records what left the
    device.
    """
    from permille_rounds.agent.ledger import read_ledger

    found = [
        {
            "federation": account.name,
            "definition": digest,
            "rounds": len(account.rounds),
            "rounds_at_most": account.participations,
            "epsilon": round(account.dp_epsilon(len(account.rounds)), 3),
            "epsilon_at_most": round(account.dp_epsilon(account.participations), 3),
            "delta": f"1e-{account.delta_exponent}",
        }
        for digest, account in read_ledger(home_of(context)).accounts.items()
    ]
    show({"privacy": found}, as_json=as_json)


@federations.command("list")
def list_federations(context: typer.Context, as_json: JsonOption = False) -> None:
    """List the federations that this device may join or has joined.

    [bold]Examples[/bold]

      permille-agent federations list
    """
    from permille_agent.link.enrolment import open_api
    from permille_rounds.agent.calls import FederationsApi

    with open_api(home_of(context)) as api:
        offers = FederationsApi(api).offers()
    show({"federations": [offer.model_dump(mode="json") for offer in offers]}, as_json=as_json)


@federations.command("join")
def join(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Name of the federation, from `federations list`.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    few_devices: Annotated[
        bool, typer.Option(help="With --yes: accept sums of fewer than ten devices without noise.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Join a federation, after you have seen what leaves this device in each round.

    [bold]Examples[/bold]

      permille-agent federations join readers

      permille-agent federations join readers --yes --json

    Your text never leaves the device. `leave` ends the agreement.
    """
    from permille_agent.link.enrolment import open_api, require_enrolment
    from permille_agent.state.models import installed_release
    from permille_rounds.agent.calls import FederationsApi
    from permille_rounds.agent.exchange import fetch_definition, find_offer
    from permille_rounds.agent.membership import join as join_here

    home = home_of(context)
    enrolment, _ = require_enrolment(home)
    with open_api(home) as api:
        # The list is not signed. `fetch_definition` checks that the definition is signed.
        offer = find_offer(FederationsApi(api).offers(), name)
        definition = fetch_definition(home, api, enrolment, offer)
        release = installed_release(home)
        # A federation is bound to one package (docs/adr/0014).
        if release is None or release.manifest_digest != definition.log.package_digest:
            raise InputError(
                f"The federation needs the package {definition.log.package_digest}. Install it with "
                "`permille-agent pull`."
            )
        # Without --yes, the user reads the same warning from `what_leaves` before the question.
        if definition.exposes_few and yes and not few_devices:
            raise InputError(
                f"{offer.name} may publish a sum of {definition.minimum} devices without noise, which "
                "exposes each of them. Add --few-devices to accept that."
            )
        leaves = what_leaves(definition, offer.target)
        if not yes:
            # Never print this as JSON, because a person has to answer.
            show({"federation": offer.name, **leaves}, as_json=False)
            question = f"Send this from {home.root} in each round of {offer.name}?"
            if not agrees(question, declined="You did not join, and nothing was sent."):
                raise typer.Exit(ExitCode.INTERRUPTED)
        # Store the choice first. If the request below fails, the next exchange of rounds repeats it.
        join_here(home, definition, federation_id=offer.id, name=offer.name)
        FederationsApi(api).join(offer.id)
    show({"joined": offer.name, "definition": definition.digest, **leaves}, as_json=as_json)


@federations.command("leave")
def leave(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Name of the federation, or the beginning of its digest.")],
    as_json: JsonOption = False,
) -> None:
    """Leave a federation at once, even during a round.

    [bold]Examples[/bold]

      permille-agent federations leave readers

    The device erases its files of the federation. The service forgets what this device sent to the open
    round. If the service cannot be reached now, the next `permille-agent run` tells it. Published rounds stay
    published.
    """
    from permille_rounds.agent.exchange import tell_service
    from permille_rounds.agent.membership import leave as leave_here
    from permille_rounds.agent.membership import named

    home = home_of(context)
    membership = named(home, name)
    # Read the name now, because `tell_service` erases the record as soon as the service knows.
    left = membership.choice().name
    leave_here(membership)
    told = tell_service(home)
    knows = "The service was told." if told else "The next `permille-agent run` tells the service."
    show(
        {"left": left, "service_told": told},
        as_json=as_json,
        render=sentences(f"You left {left}. {knows}"),
    )


@federations.command("status")
def status(context: typer.Context, as_json: JsonOption = False) -> None:
    """Show the federations of this device and the results of its contributions.

    [bold]Examples[/bold]

      permille-agent federations status
    """
    from permille_rounds.agent.membership import memberships

    found = [membership.document() for membership in memberships(home_of(context))]
    show({"federations": found}, as_json=as_json)


@federations.command("run")
def run(
    context: typer.Context,
    paths: Annotated[
        list[Path] | None,
        typer.Argument(parser=named_path, help="Files or folders. Default: those of `data add`."),
    ] = None,
    engine: EngineOption = AUTO,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Threads of the engine. Default: all cores.", rich_help_panel=COMPUTING),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Take part in the open rounds now: fetch the history, train, and send the contribution.

    [bold]Examples[/bold]

      permille-agent federations run
    """
    from permille_agent.training.options import RunContext
    from permille_rounds.agent.exchange import take_part

    home = home_of(context)
    data_paths = [path.expanduser() for path in paths] if paths else list(read_references(home))
    took = take_part(home, data_paths, RunContext(engine_of=EngineChoice(name=engine, threads=threads)))
    show({"invited": took.invited, "trained": took.trained, "sent": took.sent}, as_json=as_json)


def what_leaves(definition: Definition, target: int) -> dict[str, object]:
    """Describe what leaves the device in a round, who sees it, and which privacy is promised.

    Args:
        definition: signed definition of the federation.
        target: number of devices per round that the service wants. The signed definition does not have it.
    """
    queries = definition.log.queries
    # FORMAT 13.2: q integers for each step, then the gain.
    integers = definition.steps * queries + 1
    document: dict[str, object] = {
        "leaves_each_round": f"{integers} integers: {queries} for each of {definition.steps} steps, and one "
        "for the gain of the common model on your text. Text never leaves.",
        "bytes_each_round": f"at most {_CONTRIBUTION_BYTES + _INTEGER_BYTES * integers}",
        "rounds": f"at most {definition.rounds}",
        "trains_on": "your text, except the parts that select and judge your own model",
        "devices_each_round": f"at least {definition.minimum}, else nothing is published. The service wants "
        f"{target}.",
    }
    if definition.exposes_few:
        document["warning"] = (
            "A sum may cover this device alone. Everyone then sees what this device sent."
            if definition.minimum == 1
            else f"A sum may cover only {definition.minimum} devices, which exposes each of them."
        )
    privacy = definition.privacy
    if privacy is None:
        return document | {
            "seen_by": "The service sees this device's integers until the round is closed. Everyone else "
            "sees the sums over devices.",
            "promised": "Nothing, because no noise is added. Anyone who knows the integers may guess at the "
            "text.",
        }
    # Show epsilon for the largest number of rounds, because the user agrees to all of them now.
    epsilon = privacy.dp_epsilon(privacy.participations)
    seen = "The service sees this device's integers until the round is closed"
    if privacy.keeper is not None:
        from permille_rounds.masked import masked_bytes

        document["bytes_each_round"] = str(masked_bytes(definition))
        # The service gets only masked integers, and only the keeper can decrypt the seed of the mask.
        seen = f"Nobody sees this device's integers unless the service and {privacy.keeper.url} collude"
    return document | {
        "seen_by": f"{seen}. Everyone else sees sums with noise.",
        "promised": f"epsilon {epsilon:.2f} at delta 1e-{privacy.delta_exponent} after "
        f"{privacy.participations} rounds. This device takes part in no more.",
    }

"""Commands of groups, rollouts and webhooks."""

import time
from typing import Annotated, Any, Final

import typer

from permille.exits import CommandError, Exit
from permille_rollouts.schemas.rollouts import RolloutCreate
from permille_service.cli.commands import Key, Rows, add_action, add_deletion, add_list, add_show, command
from permille_service.cli.session import Session
from permille_service.forms import form_of

groups = typer.Typer(no_args_is_help=True, help="Groups of devices that rollouts can select.")
rollouts = typer.Typer(no_args_is_help=True, help="Bring versions to devices wave by wave.")

_GROUPS = ("id", "name", "devices", "created_at")
_ROLLOUTS = ("id", "release", "version", "alias", "state", "wave", "reason", "created_at")
_ENDED: Final = frozenset({"done", "stopped", "reverted"})
_Many = list[str] | None
WebhookArgument = Annotated[str, typer.Argument(help="The webhook's id, or the first characters of the id.")]
RolloutArgument = Annotated[str, typer.Argument(help="The rollout's id, or the first characters of the id.")]


webhooks = typer.Typer(no_args_is_help=True, help="URLs that the workers call when rollouts halt or end.")


@command(webhooks, "create")
def create_webhook(session: Session, url: str, key: Key = None) -> Any:
    """Register a URL that the workers call when a rollout halts or ends. Keep the secret: it is shown only
    once.

    Example:

      permille webhooks create https://hooks.example.org/permille
    """
    return session.client.post("/v1/webhooks", {"url": url}, key=key)


add_list(webhooks, "webhooks", ("id", "url", "created_at"))
add_deletion(
    webhooks, "webhooks", "delete", "Remove a webhook and its events, including those that wait to be sent."
)


@command(webhooks, "deliveries")
def list_deliveries(session: Session, webhook: WebhookArgument, limit: Rows = 100) -> None:
    """List the events of a webhook, newest first. For failed attempts, show the reason.

    Example:

      permille webhooks deliveries hook_01jd
    """
    path = f"/v1/webhooks/{session.id_of('webhooks', webhook)}/deliveries"
    columns = ("id", "event", "created_at", "attempts", "next_at", "failure")
    session.output.show(session.client.pages(path, limit=limit), columns)


@command(groups, "create")
def create_group(
    session: Session,
    name: str,
    device: Annotated[_Many, typer.Option(help="Only this device. Repeatable.")] = None,
    tag: Annotated[_Many, typer.Option(help="Only devices with this tag. Repeatable.")] = None,
    engine: Annotated[_Many, typer.Option(help="Only devices with this engine. Repeatable.")] = None,
    agent_version: Annotated[
        str | None, typer.Option(help="Only devices with at least this version of the agent.")
    ] = None,
    memory_gib: Annotated[
        int, typer.Option(min=0, help="Only devices with at least this memory, in GiB.")
    ] = 0,
    key: Key = None,
) -> Any:
    """Create a group of the devices that meet all conditions. Without conditions, the group has all devices.

    Example:

      permille groups create canaries --tag canary
      permille groups create large --memory-gib 16 --agent-version 0.2.0
    """
    rule = {
        "devices": [session.id_of("devices", one) for one in device or ()],
        "tags": tag or [],
        "engines": engine or [],
        "agent_version": agent_version,
        "memory_bytes": memory_gib << 30,
    }
    return session.client.post("/v1/groups", {"name": name, "rule": rule}, key=key)


add_list(groups, "groups", _GROUPS)
add_show(groups, "groups")
add_deletion(groups, "groups", "delete", "Remove a group for which no rollout was ever made.")


@command(groups, "tag")
def tag_device(
    session: Session,
    device: Annotated[
        str, typer.Argument(help="The device's name or id, or the first characters of the id.")
    ],
    tags: Annotated[
        _Many, typer.Argument(help="All tags of the device. Without any, all its tags are removed.")
    ] = None,
) -> Any:
    """Set the tags of a device. The new tags replace all earlier ones.

    Example:

      permille groups tag kitchen-laptop canary eu
    """
    path = f"/v1/devices/{session.id_of('devices', device)}/tags"
    return session.client.put(path, {"tags": tags or []})


@command(rollouts, "create", form=form_of(RolloutCreate, "release"))
def create_rollout(session: Session, body: dict[str, Any], key: Key = None) -> None:
    """Roll out a version to the devices of an alias, wave by wave.

    Example:

      permille rollouts create tiny-llama --version 4 --group canaries --wave 10 --wave 50% --wave 100%
    """
    made = session.client.post("/v1/rollouts", body, key=key)
    session.output.show(made)
    session.output.say_next(f"permille rollouts watch {made['id']}")


add_list(rollouts, "rollouts", _ROLLOUTS)
add_show(rollouts, "rollouts")


@command(rollouts, "watch")
def watch_rollout(
    session: Session,
    rollout: RolloutArgument,
    every_s: Annotated[float, typer.Option(min=0.1, help="Seconds between two polls.")] = 5.0,
) -> None:
    """Show each change of a rollout until it ends or halts. The exit code is 0 only if the rollout is done.

    Example:

      permille rollouts watch rollout_01jd
    """
    path, told = f"/v1/rollouts/{session.id_of('rollouts', rollout)}", None
    while True:
        found = session.client.get(path)
        if (found["state"], found["funnel"]) != told:
            told = (found["state"], found["funnel"])
            session.output.show(found)
        # A rollout that halted is paused and has a reason. It waits for an operator.
        if found["state"] in _ENDED or found["reason"]:
            break
        time.sleep(every_s)
    if found["state"] != "done":
        raise CommandError(
            f"The rollout is {found['state']}: {found['reason'] or 'an operator ended it'}", Exit.FAILED
        )


@command(rollouts, "approve")
def approve_rollout(
    session: Session,
    rollout: RolloutArgument,
    wave: Annotated[
        int,
        typer.Argument(min=2, help="Number of the next wave. It opens when its other conditions hold, too."),
    ],
) -> Any:
    """Approve the next wave of a rollout that was created with --approval.

    Example:

      permille rollouts approve rollout_01jd 2
    """
    path = f"/v1/rollouts/{session.id_of('rollouts', rollout)}/approve"
    return session.client.post(path, {"wave": wave})


add_action(rollouts, "rollouts", "pause", "Pause a rollout. No further device starts the update.")
add_action(
    rollouts, "rollouts", "resume", "Start a draft, or continue a rollout. Earlier failures no longer count."
)
add_action(rollouts, "rollouts", "stop", "Stop a rollout. Devices keep the version that they have.")
add_action(
    rollouts, "rollouts", "revert", "Stop a rollout, and publish the earlier package as a new version."
)

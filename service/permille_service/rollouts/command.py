"""Commands of groups and rollouts: who is chosen, and how a version reaches them wave by wave."""

import time
from typing import Annotated, Any, Final

import typer

from permille.schemas.fleet.rollouts import RolloutCreate
from permille_service.cli.commands import Key, Rows, add_action, add_deletion, add_list, add_show, command
from permille_service.cli.exits import CommandError, Exit
from permille_service.cli.session import Session
from permille_service.forms import form_of

groups = typer.Typer(no_args_is_help=True, help="Groups of devices, by name, tag or rule.")
rollouts = typer.Typer(no_args_is_help=True, help="Versions that reach devices wave by wave.")

_GROUPS = ("id", "name", "devices", "created_at")
_ROLLOUTS = ("id", "release", "version", "alias", "state", "wave", "reason", "created_at")
_ENDED: Final = frozenset({"done", "stopped", "reverted"})
_Many = list[str] | None
WebhookArgument = Annotated[str, typer.Argument(help="Its id, or the beginning of it.")]
RolloutArgument = Annotated[str, typer.Argument(help="Its id, or the beginning of it.")]


webhooks = typer.Typer(no_args_is_help=True, help="Addresses that are told when rollouts stop or end.")


@command(webhooks, "create")
def create_webhook(session: Session, url: str, key: Key = None) -> Any:
    """Tell an address when rollouts stop themselves or end. Keep the secret: it is shown once.

    Example:

      permille webhooks create https://hooks.example.org/permille
    """
    return session.client.post("/v1/webhooks", {"url": url}, key=key)


add_list(webhooks, "webhooks", ("id", "url", "created_at"))
add_deletion(webhooks, "webhooks", "delete", "Remove a webhook, and what is on its way to it.")


@command(webhooks, "deliveries")
def list_deliveries(session: Session, webhook: WebhookArgument, limit: Rows = 100) -> None:
    """List the events of a webhook, newest first, and why attempts failed.

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
    device: Annotated[_Many, typer.Option(help="This device; repeat for more.")] = None,
    tag: Annotated[_Many, typer.Option(help="Devices with this tag; repeat for more.")] = None,
    engine: Annotated[_Many, typer.Option(help="Devices whose newest run it computed; repeat.")] = None,
    agent_version: Annotated[str | None, typer.Option(help="The lowest version of the agent.")] = None,
    memory_gib: Annotated[int, typer.Option(min=0, help="At least so much memory.")] = 0,
    key: Key = None,
) -> Any:
    """Name a group of devices. All conditions must hold; without any it is of all devices.

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
add_deletion(groups, "groups", "delete", "Remove a group that no rollout was made for.")


@command(groups, "tag")
def tag_device(
    session: Session,
    device: Annotated[str, typer.Argument(help="Its id, its beginning, or its name.")],
    tags: Annotated[_Many, typer.Argument(help="All its tags; none removes them.")] = None,
) -> Any:
    """Give a device these tags, in the place of those that it had.

    Example:

      permille groups tag kitchen-laptop canary eu
    """
    path = f"/v1/devices/{session.id_of('devices', device)}/tags"
    return session.client.put(path, {"tags": tags or []})


@command(rollouts, "create", form=form_of(RolloutCreate, "release"))
def create_rollout(session: Session, body: dict[str, Any], key: Key = None) -> None:
    """Bring a version to the devices of an alias wave by wave.

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
    every_s: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 5.0,
) -> None:
    """Tell every change of a rollout until it ends or stops itself. Exit code 1 where it did not end well.

    Example:

      permille rollouts watch rollout_01jd
    """
    path, told = f"/v1/rollouts/{session.id_of('rollouts', rollout)}", None
    while True:
        found = session.client.get(path)
        if (found["state"], found["funnel"]) != told:
            told = (found["state"], found["funnel"])
            session.output.show(found)
        if found["state"] in _ENDED or found["reason"]:
            break
        time.sleep(every_s)
    if found["state"] != "done":
        raise CommandError(f"the rollout is {found['state']}: {found['reason'] or 'by hand'}", Exit.FAILED)


@command(rollouts, "approve")
def approve_rollout(
    session: Session,
    rollout: RolloutArgument,
    wave: Annotated[int, typer.Argument(min=2, help="The wave that may open: the one after the open wave.")],
) -> Any:
    """Let the next wave open, where the rollout was made with --approval.

    Example:

      permille rollouts approve rollout_01jd 2
    """
    path = f"/v1/rollouts/{session.id_of('rollouts', rollout)}/approve"
    return session.client.post(path, {"wave": wave})


add_action(rollouts, "rollouts", "pause", "Let no other device begin for now.")
add_action(rollouts, "rollouts", "resume", "Start a draft, or go on: failures so far are acknowledged.")
add_action(rollouts, "rollouts", "stop", "End it where it stands: devices keep what they have.")
add_action(rollouts, "rollouts", "revert", "End it, and publish the version of before as a new version.")

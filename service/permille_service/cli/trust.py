"""`permille trust`: manage the keys that sign what devices may install.

A key can be kept on another machine than the service. Such a key signs drafts, which are files of metadata:
`offline`, `rotate` and `renew` write the drafts, `sign` signs them on the machine that has the key, and
`send` sends them to the service in the printed order. `key` and `sign` need neither a network nor a service.

Commands import the modules for metadata only when they need them, because this import takes half of the
start-up time.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from permille.files import write_atomic
from permille_service.cli.commands import AsJson, command
from permille_service.cli.output import make_output
from permille_service.cli.session import Session

trust = typer.Typer(no_args_is_help=True, help="Manage the keys that sign releases.")

Into = Annotated[Path, typer.Option(help="Folder for drafts that other machines must sign.")]
_HERE = Path()
_ROLES = ("role", "version", "expires_at", "threshold", "signed_here", "key_ids")


@command(trust, "show")
def show_roles(session: Session) -> None:
    """Show the roles, their keys, and when their metadata expires."""
    found = session.client.get("/v1/trust")
    if session.output.as_json:
        session.output.show(found)
    else:
        session.output.show(found["roles"], _ROLES)
        session.output.say(f"root digest of invitations: {found['root_digest']}")


@command(trust, "rotate")
def rotate(
    session: Session,
    roles: Annotated[list[str] | None, typer.Argument(help="Roles. Default: snapshot and timestamp.")] = None,
    into: Into = _HERE,
) -> Any:
    """Replace keys of the service with new ones.

    Example:

      permille trust rotate snapshot timestamp

    Devices learn the new keys from the metadata. Also rotate snapshot and timestamp after you restore a
    backup.
    """
    asked = [{"role": role} for role in roles or ("snapshot", "timestamp")]
    return _drafts(session, session.client.post("/v1/trust/rotations", {"roles": asked}), into)


@command(trust, "renew")
def renew(
    session: Session,
    roles: Annotated[list[str] | None, typer.Argument(help="Roles to renew before they are due.")] = None,
    into: Into = _HERE,
) -> Any:
    """Renew metadata that will expire soon. For roles whose key is elsewhere, write drafts.

    Example:

      permille trust renew root targets
    """
    return _drafts(session, session.client.post("/v1/trust/renewals", {"roles": roles or []}), into)


@command(trust, "offline")
def take_offline(
    session: Session,
    root_key: Annotated[list[str], typer.Option(help="Public key of the role root. Repeatable.")],
    targets_key: Annotated[list[str], typer.Option(help="Public key of the role targets. Repeatable.")],
    threshold: Annotated[int, typer.Option(help="Number of keys of the role root that must sign.")] = 1,
    releases_key: Annotated[
        list[str] | None,
        typer.Option(help="Public key of the role releases, to take it offline as well. Repeatable."),
    ] = None,
    into: Into = _HERE,
) -> Any:
    """Take the roles root and targets offline, so that only keys on other machines can sign for them.

    Example:

      permille trust offline --root-key ROOT --targets-key TARGETS --into drafts

    `permille trust key` makes the keys. Sign the drafts where the keys are, and then send them in the order
    shown. After the last draft, the service deletes its own keys of these roles.
    """
    asked: list[dict[str, Any]] = [
        {"role": "root", "public_keys": root_key, "threshold": threshold},
        {"role": "targets", "public_keys": targets_key},
    ]
    if releases_key:
        asked.append({"role": "releases", "public_keys": releases_key})
    return _drafts(session, session.client.post("/v1/trust/rotations", {"roles": asked}), into)


@command(trust, "send")
def send(
    session: Session, files: Annotated[list[Path], typer.Argument(help="Signed drafts, in order.")]
) -> None:
    """Send signed drafts to the service.

    Example:

      permille trust send drafts/2.targets.json drafts/2.root.json
    """
    from permille_service.trust.drafts import read_draft

    for file in files:
        session.client.put_bytes(f"/v1/trust/metadata/{file.name}", read_draft(file)[1])
        session.output.say(f"accepted {file}")
    show_roles(session)


@trust.command("key")
def make_key(
    file: Annotated[Path, typer.Argument(help="New file for the private key.")],
    as_json: AsJson = False,
) -> None:
    """Make a key and print its public key. This needs no network.

    Example:

      permille trust key root.pem
    """
    from permille_service.trust.drafts import write_key

    make_output(as_json=as_json).show(write_key(file))


@trust.command("sign")
def sign(
    file: Annotated[
        Path, typer.Argument(help="Draft to sign, `<version>.<role>.json`. The file is changed.")
    ],
    key: Annotated[Path, typer.Option(help="File of a private key that `permille trust key` made.")],
    add: Annotated[str | None, typer.Option(help="Version to list, as NAME/VERSION.")] = None,
    manifest: Annotated[Path | None, typer.Option(help="Manifest of that version's package.")] = None,
    alias: Annotated[list[str] | None, typer.Option(help="Alias for that version. Repeatable.")] = None,
    federation: Annotated[Path | None, typer.Option(help="Definition of a federation to list.")] = None,
    remove: Annotated[
        str | None, typer.Option(help="Version to withdraw, as NAME/VERSION, or target path to remove.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Sign a draft and show its contents. This needs no network.

    Example:

      permille trust sign 3.releases.json --key team.pem --add tiny/4 --manifest manifest.json --alias stable
    """
    from permille_service.trust.drafts import Change, sign_draft

    change = Change(
        add=add, manifest=manifest, aliases=tuple(alias or ()), federation=federation, remove=remove
    )
    make_output(as_json=as_json).show(sign_draft(file, key, change))


def _drafts(session: Session, answer: dict[str, Any], into: Path) -> Any:
    """Write drafts to files, and print how to sign and send them. Without drafts, print the roles."""
    from permille_service.trust.drafts import version_of

    files = []
    into.mkdir(parents=True, exist_ok=True)
    for draft in answer["drafts"]:
        data = draft["metadata"].encode()
        files.append(str(into / f"{version_of(data)}.{draft['role']}.json"))
        write_atomic(Path(files[-1]), data)
    if not files:
        return show_roles(session)
    session.output.say(
        "Sign these drafts where the keys are: permille trust sign FILE --key KEY. Then send them in this "
        "order:"
    )
    session.output.say(f"  permille trust send {' '.join(files)}")
    return {"drafts": files} if session.output.as_json else None

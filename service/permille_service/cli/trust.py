"""`permille trust`: who signs what devices may install. `key` and `sign` need no network and no service.

Keys that are elsewhere sign drafts: `offline` and `renew` write them, `sign` signs them where the key is, and
`send` brings them back, in the order of the files that were named. What reads and signs metadata is imported
by the command that needs it: half of the start of every other command would go into that.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from permille.files import write_atomic
from permille_service.cli.commands import AsJson, command
from permille_service.cli.output import make_output
from permille_service.cli.session import Session

trust = typer.Typer(no_args_is_help=True, help="Who signs what devices may install.")

Into = Annotated[Path, typer.Option(help="Folder for drafts that must be signed elsewhere.")]
_HERE = Path()
_ROLES = ("role", "version", "expires_at", "threshold", "signed_here", "key_ids")


@command(trust, "show")
def show_roles(session: Session) -> None:
    """Show all roles: whose keys sign them, and until when their metadata is good."""
    found = session.client.get("/v1/trust")
    if session.output.as_json:
        session.output.show(found)
    else:
        session.output.show(found["roles"], _ROLES)
        session.output.say(f"root digest of invitations: {found['root_digest']}")


@command(trust, "rotate")
def rotate(
    session: Session,
    roles: Annotated[list[str] | None, typer.Argument(help="Roles; else snapshot and timestamp.")] = None,
    into: Into = _HERE,
) -> Any:
    """Give roles to new keys of the service; the old ones are deleted. Devices follow by themselves.

    For snapshot and timestamp this is also the way out after a stolen key or a database that went back.

    Example:

      permille trust rotate snapshot timestamp
    """
    asked = [{"role": role} for role in roles or ("snapshot", "timestamp")]
    return _drafts(session, session.client.post("/v1/trust/rotations", {"roles": asked}), into)


@command(trust, "renew")
def renew(
    session: Session,
    roles: Annotated[list[str] | None, typer.Argument(help="Also these, before they are due.")] = None,
    into: Into = _HERE,
) -> Any:
    """Sign again what is due; what must be signed elsewhere becomes a draft.

    Example:

      permille trust renew root targets
    """
    return _drafts(session, session.client.post("/v1/trust/renewals", {"roles": roles or []}), into)


@command(trust, "offline")
def take_offline(
    session: Session,
    root_key: Annotated[list[str], typer.Option(help="Public key of root; repeat for more.")],
    targets_key: Annotated[list[str], typer.Option(help="Public key of targets; repeat for more.")],
    threshold: Annotated[int, typer.Option(help="So many of the root's keys must sign.")] = 1,
    releases_key: Annotated[
        list[str] | None, typer.Option(help="Public key of the team's releases, if elsewhere too.")
    ] = None,
    into: Into = _HERE,
) -> Any:
    """Give root and targets to keys made elsewhere by `permille trust key`.

    Sign the drafts there, then send them in the order in which they are named here. With the last one the
    service deletes its own keys of these roles.
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
    """Bring signed drafts to the service, each as it is."""
    from permille_service.trust.drafts import read_draft

    for file in files:
        session.client.put_bytes(f"/v1/trust/metadata/{file.name}", read_draft(file)[1])
        session.output.say(f"accepted {file}")
    show_roles(session)


@trust.command("key")
def make_key(
    file: Annotated[Path, typer.Argument(help="Where to write the private key; never overwritten.")],
    as_json: AsJson = False,
) -> None:
    """Make a key where it shall stay: its file (PEM, mode 0600), and its public key on the screen."""
    from permille_service.trust.drafts import write_key

    make_output(as_json=as_json).show(write_key(file))


@trust.command("sign")
def sign(
    file: Annotated[Path, typer.Argument(help="A draft, `<version>.<role>.json`; signed in place.")],
    key: Annotated[Path, typer.Option(help="Private key file of `permille trust key`.")],
    add: Annotated[str | None, typer.Option(help="List NAME/VERSION first.")] = None,
    manifest: Annotated[Path | None, typer.Option(help="Its package's manifest.")] = None,
    alias: Annotated[list[str] | None, typer.Option(help="An alias for it; repeat for more.")] = None,
    federation: Annotated[Path | None, typer.Option(help="List this definition first.")] = None,
    remove: Annotated[str | None, typer.Option(help="List NAME/VERSION, or a path, no longer.")] = None,
    as_json: AsJson = False,
) -> None:
    """Sign a draft, without network, and show what was signed.

    Example:

      permille trust sign 3.releases.json --key team.pem --add tiny/4 --manifest manifest.json --alias stable
    """
    from permille_service.trust.drafts import Change, sign_draft

    change = Change(
        add=add, manifest=manifest, aliases=tuple(alias or ()), federation=federation, remove=remove
    )
    make_output(as_json=as_json).show(sign_draft(file, key, change))


def _drafts(session: Session, answer: dict[str, Any], into: Path) -> Any:
    """Write drafts as files; what is printed says which, or how the roles stand now."""
    from permille_service.trust.drafts import version_of

    files = []
    into.mkdir(parents=True, exist_ok=True)
    for draft in answer["drafts"]:
        data = draft["metadata"].encode()
        files.append(str(into / f"{version_of(data)}.{draft['role']}.json"))
        write_atomic(Path(files[-1]), data)
    if not files:
        return show_roles(session)
    session.output.say("sign where the keys are: permille trust sign FILE --key KEY; then, in this order:")
    session.output.say(f"  permille trust send {' '.join(files)}")
    return {"drafts": files} if session.output.as_json else None

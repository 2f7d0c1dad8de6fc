"""`permille trust`: who signs what devices may install. `key` and `sign` need no network and no service.

Keys that are elsewhere sign drafts: `offline` and `renew` write them, `sign` signs them where the key is, and
`send` brings them back, in the order of the files that were named.
"""

import base64
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from securesystemslib.signer import CryptoSigner
from tuf.api.metadata import Metadata, Root, Targets

from permille.errors import PackageError
from permille.federation.definition import Definition
from permille.files import write_atomic
from permille.trust.metadata import list_definition, list_version, parse
from permille.trust.roles import ONLINE, ROOT, TARGETS, parse_file_name, parse_target_path
from permille_service.cli.commands import AsJson, command
from permille_service.cli.exits import CommandError, Exit
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
    asked = [{"role": role} for role in roles or ONLINE]
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
        {"role": ROOT, "public_keys": root_key, "threshold": threshold},
        {"role": TARGETS, "public_keys": targets_key},
    ]
    if releases_key:
        asked.append({"role": "releases", "public_keys": releases_key})
    return _drafts(session, session.client.post("/v1/trust/rotations", {"roles": asked}), into)


@command(trust, "send")
def send(
    session: Session, files: Annotated[list[Path], typer.Argument(help="Signed drafts, in order.")]
) -> None:
    """Bring signed drafts to the service, each as it is."""
    for file in files:
        parse_file_name(file.name)
        session.client.put_bytes(f"/v1/trust/metadata/{file.name}", _read(file))
        session.output.say(f"accepted {file}")
    show_roles(session)


@trust.command("key")
def make_key(
    file: Annotated[Path, typer.Argument(help="Where to write the private key; never overwritten.")],
    as_json: AsJson = False,
) -> None:
    """Make a key where it shall stay: its file (PEM, mode 0600), and its public key on the screen."""
    if file.exists():
        raise CommandError(f"expected no file {file}, got one", Exit.REFUSED)
    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_atomic(file, pem, mode=0o600)
    public = base64.urlsafe_b64encode(key.public_key().public_bytes_raw()).rstrip(b"=").decode()
    shown = {"file": str(file), "public_key": public, "key_id": CryptoSigner(key).public_key.keyid}
    make_output(as_json=as_json).show(shown)


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
    role, _ = parse_file_name(file.name)
    data = _read(file)
    metadata: Metadata[Any] = parse(Root, data) if role == ROOT else parse(Targets, data)
    if add or remove or federation:
        if not isinstance(metadata.signed, Targets) or role == TARGETS:
            raise CommandError(f"expected a draft of releases to change, got {file}", Exit.USAGE)
        metadata.signatures.clear()  # of other bytes
        if federation is not None:
            list_definition(metadata.signed, _definition(federation))
        _change_list(metadata.signed, add, manifest, alias or [], remove)
    metadata.sign(_private_key(key), append=True)
    write_atomic(file, metadata.to_bytes())
    make_output(as_json=as_json).show(_signed(role, metadata))


def _change_list(
    targets: Targets, add: str | None, manifest: Path | None, aliases: list[str], remove: str | None
) -> None:
    if remove is not None and targets.targets.pop(_path(remove), None) is None:
        raise CommandError(f"expected what is listed, got {remove}", Exit.REFUSED)
    if add is not None:
        name, version = parse_target_path(_path(add))
        if manifest is None and _path(add) not in targets.targets:
            raise CommandError(f"expected --manifest with the new version {add}", Exit.USAGE)
        list_version(targets, (name, version), None if manifest is None else _read(manifest), aliases)


def _signed(role: str, metadata: Metadata[Any]) -> dict[str, Any]:
    expires_at: datetime = metadata.signed.expires
    shown = {
        "role": role,
        "version": metadata.signed.version,
        "expires_at": expires_at.isoformat(),
        "signatures": list(metadata.signatures),
    }
    if isinstance(metadata.signed, Targets):
        listed = metadata.signed.targets.items()
        shown["lists"] = [
            f"{path} {','.join(target.custom['aliases']) if target.custom else ''}".strip()
            for path, target in listed
        ]
    return shown


def _definition(file: Path) -> bytes:
    try:
        return Definition.from_bytes(_read(file)).to_bytes()
    except PackageError as exc:
        raise CommandError(f"expected the definition of a federation in {file}: {exc}", Exit.REFUSED) from exc


def _path(version: str) -> str:
    return version if version.startswith("federations/") else f"releases/{version}.json"


def _private_key(file: Path) -> CryptoSigner:
    try:
        key = load_pem_private_key(_read(file), password=None)
    except (ValueError, TypeError) as exc:
        raise CommandError(f"expected a private key of `permille trust key` in {file}", Exit.REFUSED) from exc
    if not isinstance(key, Ed25519PrivateKey):
        raise CommandError(f"expected an Ed25519 key in {file}", Exit.REFUSED)
    return CryptoSigner(key)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as exc:
        raise CommandError(f"expected to read {file}: {exc.strerror}", Exit.REFUSED) from exc


def _drafts(session: Session, answer: dict[str, Any], into: Path) -> Any:
    """Write drafts as files; what is printed says which, or how the roles stand now."""
    files = []
    into.mkdir(parents=True, exist_ok=True)
    for draft in answer["drafts"]:
        data = draft["metadata"].encode()
        version = Metadata.from_bytes(data).signed.version
        files.append(str(into / f"{version}.{draft['role']}.json"))
        write_atomic(Path(files[-1]), data)
    if not files:
        return show_roles(session)
    session.output.say("sign where the keys are: permille trust sign FILE --key KEY; then, in this order:")
    session.output.say(f"  permille trust send {' '.join(files)}")
    return {"drafts": files} if session.output.as_json else None

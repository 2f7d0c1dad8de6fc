"""Files of draft metadata, and the keys that sign them.

All of this runs on an operator's machine, offline.
"""

import base64
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

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
from permille.exits import CommandError, Exit
from permille.files import write_atomic
from permille.trust.metadata import list_definition, list_version, parse
from permille.trust.roles import ROOT, TARGETS, parse_file_name, parse_target_path


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Changes to make in a draft of releases before it is signed.

    Attributes:
        add: the version to list, as NAME/VERSION.
        manifest: the file with the manifest of the version's package. Not needed if the draft already lists
            the version.
        aliases: the aliases that point at the version.
        federation: the file of a federation's definition to list.
        remove: the version or the target path to remove.
    """

    add: str | None = None
    manifest: Path | None = None
    aliases: tuple[str, ...] = ()
    federation: Path | None = None
    remove: str | None = None


def write_key(file: Path) -> dict[str, Any]:
    """Make a key, write it to a new file, and describe its public key.

    Raises:
        CommandError: the file exists already.
    """
    if file.exists():
        raise CommandError(f"{file} exists already. Choose another file.", Exit.REFUSED)
    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_atomic(file, pem, mode=0o600)
    public = base64.urlsafe_b64encode(key.public_key().public_bytes_raw()).rstrip(b"=").decode()
    return {"file": str(file), "public_key": public, "key_id": CryptoSigner(key).public_key.keyid}


def read_draft(file: Path) -> tuple[str, bytes]:
    """Return the role and the bytes of a draft. The role is part of the file's name.

    Raises:
        InputError: the name is not `<version>.<role>.json`.
        CommandError: the file cannot be read.
    """
    return parse_file_name(file.name)[0], _read(file)


def version_of(data: bytes) -> int:
    """Return the version of the metadata in a draft."""
    version: int = Metadata.from_bytes(data).signed.version
    return version


def sign_draft(file: Path, key: Path, change: Change) -> dict[str, Any]:
    """Change a draft, sign it in place, and describe the signed metadata.

    Raises:
        InputError: the file is not a draft.
        CommandError: the change or the key does not fit the draft.
    """
    role, data = read_draft(file)
    metadata: Metadata[Any] = parse(Root, data) if role == ROOT else parse(Targets, data)
    if change.add or change.remove or change.federation:
        if not isinstance(metadata.signed, Targets) or role == TARGETS:
            raise CommandError(f"Only a draft of releases can be changed, not {file}.", Exit.USAGE)
        metadata.signatures.clear()  # the old signatures do not match the changed content
        _change_list(metadata.signed, change)
    metadata.sign(_private_key(key), append=True)
    write_atomic(file, metadata.to_bytes())
    return _signed(role, metadata)


def _change_list(targets: Targets, change: Change) -> None:
    if change.federation is not None:
        list_definition(targets, _definition(change.federation))
    if change.remove is not None and targets.targets.pop(_path(change.remove), None) is None:
        raise CommandError(f"{change.remove} is not listed.", Exit.REFUSED)
    if change.add is not None:
        name, version = parse_target_path(_path(change.add))
        if change.manifest is None and _path(change.add) not in targets.targets:
            raise CommandError(f"The new version {change.add} needs --manifest.", Exit.USAGE)
        manifest = None if change.manifest is None else _read(change.manifest)
        list_version(targets, (name, version), manifest, list(change.aliases))


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
    from permille_service.extension import service_extensions  # imports the whole API

    checks = {folder: check for one in service_extensions() for folder, check in one.targets.items()}
    if "federations" not in checks:
        raise CommandError(
            f"{file} cannot be checked, because the part of permille for federations is not installed. "
            "Install all of permille.",
            Exit.FAILED,
        )
    try:
        return checks["federations"](_read(file))
    except PackageError as exc:
        raise CommandError(f"{file} is not the definition of a federation: {exc}", Exit.REFUSED) from exc


def _path(version: str) -> str:
    return version if version.startswith("federations/") else f"releases/{version}.json"


def _private_key(file: Path) -> CryptoSigner:
    try:
        key = load_pem_private_key(_read(file), password=None)
    except (ValueError, TypeError) as exc:
        raise CommandError(
            f"{file} does not hold a private key. Make one with `permille trust key`.", Exit.REFUSED
        ) from exc
    if not isinstance(key, Ed25519PrivateKey):
        raise CommandError(
            f"{file} does not hold an Ed25519 key. Make one with `permille trust key`.", Exit.REFUSED
        )
    return CryptoSigner(key)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as exc:
        raise CommandError(f"Cannot read {file}: {exc.strerror}", Exit.REFUSED) from exc

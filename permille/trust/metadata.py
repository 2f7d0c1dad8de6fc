"""Functions on the TUF metadata of single roles: parse, check signatures, and edit lists of targets."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, TypeVar

from securesystemslib.signer import CryptoSigner, Key
from tuf.api.exceptions import RepositoryError, UnsignedMetadataError
from tuf.api.metadata import Metadata, Root, Snapshot, TargetFile, Targets, Timestamp

from permille.digests import digest_of
from permille.errors import InputError
from permille.trust.roles import (
    ROOT_DIGEST_DIGITS,
    Training,
    aliases_of,
    federation_path,
    is_target_path,
    life_of,
    parse_target_path,
    target_path,
)

KEY_TYPE = "ed25519"
# The largest allowed difference between the clock of the service and that of another machine that signs.
CLOCK_SLACK: Final = timedelta(days=1)

AnySigned = TypeVar("AnySigned", Root, Targets, Snapshot, Timestamp)
Delegator = Root | Targets


class KeyElsewhereError(InputError):
    """The change needs signatures by keys that the service does not hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holders:
    """The public keys of a role, of which at least `threshold` must sign."""

    keys: tuple[Key, ...]
    threshold: int = 1

    def __post_init__(self) -> None:
        # A key that is named twice could fill a threshold of two by itself.
        if len({key.keyid for key in self.keys}) != len(self.keys):
            raise InputError("A key is named twice.")
        if not 1 <= self.threshold <= len(self.keys):
            raise InputError(f"The threshold must be 1 to {len(self.keys)}, not {self.threshold}.")
        check_keys(self.keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleState:
    """Summary of a role for operators."""

    role: str
    version: int
    expires_at: datetime
    threshold: int
    key_ids: tuple[str, ...]
    signed_here: bool


def expiry_of(data: bytes) -> datetime:
    """Return the expiry of a role's metadata."""
    expires_at: datetime = Metadata.from_bytes(data).signed.expires
    return expires_at


def is_due(role: str, data: bytes, now: datetime) -> bool:
    """Return whether a role's metadata should be signed again.

    It is due after half of its life. It is also due if it expires too late, which happens if the clock was
    wrong when it was signed.
    """
    left, life = expiry_of(data) - now, life_of(role)
    # An expiry that is too late is a risk: an attacker who withholds newer metadata can keep devices at the
    # old metadata until it expires.
    return not life / 2 <= left <= life + CLOCK_SLACK


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """The next version of a role's metadata, which lacks signatures by keys that are elsewhere."""

    role: str
    data: bytes


def new_signer() -> CryptoSigner:
    """Return a new Ed25519 key pair."""
    return CryptoSigner.generate_ed25519()


def root_digest(data: bytes) -> str:
    """Return the first 32 hex digits of a root's SHA-256. Invitations contain them."""
    return hashlib.sha256(data).hexdigest()[:ROOT_DIGEST_DIGITS]


def parse(kind: type[AnySigned], data: bytes) -> Metadata[AnySigned]:
    """Parse metadata of this kind. Raises InputError."""
    try:
        metadata: Metadata[AnySigned] = Metadata.from_bytes(data)
    # python-tuf raises any of these for malformed input.
    except (RepositoryError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise InputError(f"This is no TUF metadata of type {kind.type}: {exc}") from exc
    if metadata.signed.type != kind.type:
        raise InputError(f"This is TUF metadata of type {metadata.signed.type}, not {kind.type}.")
    return metadata


def lacking_signatures(delegator: Delegator, role: str, metadata: Metadata[Any]) -> str:
    """Describe the missing signatures, or return an empty text if there are enough."""
    try:
        # `verify_delegate` counts distinct keys, and ignores signatures by keys that the role does not name.
        delegator.verify_delegate(role, metadata.signed_bytes, metadata.signatures)
    except UnsignedMetadataError as exc:
        return str(exc)
    return ""


def check_keys(keys: Iterable[Key]) -> None:
    """Check that all keys are Ed25519 keys. Raises InputError."""
    if any(key.keytype != KEY_TYPE for key in keys):
        raise InputError(f"All keys must be {KEY_TYPE} keys.")


def check_delegations(targets: Targets) -> None:
    """Check that `targets` lists no target itself, and delegates only to terminating roles with paths.
    Raises InputError.
    """
    if targets.targets or targets.delegations is None or not targets.delegations.roles:
        raise InputError("targets must list nothing itself, and delegate to named roles.")
    check_keys(targets.delegations.keys.values())
    # If a role is not terminating, clients also look for its targets in later roles.
    if not all(role.terminating and role.paths for role in targets.delegations.roles.values()):
        raise InputError("Delegated roles must be terminating and have paths.")


def hand_over(delegator: Delegator, role: str, holders: Holders) -> None:
    """Let only these keys sign a role. Keys that no role uses any more are removed."""
    rule = delegator.get_delegated_role(role)
    # Iterate over a copy, since revoking changes the list.
    for key_id in list(rule.keyids):
        delegator.revoke_key(key_id, role)
    for key in holders.keys:
        delegator.add_key(key, role)
    rule.threshold = holders.threshold


def list_version(
    targets: Targets,
    version: tuple[str, int],
    manifest: bytes | None,
    aliases: Iterable[str],
    training: Training = Training(),
) -> None:
    """List a version, or change the aliases of a listed one. Other versions of the name lose these
    aliases.

    Args:
        version: the name and the number.
        manifest: the bytes of the package's manifest; None for a version that is listed already.
        training: training options for the devices.
    """
    path = target_path(*version)
    if manifest is not None:
        target = TargetFile.from_data(path, manifest, ["sha256"])
        # TUF leaves the field `custom` to applications. The signature covers it.
        target.unrecognized_fields["custom"] = {"aliases": [], "training": training.to_json()}
        targets.targets[path] = target
    for alias in aliases:
        name_alias(targets, version[0], alias, path)


def list_definition(targets: Targets, definition: bytes) -> None:
    """List the definition of a federation by its digest."""
    path = federation_path(digest_of(definition))
    targets.targets[path] = TargetFile.from_data(path, definition, ["sha256"])


def name_alias(targets: Targets, name: str, alias: str, path: str | None) -> None:
    """Point an alias at the version at `path`, and take it from all other versions of the name."""
    for known, target in targets.targets.items():
        # Definitions of federations share this role, and have no aliases.
        if not is_target_path(known) or parse_target_path(known)[0] != name:
            continue
        aliases = aliases_of(target) - {alias} | ({alias} if known == path else set())
        target.unrecognized_fields["custom"] = {**target.custom, "aliases": sorted(aliases)}

"""Names, lifetimes and files of the roles that sign a tenant's releases. Service and agent share them.

The roles are those of TUF. `root` names the keys of the four top-level roles. `targets` delegates to other
roles and names their keys. These other roles list what devices may install. `snapshot` tells which versions
of the metadata belong together, and `timestamp` tells that the snapshot is the newest.

There are three kinds of targets:

- `releases/<name>/<version>.json`: the manifest of a package.
- `federations/<SHA-256>.json`: the definition of a federation (FORMAT 13.1).
- `rollouts/<name>/<alias>.json`: the rollout to the devices of an alias (FORMAT 14).
"""

import re
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Final

from tuf.api.metadata import Root, Snapshot, TargetFile, Targets, Timestamp

from permille.choices import Method
from permille.digests import JSON
from permille.errors import InputError

ROOT: Final = Root.type
TARGETS: Final = Targets.type
SNAPSHOT: Final = Snapshot.type
TIMESTAMP: Final = Timestamp.type
# The team's role that signs releases, except those for which `targets` delegates a role `release-<name>`.
RELEASES: Final = "releases"
# The service holds the key of this role, so that a rollout can stop while nobody watches. With this key, the
# service cannot offer a version that the team has not listed.
ROLLOUTS: Final = "rollouts"
TOP_LEVEL: Final = (ROOT, TARGETS, SNAPSHOT, TIMESTAMP)
# The service always signs these roles itself.
ONLINE: Final = (SNAPSHOT, TIMESTAMP)
TIMESTAMP_FILE: Final = f"{TIMESTAMP}.json"
# Number of hex digits of the root's SHA-256 in an invitation.
ROOT_DIGEST_DIGITS: Final = 32
# The largest integer that all JSON readers represent exactly (RFC 8259, section 6).
MAX_VERSION: Final = 2**53 - 1
MAX_STEPS: Final = 1_000_000

# An attacker can withhold newer metadata for the life of a timestamp at most.
_LIFE: Final = {
    ROOT: timedelta(days=365),
    TARGETS: timedelta(days=365),
    SNAPSHOT: timedelta(days=7),
    TIMESTAMP: timedelta(days=1),
}
# Delegated roles may be signed elsewhere, by hand, so they live longer than the online roles.
_DELEGATED_LIFE: Final = timedelta(days=90)
_FILE_NAME: Final = re.compile(r"([1-9][0-9]{0,15})\.([a-z0-9][a-z0-9._-]{0,80})\.json", re.ASCII)
_TARGET_PATH: Final = re.compile(r"releases/([a-z0-9][a-z0-9._-]{0,62})/([1-9][0-9]{0,15})\.json", re.ASCII)


def life_of(role: str) -> timedelta:
    """Return the validity period of a role's metadata.

    Example:
        >>> life_of("timestamp").days, life_of("releases").days
        (1, 90)
    """
    return _LIFE.get(role, _DELEGATED_LIFE)


def file_name(role: str, version: int) -> str:
    """Return the name under which clients download a role's metadata.

    Example:
        >>> file_name("releases", 7), file_name("timestamp", 7)
        ('7.releases.json', 'timestamp.json')
    """
    return TIMESTAMP_FILE if role == TIMESTAMP else f"{version}.{role}.json"


def parse_file_name(file: str) -> tuple[str, int]:
    """Return the role and the version in the name of a file. Return 0 for the timestamp, whose name has no
    version.

    Raises:
        InputError: this is not the name of a metadata file.
    """
    if file == TIMESTAMP_FILE:
        return TIMESTAMP, 0
    found = _FILE_NAME.fullmatch(file)
    if found is None:
        raise InputError(f"expected `<version>.<role>.json`, got {file!r:.120}")
    return found[2], int(found[1])


def target_path(name: str, version: int) -> str:
    """Return the path of the target for one version of a release."""
    return f"releases/{name}/{version}.json"


def federation_path(digest: str) -> str:
    """Return the path of the target for a federation's definition."""
    return f"federations/{digest.removeprefix('sha256:')}.json"


def rollout_path(name: str, alias: str) -> str:
    """Return the path of the target for the rollout to the devices of an alias."""
    return f"rollouts/{name}/{alias}.json"


def parse_target_path(path: str) -> tuple[str, int]:
    """Return the name and the version of a release's target. Raises InputError for any other path.

    Example:
        >>> parse_target_path("releases/chat/3.json")
        ('chat', 3)
    """
    found = _TARGET_PATH.fullmatch(path)
    if found is None or not is_target_path(path):
        raise InputError(f"expected a target `releases/<name>/<version>.json`, got {path!r:.120}")
    return found[1], int(found[2])


def is_target_path(path: str) -> bool:
    """Return whether a path is that of a target for a version of a release."""
    found = _TARGET_PATH.fullmatch(path)
    return found is not None and int(found[2]) <= MAX_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Training options that a release signs for its devices. None leaves the choice to the device.

    The owner of a device can override each option by a flag or the policy.

    Attributes:
        method: the training method.
        steps: the number of steps.
        first_layer: train only the masked weights in this decoder layer and above.

    Raises:
        InputError: a number is out of range.
    """

    method: Method | None = None
    steps: int | None = None
    first_layer: int | None = None

    def __post_init__(self) -> None:
        for name, number, least in (("steps", self.steps, 1), ("first_layer", self.first_layer, 0)):
            if number is not None and (type(number) is not int or not least <= number <= MAX_STEPS):
                raise InputError(f"expected {name} from {least} to {MAX_STEPS}, got {number!r}")

    def to_json(self) -> JSON:
        """Return the options that are set, for the target's custom record."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def training_of(target: TargetFile) -> Training:
    """Read the training options of a release. Raises InputError for an invalid record."""
    fields = (target.custom or {}).get("training", {})
    try:
        method = fields.get("method")
        return Training(**fields | {"method": None if method is None else Method(method)})
    except (TypeError, ValueError, AttributeError) as exc:
        raise InputError(f"expected the training of {target.path}, got {fields!r:.120}") from exc


def aliases_of(target: TargetFile) -> frozenset[str]:
    """Return the aliases under which devices may install a version. Raises InputError if there is no
    such list.
    """
    custom = target.custom
    aliases = custom.get("aliases") if isinstance(custom, dict) else None
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        raise InputError(f"expected a list of aliases with {target.path}, got {aliases!r:.80}")
    return frozenset(aliases)

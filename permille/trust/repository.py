"""The TUF repository of a tenant: its signed metadata, its keys, and changes to them.

Open a `Repository` on the newest metadata and the available private keys. Each change makes new
versions of the roles that it touches, then of snapshot and timestamp, so that clients always find a
consistent set. `changed` collects the new files until the caller stores them. This module does no
I/O and reads no clock.

`open` checks that each role has enough signatures. So the service never signs bytes that somebody else put
into the database.

A change that needs a missing key raises KeyElsewhereError, or returns drafts. A draft is signed
elsewhere, and `accept` then takes the signed file.

`tuf.repository` of python-tuf was considered. It does not handle thresholds with several holders of
keys, and its maintainers do not call it stable.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from securesystemslib.signer import Signer
from tuf.api.metadata import (
    DelegatedRole,
    Delegations,
    Metadata,
    MetaFile,
    Role,
    Root,
    Signed,
    Snapshot,
    TargetFile,
    Targets,
    Timestamp,
)

from permille.digests import canonical_json, digest_of
from permille.errors import InputError, OperatorError
from permille.trust.listed import Listed
from permille.trust.metadata import (
    CLOCK_SLACK,
    AnySigned,
    Delegator,
    Draft,
    Holders,
    KeyElsewhereError,
    RoleState,
    check_delegations,
    check_keys,
    hand_over,
    is_due,
    lacking_signatures,
    list_definition,
    list_version,
    name_alias,
    new_signer,
    parse,
    root_digest,
)
from permille.trust.roles import (
    ONLINE,
    RELEASES,
    ROLLOUTS,
    ROOT,
    SNAPSHOT,
    TARGETS,
    TIMESTAMP,
    TOP_LEVEL,
    Training,
    aliases_of,
    federation_path,
    file_name,
    is_target_path,
    life_of,
    parse_target_path,
    rollout_path,
    target_path,
)

# The largest size of a metadata file, which a list of some 3,000 versions reaches. The client of python-tuf
# accepts roots of at most 512,000 bytes.
MAX_BYTES = 500_000
KEYS_AT_START = 5


@dataclass(slots=True, kw_only=True)
class Repository:
    """The metadata of a tenant at one moment.

    Attributes:
        newest: the bytes of the newest version of each role.
        signers: the available private keys, by key id.
        now: an aware time, from which expiries are counted.
        changed: the new files by name, in their order. Store all of them or none.

    Example:

        repository = Repository.create(now=datetime.now(UTC))
        repository.publish("chat", 1, manifest_bytes, aliases=["stable"])
        for name, data in repository.changed.items():
            (folder / name).write_bytes(data)
    """

    newest: dict[str, bytes]
    signers: dict[str, Signer]
    now: datetime
    changed: dict[str, bytes] = field(default_factory=dict)

    @classmethod
    def create(cls, *, now: datetime, signers: Iterable[Signer] | None = None) -> "Repository":
        """Create a repository without targets.

        Args:
            signers: five keys, in this order: for root, for targets, for the team's releases, for both
                snapshot and timestamp, and for rollouts. New keys are made if they are left out.
        """
        made = list(signers or (new_signer() for _ in range(KEYS_AT_START)))
        root_key, targets_key, releases_key, online_key, rollouts_key = (one.public_key for one in made)
        # With consistent snapshots, each version has a file of its own, so clients never mix versions.
        root = Root(expires=now + life_of(ROOT), consistent_snapshot=True)
        for role, key in zip(TOP_LEVEL, (root_key, targets_key, online_key, online_key), strict=True):
            root.add_key(key, role)
        # True makes both roles terminating: no later role may sign for the same paths.
        team = DelegatedRole(RELEASES, [releases_key.keyid], 1, True, paths=["releases/*/*", "federations/*"])
        own = DelegatedRole(ROLLOUTS, [rollouts_key.keyid], 1, True, paths=["rollouts/*/*"])
        keys = {key.keyid: key for key in (releases_key, rollouts_key)}
        delegations = Delegations(keys, roles={RELEASES: team, ROLLOUTS: own})
        targets = Targets(expires=now + life_of(TARGETS), delegations=delegations)
        repository = cls(newest={}, signers={one.public_key.keyid: one for one in made}, now=now)
        repository._keep(ROOT, repository._sign(ROOT, root, root))
        repository._keep(TARGETS, repository._sign(TARGETS, targets, root))
        for role in (RELEASES, ROLLOUTS):
            empty = Targets(expires=now + life_of(role))
            repository._keep(role, repository._sign(role, empty, targets))
        repository._finish([TARGETS, RELEASES, ROLLOUTS])
        return repository

    @classmethod
    def open(cls, newest: Mapping[str, bytes], signers: Mapping[str, Signer], now: datetime) -> "Repository":
        """Open the repository with these bytes. Raises OperatorError if somebody changed them after
        signing.
        """
        repository = cls(newest=dict(newest), signers=dict(signers), now=now)
        # Root and targets come first, because they name the keys of the other roles.
        for role in (ROOT, TARGETS, *repository._delegated(), SNAPSHOT, TIMESTAMP):
            if role in newest and (lacking := repository._lacking(role, repository._metadata(role))):
                raise OperatorError(
                    f"The stored metadata of {role} was changed after it was signed: {lacking}"
                )
        return repository

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Undo the changes of the `with` block if it raises an exception."""
        before = dict(self.newest), dict(self.changed)
        try:
            yield
        except BaseException:
            self.newest, self.changed = before
            raise

    @property
    def root_digest(self) -> str:
        """The first hex digits of the SHA-256 of the newest root. Invitations contain them."""
        return root_digest(self.newest[ROOT])

    @property
    def key_ids(self) -> set[str]:
        """The ids of all keys that a role names now."""
        delegations = self.targets(TARGETS).delegations
        return set(self.root().keys) | (set(delegations.keys) if delegations else set())

    def files(self) -> dict[str, bytes]:
        """Return the newest metadata under the names by which clients download it."""
        return {file_name(role, self.version(role)): data for role, data in self.newest.items()}

    def version(self, role: str) -> int:
        """Return the newest version of a role's metadata, or 0 if there is none."""
        return self._metadata(role).signed.version if role in self.newest else 0

    def root(self) -> Root:
        """Return the newest root."""
        return parse(Root, self.newest[ROOT]).signed

    def targets(self, role: str) -> Targets:
        """Return the newest metadata of `targets` or of a delegated role. Raises InputError if there
        is none.
        """
        if role in (ROOT, *ONLINE) or role not in self.newest:
            raise InputError(f"There is no metadata of a role {role!r:.80}.")
        return parse(Targets, self.newest[role]).signed

    def target(self, path: str) -> TargetFile | None:
        """Return the target that clients find under a path, or None."""
        role = self._role_of(path)
        return self.targets(role).targets.get(path) if role in self.newest else None

    def listed(self) -> dict[tuple[str, int], Listed]:
        """Return the releases that clients find, by name and version."""
        found = {}
        for role in self._delegated():
            for path, target in self.targets(role).targets.items() if role in self.newest else ():
                if is_target_path(path) and self._role_of(path) == role:
                    found[parse_target_path(path)] = Listed(
                        digest=f"sha256:{target.hashes['sha256']}", aliases=aliases_of(target)
                    )
        return found

    def states(self) -> list[RoleState]:
        """Return summaries of all roles, root first."""
        found = []
        for role in (*TOP_LEVEL, *self._delegated()):
            if role not in self.newest:
                continue
            signed, rule = self._metadata(role).signed, self._delegator(role).get_delegated_role(role)
            found.append(
                RoleState(
                    role=role,
                    version=signed.version,
                    expires_at=signed.expires,
                    threshold=rule.threshold,
                    key_ids=tuple(rule.keyids),
                    signed_here=self._can_sign(rule),
                )
            )
        return found

    def publish(
        self,
        name: str,
        version: int,
        manifest: bytes,
        *,
        aliases: Iterable[str] = (),
        training: Training = Training(),
    ) -> None:
        """List a version under these aliases. Other versions of the same name lose these aliases.

        Args:
            training: options for the devices.

        Raises:
            KeyElsewhereError: the team's key is not available.
        """
        role = self._role_of(target_path(name, version))
        listed = (name, version)
        self._edit(role, lambda targets: list_version(targets, listed, manifest, aliases, training))

    def withdraw(self, name: str, version: int) -> None:
        """Remove a version from the list, so that no device installs it. Idempotent. Raises
        KeyElsewhereError.
        """
        self.drop(target_path(name, version))

    def move_alias(self, name: str, alias: str, version: int | None) -> None:
        """Point an alias at one version, so that devices install only this one. None removes the alias.

        Without the team's key, only a version that is already signed for the alias can be chosen.

        Raises:
            InputError: the version is not listed.
            KeyElsewhereError: the version is not signed for the alias, and the team's key is not
                available.
        """
        path = target_path(name, version or 1)
        role = self._role_of(path)
        listed = self.targets(role).targets
        if version is not None and path not in listed:
            raise InputError(f"{name!r} has no signed version {version}.")
        try:
            self._edit(
                role, lambda targets: name_alias(targets, name, alias, None if version is None else path)
            )
        # Two changes need only a new row in the database, and no key: to remove an alias, and to choose a
        # version that devices of the alias may already install according to the signed list.
        except KeyElsewhereError:
            if version is not None and alias not in aliases_of(listed[path]):
                raise

    def may_move_alias(self, name: str, alias: str, version: int) -> bool:
        """Return whether `move_alias` would succeed with the available keys."""
        path = target_path(name, version)
        role, listed = self._role_of(path), self.target(path)
        rule = self._delegator(role).get_delegated_role(role)
        return listed is not None and (self._can_sign(rule) or alias in aliases_of(listed))

    def list_federation(self, definition: bytes) -> None:
        """List the definition of a federation, so that devices may join it. Idempotent. Raises
        KeyElsewhereError.
        """
        path = federation_path(digest_of(definition))
        role = self._role_of(path)
        if path not in self.targets(role).targets:
            self._edit(role, lambda targets: list_definition(targets, definition))

    def list_rollout(self, name: str, alias: str, document: dict[str, Any]) -> None:
        """List the record of a rollout (FORMAT 14). Raises KeyElsewhereError."""
        path = rollout_path(name, alias)
        target = TargetFile.from_data(path, canonical_json(document), ["sha256"])
        target.unrecognized_fields["custom"] = document
        self._edit(self._role_of(path), lambda targets: targets.targets.update({path: target}))

    def drop(self, path: str) -> None:
        """Remove a target from the list of its role. Idempotent. Raises KeyElsewhereError."""
        role = self._role_of(path)
        if path in self.targets(role).targets:
            self._edit(role, lambda targets: targets.targets.pop(path))

    def renew(self, roles: Iterable[str] = ()) -> list[Draft]:
        """Sign these roles again, and all roles that are due.

        Returns:
            Drafts of the named roles whose keys are elsewhere.
        """
        named, drafts, made = list(roles), [], []
        for role in (ROOT, TARGETS, *self._delegated()):
            if role not in self.newest or not (role in named or self._is_due(role)):
                continue
            following = self._next(self._metadata(role).signed, role)
            metadata = self._sign(role, following, self._delegator(role))
            if not self._lacking(role, metadata):
                self._keep(role, metadata)
                made.append(role)
            elif role in named:
                drafts.append(Draft(role=role, data=metadata.to_bytes()))
        # Even if no other role was signed, snapshot and timestamp must not expire.
        if made or any(role in named or self._is_due(role) for role in ONLINE):
            self._finish(made)
        return drafts

    def rotate(self, holders: Mapping[str, Holders]) -> list[Draft]:
        """Give roles to other keys, and sign again all metadata for which these keys are responsible. Devices
        need not enrol again.

        Clients refuse the metadata if a version number is lower than before. This happens if a thief of a key
        has raised the number, or if an old database was restored. To repair this, give new keys to snapshot
        and timestamp: clients then forget which versions of these two roles they have seen.

        Returns:
            An empty list if everything is signed and in `changed`. Otherwise nothing has changed: sign the
            drafts elsewhere, and pass them to `accept` in this order.
        """
        delegated = self._delegated()
        if unknown := set(holders) - {*TOP_LEVEL, *delegated}:
            raise InputError(f"There is no role {min(unknown)!r:.80}.")
        root, targets = self.root(), self.targets(TARGETS)
        next_root, next_targets = self._next(root, ROOT), self._next(targets, TARGETS)
        for role, holder in holders.items():
            hand_over(next_targets if role in delegated else next_root, role, holder)
        made: list[tuple[str, Metadata[Any], Delegator]] = []
        # The service lacks the new keys of these roles, so their metadata must be signed elsewhere.
        elsewhere = [
            role
            for role in holders
            if not self._can_sign((next_targets if role in delegated else next_root).get_delegated_role(role))
        ]
        for role in elsewhere:
            if role in delegated and role in self.newest:
                signed = self._next(self.targets(role), role)
                made.append((role, self._sign(role, signed, targets, next_targets), next_targets))
        # `targets` must be signed now if it delegates to new keys, or if its own new keys are elsewhere.
        if set(holders) & set(delegated) or TARGETS in elsewhere:
            made.append((TARGETS, self._sign(TARGETS, next_targets, root, next_root), next_root))
        if set(holders) & set(TOP_LEVEL):
            made.append((ROOT, self._sign(ROOT, next_root, root, next_root), next_root))
        if any(lacking_signatures(delegator, role, one) for role, one, delegator in made) or (
            set(holders) & set(TOP_LEVEL) and lacking_signatures(root, ROOT, made[-1][1])
        ):
            return [Draft(role=role, data=one.to_bytes()) for role, one, _ in made]
        for role, one, _ in made:
            self._keep(role, one)
        self._sign_again([role for role, _, _ in made])
        return []

    def accept(self, role: str, data: bytes) -> None:
        """Take the next version of a role, which was signed elsewhere.

        Raises:
            InputError: the metadata is not the next version, lacks signatures, has a wrong expiry, or would
                leave a set of metadata that clients refuse.
        """
        # The service itself signs snapshot and timestamp after each accepted change.
        if role in ONLINE or not (role in (ROOT, TARGETS) or role in self._delegated()):
            raise InputError(
                f"Only root, targets or a role that targets names can be signed elsewhere, not {role!r:.80}."
            )
        offered: Metadata[Root] | Metadata[Targets]
        offered = parse(Root, data) if role == ROOT else parse(Targets, data)
        if len(data) > MAX_BYTES:
            raise InputError(f"{role} has {len(data)} bytes, more than {MAX_BYTES}.")
        self._check_next(role, offered)
        # TUF, section 5.3.4: clients accept only a root that is signed by the old keys (checked by
        # `_check_next`) and by its own keys.
        if isinstance(offered.signed, Root):
            self._check_root(offered)
        elif role == TARGETS:
            check_delegations(offered.signed)
        else:
            self._check_listed(role, offered.signed)
        self.newest[role] = self.changed[file_name(role, offered.signed.version)] = data
        self._sign_again([role])

    def _check_next(self, role: str, offered: Metadata[Any]) -> None:
        signed, expected = offered.signed, self.version(role) + 1
        if signed.version != expected:
            raise InputError(f"The next version of {role} is {expected}, not {signed.version}.")
        latest = self.now + life_of(role) + CLOCK_SLACK
        # With a date in the past, devices could install nothing. With a date too far ahead, metadata that a
        # thief signed would stay valid for long.
        if not self.now < signed.expires <= latest:
            raise InputError(
                f"{role} must expire after {self.now:%F} and by {latest:%F}, not on {signed.expires:%F}."
            )
        if lacking := self._lacking(role, offered):
            raise InputError(f"{role} lacks signatures by its keys: {lacking}")

    def _check_root(self, offered: Metadata[Any]) -> None:
        root: Root = offered.signed
        if lacking := lacking_signatures(root, ROOT, offered):
            raise InputError(f"root lacks signatures by the keys that it names: {lacking}")
        if not root.consistent_snapshot:
            raise InputError("root must have consistent snapshots.")
        check_keys(root.keys.values())
        for role in ONLINE:
            if not self._can_sign(root.roles[role]):
                raise InputError(f"root must name keys of {role} that the service holds.")

    def _check_listed(self, role: str, offered: Targets) -> None:
        if offered.delegations is not None:
            raise InputError(f"{role} must delegate nothing.")
        before = self.targets(role).targets if role in self.newest else {}
        for path, target in offered.targets.items():
            if self._role_of(path) != role or set(target.hashes) != {"sha256"}:
                raise InputError(f"{role} must list its own targets by sha256, not {path!r:.120}.")
            if is_target_path(path):
                aliases_of(target)
            # A listed version never changes. Otherwise, devices with the same version could have different
            # packages.
            known = before.get(path, target)
            if (target.hashes, target.length) != (known.hashes, known.length):
                raise InputError(f"{path!r:.120} was signed before with other content. Use a new version.")

    def _edit(self, role: str, change: Callable[[Targets], object]) -> None:
        signed = self._next(self.targets(role), role)
        change(signed)
        metadata = self._sign(role, signed, self._delegator(role))
        if lacking := self._lacking(role, metadata):
            raise KeyElsewhereError(f"The key of {role} is elsewhere ({lacking}). Sign its metadata there.")
        self._keep(role, metadata)
        self._finish([role])

    def _sign_again(self, made: Iterable[str]) -> None:
        """Sign every role whose keys have changed. Raises InputError if the new keys are elsewhere."""
        touched = set(made)
        for role in (TARGETS, *self._delegated()):
            if role in self.newest and self._lacking(role, self._metadata(role)):
                metadata = self._sign(role, self._next(self.targets(role), role), self._delegator(role))
                if lacking := self._lacking(role, metadata):
                    raise InputError(f"Sign {role} by its new keys first: {lacking}")
                self._keep(role, metadata)
                touched.add(role)
        self._finish(touched)

    def _finish(self, made: Iterable[str]) -> None:
        """Make a new timestamp. Before that, make a new snapshot if roles that it lists have changed, if the
        snapshot is due, or if it lacks signatures.
        """
        listed = [role for role in made if role != ROOT]
        if listed or self._is_due(SNAPSHOT) or self._lacking(SNAPSHOT, self._metadata(SNAPSHOT)):
            snapshot = self._next(self._snapshot(), SNAPSHOT)
            for role in listed:
                # Never remove an entry: clients refuse a snapshot that lacks a role which it had before.
                snapshot.meta[f"{role}.json"] = MetaFile(self.version(role))
            self._keep_online(SNAPSHOT, snapshot)
        stamp = parse(Timestamp, self.newest[TIMESTAMP]).signed if TIMESTAMP in self.newest else None
        timestamp = Timestamp(snapshot_meta=MetaFile(self.version(SNAPSHOT)))
        # Clients refuse a timestamp with a lower version, so continue its numbers.
        timestamp.version = stamp.version if stamp else 0
        self._keep_online(TIMESTAMP, self._next(timestamp, TIMESTAMP))

    def _keep_online(self, role: str, signed: Snapshot | Timestamp) -> None:
        metadata = self._sign(role, signed, self.root())
        if lacking := self._lacking(role, metadata):
            raise OperatorError(f"The key of {role} is not in the service's key folder: {lacking}")
        self._keep(role, metadata)

    def _keep(self, role: str, metadata: Metadata[Any]) -> None:
        data = metadata.to_bytes()
        if len(data) > MAX_BYTES:
            raise InputError(
                f"{role} would have {len(data)} bytes, more than {MAX_BYTES}: withdraw versions."
            )
        self.newest[role] = self.changed[file_name(role, metadata.signed.version)] = data

    def _next(self, signed: AnySigned, role: str) -> AnySigned:
        following = deepcopy(signed)
        following.version += 1
        following.expires = self.now + life_of(role)
        return following

    def _sign(self, role: str, signed: Signed, *delegators: Delegator) -> Metadata[Any]:
        """Sign with every available key that one of the delegators names for the role."""
        metadata: Metadata[Any] = Metadata(signed)
        for delegator in delegators:
            # `append` keeps the signatures that were made for an earlier delegator.
            for key_id in delegator.get_delegated_role(role).keyids:
                if key_id in self.signers:
                    metadata.sign(self.signers[key_id], append=True)
        return metadata

    def _can_sign(self, rule: Role) -> bool:
        # A threshold counts keys, so a holder with several keys can reach it alone.
        return len(self.signers.keys() & set(rule.keyids)) >= rule.threshold

    def _lacking(self, role: str, metadata: Metadata[Any]) -> str:
        return lacking_signatures(self._delegator(role), role, metadata)

    def _is_due(self, role: str) -> bool:
        return is_due(role, self.newest[role], self.now)

    def _delegator(self, role: str) -> Delegator:
        return self.root() if role in TOP_LEVEL else self.targets(TARGETS)

    def _delegated(self) -> list[str]:
        delegations = self.targets(TARGETS).delegations if TARGETS in self.newest else None
        return list(delegations.roles or ()) if delegations else []

    def _role_of(self, path: str) -> str:
        delegations = self.targets(TARGETS).delegations
        found = next(delegations.get_roles_for_target(path), None) if delegations else None
        if found is None:
            raise InputError(f"No role may sign {path!r:.120}: targets does not delegate it.")
        return found[0]

    def _snapshot(self) -> Snapshot:
        if SNAPSHOT in self.newest:
            return parse(Snapshot, self.newest[SNAPSHOT]).signed
        first = Snapshot(meta={})
        # `_next` adds one, so the first snapshot has version 1.
        first.version = 0
        return first

    def _metadata(self, role: str) -> Metadata[Any]:
        return Metadata.from_bytes(self.newest[role])

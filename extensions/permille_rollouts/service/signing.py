"""Signing of rollouts, when an operator changes one or when a device polls.

The sweeper, which runs in the workers, moves rollouts to their next step, but workers have no keys. The API
therefore signs the step when the next device asks for the TUF timestamp, before it answers.
"""

import logging
from contextlib import suppress

from sqlalchemy.orm import Session

from permille.errors import PackageError, PermilleError
from permille.package.limits import MAX_MANIFEST_BYTES
from permille.schemas.jobs import JobKind
from permille.store import artifacts, releases, tables
from permille.store.errors import ConflictError
from permille.trust.metadata import KeyElsewhereError
from permille.trust.repository import Repository
from permille.trust.roles import Training, rollout_path, target_path, training_of
from permille_rollouts.offer import RolloutState
from permille_rollouts.store import rollouts
from permille_service.context import Service

logger = logging.getLogger(__name__)


def sign_all(service: Service, session: Session, repository: Repository, tenant_id: str) -> None:
    """Sign the newest revision of each rollout of a tenant, if it is not signed yet.

    If one cannot be signed, it is logged and stays as it was, and the others are signed. For example, the
    keys of a team may be elsewhere, or a row may be damaged.
    """
    for row in rollouts.unsigned(session, tenant_id=tenant_id):
        row_id = row.id
        try:
            with session.begin_nested(), repository.all_or_nothing():
                sign(service, session, repository, row)
        except Exception as exc:
            traced = None if isinstance(exc, PermilleError) else exc
            logger.error("the newest change of %s cannot be signed: %s", row_id, exc, exc_info=traced)


def sign(service: Service, session: Session, repository: Repository, row: tables.Rollout) -> None:
    """Update the trust metadata to match the row of a rollout. The caller has locked the row.

    Raises:
        KeyElsewhereError: the service does not hold the key of the role `rollouts`, or the rollout has ended
            and the service lacks the team's key to move the alias.
    """
    if row.state == RolloutState.DONE:
        _finish(session, repository, row)
    if row.reverting:
        _revert(service, session, repository, row)
    offer, path = rollouts.offer_of(row), rollout_path(row.release, row.alias)
    listed = repository.target(path)
    if offer is not None:
        repository.list_rollout(row.release, row.alias, offer.to_document())
    elif listed is not None and listed.custom["rollout"] == row.id:  # otherwise a later rollout is listed
        repository.drop(path)
    rollouts.signed(row)


def check_may_end(repository: Repository, row: tables.Rollout) -> None:
    """Check that the service can sign the end of a rollout. Raises ConflictError if it lacks the key."""
    if not repository.may_move_alias(row.release, row.alias, row.version):
        raise ConflictError(
            f"At its end, this rollout must point {row.alias!r} at {row.release!r} version {row.version}. "
            "The service cannot sign this, because the team's key is elsewhere. Before you start the "
            f"rollout, sign version {row.version} for {row.alias!r} on the machine that has the key."
        )


def _finish(session: Session, repository: Repository, row: tables.Rollout) -> None:
    """Point the alias at the rollout's version, unless an operator has moved the alias meanwhile."""
    if not _is_where_it_was(session, row):
        return
    with suppress(ConflictError):  # the version was yanked at the last moment, so the alias stays where it is
        releases.set_alias(
            session, tenant_id=row.tenant_id, name=row.release, alias=row.alias, version=row.version
        )
        repository.move_alias(row.release, row.alias, row.version)


def _revert(service: Service, session: Session, repository: Repository, row: tables.Rollout) -> None:
    """Publish the package of the version before the rollout as a new version.

    If the service lacks the team's key, or has lost the package's manifest, it publishes nothing. The alias
    still points at the version before the rollout, so devices return to that version. If an operator has
    moved the alias or yanked the version before the rollout, nothing is published either, and devices follow
    the alias.
    """
    before = releases.get(session, tenant_id=row.tenant_id, name=row.release, version=row.before)
    if before.yanked_at is not None or not _is_where_it_was(session, row):
        rollouts.reverted(session, row)
        return
    package = artifacts.get(session, tenant_id=row.tenant_id, kind=JobKind.PACKAGE, key=before.package_digest)
    version = releases.latest_version(session, tenant_id=row.tenant_id, name=row.release) + 1
    listed = repository.target(target_path(row.release, row.before))
    training = Training() if listed is None else training_of(listed)
    try:
        manifest = service.blobs.hurried().read(package.digest, limit=MAX_MANIFEST_BYTES)
        repository.publish(row.release, version, manifest, aliases=[row.alias], training=training)
    except (KeyElsewhereError, PackageError) as exc:
        logger.warning(
            "the devices of %s go back to version %d, not to a new version: %s", row.id, row.before, exc
        )
    else:
        releases.publish(session, name=row.release, package=package, version=version)
        releases.set_alias(
            session, tenant_id=row.tenant_id, name=row.release, alias=row.alias, version=version
        )
    rollouts.reverted(session, row)


def _is_where_it_was(session: Session, row: tables.Rollout) -> bool:
    """Return whether the alias still points at the version from before the rollout."""
    alias = session.get(tables.Alias, (row.tenant_id, row.release, row.alias))
    return alias is not None and alias.version == row.before

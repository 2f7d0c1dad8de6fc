"""Access to a tenant's TUF repository within a transaction.

The metadata of the repository is stored in the database, and the service's keys are files. A new key is
written before the end of the transaction that names it. An obsolete key is deleted after the transaction. A
crash can therefore leave an unused key, but never lose a needed one.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import BaseModel
from securesystemslib.signer import CryptoSigner
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from permille.errors import PermilleError
from permille.store import audit, database, trust
from permille.trust.metadata import expiry_of, is_due
from permille.trust.repository import KEYS_AT_START, Repository
from permille.trust.roles import TIMESTAMP, TIMESTAMP_FILE
from permille_service.access.principals import Operator
from permille_service.context import Service
from permille_service.extension import service_extensions

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")


@contextmanager
def changing(service: Service, session: Session, tenant_id: str) -> Iterator[Repository]:
    """Open the tenant's repository to change it. Create it if it does not exist.

    Changes that are made in the `with` block are stored with the transaction:

        with changing(service, session, tenant_id) as repository:
            repository.move_alias("chat", "stable", 4)

    Raises:
        ChangedError: another transaction has changed the repository in the meantime.
    """
    found, now = trust.newest(session, tenant_id=tenant_id), database.now(session)
    keys: list[Ed25519PrivateKey] = []
    if found:
        repository = Repository.open(found, service.trust_keys.signers(tenant_id), now)
        seen = repository.version(TIMESTAMP)
    else:
        keys = [Ed25519PrivateKey.generate() for _ in range(KEYS_AT_START)]
        repository, seen = Repository.create(now=now, signers=map(CryptoSigner, keys)), 0
    yield repository
    for key in keys:  # not earlier, because refused requests must leave no keys
        service.trust_keys.keep(tenant_id, key)
    trust.keep(session, tenant_id=tenant_id, repository=repository, seen=seen)


def read(service: Service, tenant_id: str) -> Repository:
    """Open the tenant's repository to read it. Create it if it does not exist."""
    with service.database.read() as session:
        found, now = trust.newest(session, tenant_id=tenant_id), database.now(session)
    if found:
        return Repository.open(found, service.trust_keys.signers(tenant_id), now)
    return change(service, tenant_id, lambda _, repository: repository)


def ensure(service: Service, session: Session, tenant_id: str) -> None:
    """Create the tenant's repository if it does not exist."""
    with changing(service, session, tenant_id):
        pass


def change(service: Service, tenant_id: str, work: Callable[[Session, Repository], Answer]) -> Answer:
    """Change the tenant's repository in a transaction of its own. Then delete the keys that no role names."""
    useless: set[str] = set()

    def run(session: Session) -> Answer:
        with changing(service, session, tenant_id) as repository:
            before = repository.key_ids
            answer = work(session, repository)
            useless.clear()
            useless.update(before - repository.key_ids)
        return answer

    answer = service.database.transact(run)
    service.trust_keys.drop(tenant_id, useless)
    return answer


def change_by(
    service: Service,
    operator: Operator,
    work: Callable[[Session, Repository], Answer],
    body: BaseModel | None = None,
) -> Answer:
    """Change a repository as `change` does, and add an entry for the operator to the audit log."""

    def audited(session: Session, repository: Repository) -> Answer:
        answer = work(session, repository)
        audit.append(session, tenant_id=operator.tenant_id, change=operator.change(body=body))
        return answer

    return change(service, operator.tenant_id, audited)


def read_file(service: Service, tenant_id: str, file: str) -> bytes:
    """Return a metadata file for a client.

    If the file is the timestamp, first let extensions sign what has changed, and renew the timestamp if it is
    due. If this fails, for example on a full disk, return the old timestamp until it expires.

    Raises:
        NotFoundError: there is no such file.
        PermilleError, DBAPIError, OSError: the timestamp has expired and cannot be renewed.
    """
    data, at, is_unsigned = trust.read_file(service.database, tenant_id=tenant_id, file=file)
    if file != TIMESTAMP_FILE or not (is_unsigned or is_due(TIMESTAMP, data, at)):
        return data

    def renew(session: Session, repository: Repository) -> bytes:
        for extension in service_extensions():
            extension.sign(service, session, repository, tenant_id)
        if is_due(TIMESTAMP, repository.newest[TIMESTAMP], at):
            repository.renew()
        return repository.newest[TIMESTAMP]

    try:
        return change(service, tenant_id, renew)
    except (PermilleError, DBAPIError, OSError) as exc:  # devices accept the old timestamp until it expires
        logger.error("trust metadata of tenant %s cannot be renewed: %s", tenant_id, exc)
        if at >= expiry_of(data):
            raise
        return data

"""Routes of storage: the retention rule, and the deletion of blobs that no row of the database names."""

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Query

from permille.schemas.access import BlobCollection, RetentionRule, Retired
from permille.store.retention import rules
from permille.store.retention.collection import Found, collect
from permille_service.access.principals import Admin, Viewer, changing, require_first_tenant
from permille_service.context import Served
from permille_service.problems import PRIVATE, documented

router = APIRouter(prefix="/v1", tags=["storage"], responses=documented(*PRIVATE))

DryRun = Annotated[bool, Query(description="list what would be deleted, and delete nothing")]
_MOST_NAMED = 1000


@router.post("/blobs/collect")
def collect_blobs(service: Served, operator: Admin, dry_run: DryRun = False) -> BlobCollection:
    """Delete blobs that no record of any tenant names, unless they are younger than the grace period. Only
    administrators of the first tenant may do this."""
    with service.database.read() as session:
        require_first_tenant(session, operator)
    found = collect(service.database, service.blobs, service.settings, dry_run=dry_run)
    if not dry_run:
        with changing(service, operator):
            # Write to the audit log after the deletion. If the disk was full, it now has room for the entry.
            pass
    return present(found, dry_run=dry_run)


@router.get("/retention")
def get_retention(service: Served, operator: Viewer) -> RetentionRule:
    """Read the retention rule."""
    with service.database.read() as session:
        return rules.read_rule(session, tenant_id=operator.tenant_id)


@router.put("/retention")
def put_retention(body: RetentionRule, service: Served, operator: Admin) -> RetentionRule:
    """Set the retention rule. By default, workers apply it every hour. The audit log names the token that set
    the rule as the author of these deletions."""
    with changing(service, operator, body) as session:
        rules.set_rule(session, tenant_id=operator.tenant_id, token_id=operator.token_id, rule=body)
    return body


@router.post("/retention/apply")
def apply_retention(service: Served, operator: Admin, dry_run: DryRun = False) -> Retired:
    """Apply the retention rule now. Objects in use stay. A call deletes at most 50 objects of each kind, so
    repeat it until it deletes nothing. The audit log lists the deleted packages, quantizations and masks, and
    the numbers of deleted logs, reports and jobs."""
    gone = rules.apply(
        service.database, tenant_id=operator.tenant_id, token_id=operator.token_id, dry_run=dry_run
    )
    return Retired(dry_run=dry_run, **asdict(gone))


def present(found: Found, *, dry_run: bool) -> BlobCollection:
    """Return the record of a collection."""
    largest = sorted(found.removed, key=lambda name: (-found.removed[name], name))
    return BlobCollection(
        dry_run=dry_run,
        stored_bytes=sum(found.stored.values()),
        unreferenced_bytes=sum(found.unreferenced.values()),
        removed_bytes=sum(found.removed.values()),
        removed_count=len(found.removed),
        removed=largest[:_MOST_NAMED],
    )

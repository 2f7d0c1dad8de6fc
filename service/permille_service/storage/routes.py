"""Routes of storage: collect what no row names."""

from typing import Annotated

from fastapi import APIRouter, Query

from permille.schemas.access import BlobCollection
from permille.store.retention.collection import Found, collect
from permille_service.access.principals import Admin, changing, require_first_tenant
from permille_service.context import Served
from permille_service.problems import PRIVATE, documented

router = APIRouter(prefix="/v1", tags=["storage"], responses=documented(*PRIVATE))

DryRun = Annotated[bool, Query(description="say what would go, and let nothing go")]
_MOST_NAMED = 1000


@router.post("/blobs/collect")
def collect_blobs(service: Served, operator: Admin, dry_run: DryRun = False) -> BlobCollection:
    """Delete what no row of any tenant names and was stored before the grace. For an administrator of the
    first tenant."""
    with service.database.read() as session:
        require_first_tenant(session, operator)
    found = collect(service.database, service.blobs, service.settings, dry_run=dry_run)
    if not dry_run:
        with changing(service, operator):
            pass  # the note comes after: a disk that was full may hold it by now
    return present(found, dry_run=dry_run)


def present(found: Found, *, dry_run: bool) -> BlobCollection:
    """The record of a collection."""
    largest = sorted(found.removed, key=lambda name: (-found.removed[name], name))
    return BlobCollection(
        dry_run=dry_run,
        stored_bytes=sum(found.stored.values()),
        unreferenced_bytes=sum(found.unreferenced.values()),
        removed_bytes=sum(found.removed.values()),
        removed_count=len(found.removed),
        removed=largest[:_MOST_NAMED],
    )

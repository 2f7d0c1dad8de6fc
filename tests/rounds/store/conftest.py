"""The fixtures of the store's tests."""

from tests.unit.store.conftest import (
    backend,
    clock,
    db,
    device_id,
    other_tenant_id,
    postgres_url,
    pytest_collection_modifyitems,
    template,
    tenant_id,
)

__all__ = [
    "backend",
    "clock",
    "db",
    "device_id",
    "other_tenant_id",
    "postgres_url",
    "pytest_collection_modifyitems",
    "template",
    "tenant_id",
]

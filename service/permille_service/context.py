"""The objects that all endpoints share: a record of them, and a dependency that provides it. For example:

def list_devices(service: Served) -> Page[Device]: ...
"""

import threading
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from permille.package.blobs import BlobFolder
from permille.store.database import Database
from permille.store.jobs.dispatch import CeleryDispatcher
from permille_service import keys
from permille_service.limits import RateLimit, Slots
from permille_service.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """Everything that endpoints share."""

    settings: Settings
    database: Database
    blobs: BlobFolder
    seal: keys.Seal
    sign_ins: RateLimit
    streams: Slots  # by token
    tenant_streams: Slots
    heads: Slots  # files that are read for a registration, by tenant
    trust_keys: keys.TrustKeys
    dispatcher: CeleryDispatcher | None  # None: there is no broker, and workers find jobs in the database
    draining: threading.Event = field(default_factory=threading.Event)
    """Set when the process begins to stop."""

    def close(self) -> None:
        """Close the database."""
        self.database.close()


async def service_of(request: Request) -> Service:
    """Return the service that this app was made with."""
    # An `async` function needs no thread. `/livez` must also answer while all threads are busy.
    service: Service = request.app.state.service
    return service


Served = Annotated[Service, Depends(service_of)]

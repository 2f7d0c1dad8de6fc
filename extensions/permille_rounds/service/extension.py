"""The part of rounds for the service."""

from typing import Final

from permille_rounds.definition import Definition
from permille_rounds.service import device_routes, routes
from permille_rounds.store import members
from permille_service.extension import ServiceExtension


def canonical(definition: bytes) -> bytes:
    """Return the canonical bytes of a definition. Raises PackageError if it is none."""
    return Definition.from_bytes(definition).to_bytes()


EXTENSION: Final = ServiceExtension(
    routers=(routes.router, device_routes.router),
    tags=(
        {
            "name": "federations",
            "description": "Federations, in which many devices train one shared state in rounds.",
        },
    ),
    leave=lambda session, device_id: members.leave(session, device_id=device_id),
    targets={"federations": canonical},
)

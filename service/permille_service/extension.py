"""The part of an extension for the service: routers, signed changes, metrics and estimates of jobs."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from prometheus_client.core import Metric
from sqlalchemy.orm import Session

from permille.extensions import extensions
from permille.schemas.fields import Closed
from permille.trust.repository import Repository
from permille_service.context import Service

if TYPE_CHECKING:
    from permille_service.preflights.estimates import Needs
    from permille_service.preflights.planning import Planner

Sign = Callable[[Service, Session, Repository, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceExtension:
    """Parts of an extension for the service. An entry point in `permille.service` names one.

    Attributes:
        routers: the routers. They come before those of the core's pages.
        tags: the tags of the routers, with their descriptions, for the OpenAPI document.
        sign: signs what has changed in a tenant's repository since the last call. The service calls it before
            it answers a request for the TUF timestamp.
        metrics: reads metrics from the database.
        leave: ends the part that a device takes in something. The service calls it when the device is revoked
            or unenrolled.
        targets: checks of the files that signed metadata may list, by the folder of their path there. A check
            returns the bytes to list, or raises PackageError.
        needs: estimates of the memory and disk of a job, by the class of its request.
    """

    routers: tuple[APIRouter, ...] = ()
    tags: tuple[Mapping[str, str], ...] = ()
    sign: Sign = lambda _service, _session, _repository, _tenant_id: None
    metrics: Callable[[Session], Iterable[Metric]] = lambda _session: ()
    leave: Callable[[Session, str], None] = lambda _session, _device_id: None
    targets: Mapping[str, Callable[[bytes], bytes]] = field(default_factory=dict)
    needs: Mapping[type[Closed], Callable[["Planner", Any], "Needs"]] = field(default_factory=dict)


def service_extensions() -> tuple[ServiceExtension, ...]:
    """Return the parts of the installed extensions for the service."""
    return extensions("service", ServiceExtension)


def leave_all(session: Session, device_id: str) -> None:
    """End the part that a device takes in anything, because it is revoked or unenrolled."""
    for extension in service_extensions():
        extension.leave(session, device_id)

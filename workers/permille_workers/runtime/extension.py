"""The part of an extension for the workers: steps of their maintenance."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from permille.extensions import extensions
from permille.store.database import Database
from permille_workers.runtime.settings import WorkerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExtension:
    """What an extension adds to the workers. An entry point in `permille.workers` names one.

    The name of a step completes the message "cannot ...". A step that fails is logged and tried again.

    Attributes:
        sweeps: short steps of each sweep of the database, by name. They may add jobs.
        threads: steps that may take long, by name. Each runs every `sweep_s` seconds in a thread of its own.
    """

    sweeps: Mapping[str, Callable[[Database], object]] = field(default_factory=dict)
    threads: Mapping[str, Callable[[Database, WorkerSettings], object]] = field(default_factory=dict)


def worker_extensions() -> tuple[WorkerExtension, ...]:
    """Return the parts of the installed extensions for the workers."""
    return extensions("workers", WorkerExtension)

"""The part of an extension for the workers: tasks, and steps of their maintenance."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from permille.extensions import extensions
from permille.schemas.jobs import JobKind
from permille.store.database import Database
from permille_workers.runtime.settings import WorkerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExtension:
    """Parts of an extension for the workers. An entry point in `permille.workers` names one.

    The name of a step completes the message "cannot ...". A step that fails is logged and tried again.

    Attributes:
        sweeps: short steps of each sweep of the database, by name. They may add jobs.
        tasks: the names of the modules that run kinds of jobs, as the modules of `permille_workers.tasks` do.
            A module is imported only when its job runs.
        threads: steps that may take long, by name. Each runs every `sweep_s` seconds in a thread of its own.
    """

    sweeps: Mapping[str, Callable[[Database], object]] = field(default_factory=dict)
    tasks: Mapping[JobKind, str] = field(default_factory=dict)
    threads: Mapping[str, Callable[[Database, WorkerSettings], object]] = field(default_factory=dict)


def worker_extensions() -> tuple[WorkerExtension, ...]:
    """Return the parts of the installed extensions for the workers."""
    return extensions("workers", WorkerExtension)

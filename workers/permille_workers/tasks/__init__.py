"""Tasks, one module for each kind of job: load, call the library, save.

Builds have no task: see `permille.store.jobs.parents`.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from importlib import import_module

from permille.schemas.jobs import JobKind
from permille.schemas.kinds import parse_request
from permille_workers.runtime.context import PartsToAdd, Publish, Task, TaskContext

_KINDS = tuple(kind for kind in JobKind if kind is not JobKind.BUILD)


class Tasks(Mapping[str, Task]):
    """Tasks by kind, imported when they run: a replay does not wait for what a mask needs."""

    def __getitem__(self, kind: str) -> Task:
        return partial(_run, JobKind(kind)) if kind in _KINDS else self.__missing__(kind)

    def __missing__(self, kind: str) -> Task:
        raise KeyError(kind)

    def __iter__(self) -> Iterator[str]:
        return iter(kind.value for kind in _KINDS)

    def __len__(self) -> int:
        return len(_KINDS)


def _run(kind: JobKind, context: TaskContext) -> Publish | PartsToAdd:
    request = parse_request(kind, context.claim.payload)
    made: Publish | PartsToAdd = import_module(f"permille_workers.tasks.{kind}").run(context, request)
    return made


TASKS: Mapping[str, Task] = Tasks()

"""Tasks, one module for each kind of job: load, call the library, save.

Builds have no task: see `permille.store.jobs.parents`.
"""

from collections.abc import Mapping
from functools import partial
from importlib import import_module

from permille.schemas.jobs import JobKind
from permille.schemas.kinds import parse_request
from permille_workers.runtime.context import PartsToAdd, Publish, Task, TaskContext


def _run(kind: JobKind, context: TaskContext) -> Publish | PartsToAdd:
    request = parse_request(kind, context.claim.payload)
    made: Publish | PartsToAdd = import_module(f"permille_workers.tasks.{kind}").run(context, request)
    return made


TASKS: Mapping[str, Task] = {kind.value: partial(_run, kind) for kind in JobKind if kind is not JobKind.BUILD}
"""Tasks by kind. A task's module is imported when it runs, so a replay does not import torch for a mask."""

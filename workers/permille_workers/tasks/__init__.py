"""Tasks, one module for each kind of job. A task loads its inputs, calls the library, and saves the result.

Builds have no task, because they consist of other jobs (see `permille.store.jobs.parents`).
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
"""The task of each kind of job.

The module of a task is imported when the task runs. So a replay, for example, does not import torch.
"""

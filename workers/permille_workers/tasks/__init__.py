"""Tasks, one module for each kind of job. A task loads its inputs, calls the library, and saves the result.

Builds have no task, because they consist of other jobs (see `permille.store.jobs.parents`).
"""

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Final

from permille.schemas.jobs import JobKind
from permille.schemas.kinds import parse_request
from permille_workers.runtime.context import PartsToAdd, Publish, Task, TaskContext
from permille_workers.runtime.extension import worker_extensions

_OWN: Final = (
    *(JobKind.MASK, JobKind.SHARD, JobKind.QUANTIZATION, JobKind.PACKAGE, JobKind.EXPORT, JobKind.REPLAY),
)


def _run(kind: JobKind, module: str, context: TaskContext) -> Publish | PartsToAdd:
    request = parse_request(kind, context.claim.payload)
    made: Publish | PartsToAdd = import_module(module).run(context, request)
    return made


_MODULES: Final = {kind: f"permille_workers.tasks.{kind}" for kind in _OWN} | {
    kind: module for extension in worker_extensions() for kind, module in extension.tasks.items()
}
TASKS: Mapping[str, Task] = {kind.value: partial(_run, kind, module) for kind, module in _MODULES.items()}
"""The task of each kind of job.

The module of a task is imported when the task runs. So a replay, for example, does not import torch.
"""

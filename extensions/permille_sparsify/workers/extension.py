"""The part of sparse models for the workers."""

from typing import Final

from permille.schemas.jobs import JobKind
from permille_workers.runtime.extension import WorkerExtension

EXTENSION: Final = WorkerExtension(tasks={JobKind.SPARSIFICATION: "permille_sparsify.workers.task"})

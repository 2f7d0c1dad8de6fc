"""The part of rounds for the workers."""

from typing import Final

from permille.schemas.jobs import JobKind
from permille_rounds.store import rounds
from permille_workers.runtime.extension import WorkerExtension

EXTENSION: Final = WorkerExtension(
    sweeps={"end rounds": rounds.sweep}, tasks={JobKind.ROUND: "permille_rounds.workers.task"}
)

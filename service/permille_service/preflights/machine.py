"""What this machine has: free memory (the control group's limit included), free disk, and an assumed
speed."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from permille.memory import available_memory
from permille_service.settings import Settings

FLOPS_A_CORE = 8e9  # float32 matrix products on a modest core; `flops_per_s` replaces it


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a job may use. None: unknown, and then nothing is refused for it."""

    memory_bytes: int | None
    disk_bytes: int | None
    flops_per_s: float
    split_flops: float
    max_job_s: float


def look(settings: Settings) -> Machine:
    """Measure the machine now."""
    free = settings.memory_bytes if settings.memory_bytes is not None else available_memory()
    return Machine(
        memory_bytes=free,
        disk_bytes=_free_disk(settings.blob_root),
        flops_per_s=settings.flops_per_s or FLOPS_A_CORE * (os.cpu_count() or 1),
        split_flops=settings.fisher_split_flops,
        max_job_s=settings.max_job_s,
    )


def _free_disk(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(
            next(path for path in (folder, *folder.absolute().parents) if path.exists())
        ).free
    except OSError:
        return None

"""API and worker processes that kill themselves once, at a named step of a round.

Run as `python -m tests.rounds.service.processes api|worker`. The environment variable KILL_AT names the step.
The process makes the file KILL_MARK before it kills itself. If the file exists, no process is killed.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from permille_rounds.service import device_routes
from permille_rounds.store import contributions, rounds
from permille_rounds.workers import task as round_task
from permille_service import __main__ as api_process
from permille_workers.__main__ import run_worker
from permille_workers.runtime import child
from permille_workers.runtime.settings import WorkerSettings
from permille_workers.tasks import TASKS

CHILD_COMMAND = (sys.executable, "-m", "tests.rounds.service.processes", "child")
WORKER_STEPS: dict[str, tuple[Any, str, bool]] = {
    "before-combining": (round_task, "close", False),
    "after-combining": (round_task, "close", True),
    "in-the-transaction": (rounds, "publish", True),
    "after-the-transaction": (child, "publish_result", True),
}
API_STEPS: dict[str, tuple[Any, str, bool]] = {
    "before-accepting": (contributions, "accept", False),
    "in-the-transaction": (contributions, "accept", True),
    "after-the-transaction": (device_routes, "dispatch", False),
}
"""For each step: the object, the name of its function, and whether the kill comes after the call."""


def kill_once(steps: dict[str, tuple[Any, str, bool]]) -> None:
    """Replace the function of the step that KILL_AT names."""
    place, name, after = steps[os.environ["KILL_AT"]]
    real: Callable[..., Any] = getattr(place, name)

    def armed(*arguments: Any, **options: Any) -> Any:
        mark = Path(os.environ["KILL_MARK"])
        if mark.exists():
            return real(*arguments, **options)
        if after:
            real(*arguments, **options)
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    setattr(place, name, armed)


def main() -> int:
    """Run the API, the worker, or the worker's child."""
    if sys.argv[1] == "api":
        kill_once(API_STEPS)
        return api_process.main()
    if sys.argv[1] == "worker":
        run_worker(WorkerSettings.model_validate({}), child_command=CHILD_COMMAND)
    else:
        kill_once(WORKER_STEPS)
        child.run_child(TASKS, sys.stdin.buffer)
    return 0


if __name__ == "__main__":
    sys.exit(main())

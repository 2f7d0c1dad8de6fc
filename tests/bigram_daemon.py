"""`permille-agent run --once` as a process with the bigram engine. It starts fast enough to be killed often.

python -m tests.bigram_daemon HOME STEPS
"""

import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from permille_agent.daemon.loop import Daemon, World
from permille_agent.daemon.training_child import TrainingRequest
from permille_agent.state.home import Home, open_home
from permille_agent.state.lock import hold_lock
from permille_agent.state.policy import PowerAndLoad
from permille_agent.training.options import RunContext
from permille_agent.training.train import run_training
from tests.bigram_engine import bigram_engine
from tests.unit.edge_agent.runs import QUICK

IDLE = PowerAndLoad(on_ac=True, battery=None, load=0.0)


def main(arguments: list[str]) -> int:
    options = replace(QUICK, steps=int(arguments[1]), queries=2)

    def train(home: Home, request: TrainingRequest, _keep_going: Callable[[], bool]) -> str:
        context = RunContext(share_log=request.share_log, engine_of=bigram_engine)
        with hold_lock(home, "run"):
            result = run_training(home, request.data_paths, options, context)
        return result.outcome.value

    home = open_home(Path(arguments[0]))
    with hold_lock(home, "run", of=home.daemon_lock):
        Daemon(home, threading.Event(), World(train=train, machine=lambda: IDLE)).run_once()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

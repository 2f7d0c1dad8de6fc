"""One pass over a device's rounds, in a process that kills itself at a named step.

python -m tests.rounds.agent.kill_rounds HOME TEXT STEP
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from permille.training import adam
from permille.zo.journal import Journal
from permille_agent.state.home import open_home
from permille_agent.training.options import RunContext
from permille_rounds.agent import exchange, membership, part
from permille_rounds.agent.calls import FederationsApi
from permille_rounds.agent.exchange import take_part
from permille_rounds.agent.membership import Membership
from tests.bigram_engine import bigram_engine

# For each step: the object, the name of its function, the number of the call, and True to kill before it.
STEPS: dict[str, tuple[Any, str, int, bool]] = {
    "history-fetched": (membership, "write_atomic", 1, True),
    "history-kept": (membership, "write_atomic", 1, False),
    "invited": (exchange, "begin_part", 1, True),
    "invitation-kept": (exchange, "begin_part", 1, False),
    "gain-measured": (part, "_measured_gain", 1, False),
    "step-remembered": (adam, "write_atomic", 2, False),
    "step-durable": (Journal, "append", 2, False),
    "part-trained": (part, "write_atomic", 1, True),
    "contribution-kept": (part, "write_atomic", 1, False),
    "contribution-not-sent": (FederationsApi, "contribute", 1, True),
    "contribution-sent": (FederationsApi, "contribute", 1, False),
    "end-noted": (Membership, "end", 1, False),
}


def main(arguments: list[str]) -> int:
    """Run one pass. The process dies at the step."""
    where, name, count, before = STEPS[arguments[2]]
    setattr(where, name, killing(getattr(where, name), count, before=before))
    home, text = open_home(Path(arguments[0])), Path(arguments[1])
    take_part(home, [text], RunContext(engine_of=bigram_engine))
    return 0


def killing(function: Callable[..., Any], count: int, *, before: bool) -> Callable[..., Any]:
    """Return the function, except that its `count`-th call kills the process."""
    calls = iter(range(1, count + 1))

    def call(*arguments: Any, **options: Any) -> Any:
        number = next(calls, 0)
        if number == count and before:
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*arguments, **options)
        if number == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return call


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

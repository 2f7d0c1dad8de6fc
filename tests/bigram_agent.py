"""`permille-agent train` as a process with the bigram engine. It starts fast enough to be killed often.

python -m tests.bigram_agent HOME TEXT STEPS QUERIES

QUERIES is the number of queries of zeroth-order training. With 0, the training follows the gradient.
"""

import sys
from pathlib import Path

from permille.choices import EstimatorKind
from permille_agent.link.report import collect_reports
from permille_agent.state.home import open_home
from permille_agent.state.lock import hold_lock
from permille_agent.training.options import RunContext, TrainOptions
from permille_agent.training.train import run_training
from tests.bigram_engine import bigram_engine


def main(arguments: list[str]) -> int:
    """Train with the bigram engine and short rows."""
    home = open_home(Path(arguments[0]))
    queries = int(arguments[3])
    estimator = EstimatorKind.ONE_SIDED if queries else EstimatorKind.GRADIENT
    options = TrainOptions.of(
        estimator, queries=queries, rows=2, seed=0, steps=int(arguments[2]), row_tokens=32
    )
    context = RunContext(share_log=options.has_log, engine_of=bigram_engine)
    with hold_lock(home, "train", wait_s=10.0):
        run_training(home, [Path(arguments[1])], options, context)
        collect_reports(home)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

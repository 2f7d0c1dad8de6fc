"""Which estimator, how many queries, which schedule: held-out loss after the same number of forward tokens.

    PERMILLE_MODELS=DIR PERMILLE_DATA=DIR python -m benchmarks.estimators

Every setting reads the same number of tokens forward (2 x queries x rows x tokens x steps for finite
differences), except forward mode, which is given the same number of steps. One speaker, one seed, one model:
a choice, not a law.
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.model_packages import Sources, installed_home, sources_from_environment, speaker_text
from edge_agent.options import TrainOptions
from edge_agent.run_folder import find_run
from edge_agent.training_job import run_training
from permille.engines.factory import open_engine
from permille.zo.log import EstimatorKind, Schedule

MODEL, DENSITY, SPEAKER = "stories260K-hf", 0.01, "GLOUCESTER"
ROW_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One row of the table."""

    estimator: EstimatorKind
    queries: int
    batch_rows: int
    steps: int
    schedule: Schedule = Schedule.LINEAR


SETTINGS = (
    Setting(estimator=EstimatorKind.SPSA, queries=1, batch_rows=16, steps=300),
    Setting(estimator=EstimatorKind.SPSA, queries=4, batch_rows=4, steps=300),
    Setting(estimator=EstimatorKind.SPSA, queries=8, batch_rows=2, steps=300),
    Setting(estimator=EstimatorKind.SPSA, queries=16, batch_rows=1, steps=300),
    Setting(estimator=EstimatorKind.SPSA, queries=1, batch_rows=4, steps=1200),
    Setting(estimator=EstimatorKind.SPSA, queries=8, batch_rows=2, steps=300, schedule=Schedule.CONSTANT),
    Setting(estimator=EstimatorKind.FORWARD, queries=8, batch_rows=2, steps=300),
)


def measure(sources: Sources, setting: Setting, packages: Path, folder: Path) -> dict[str, Any]:
    """One run; what it was, what it found, how it ended."""
    home = installed_home(folder, sources, MODEL, packages, DENSITY)
    text = speaker_text(sources, SPEAKER, folder)
    options = TrainOptions(row_tokens=ROW_TOKENS, **asdict(setting))
    began = time.process_time()
    result = run_training(
        home,
        data_paths=[text],
        steps=None,
        minutes=None,
        seed=0,
        share_log=False,
        options=options,
        engine_of=lambda package: open_engine(package, threads=1),
    )
    decision = result.details["decision"]
    plan = result.details["plan"]
    evaluations = find_run(home, str(result.run)).evaluations(decision["attempt"])
    quarter = next(e for e in evaluations if e.step >= setting.steps // 4)
    return {
        **{name: str(value) for name, value in asdict(setting).items()},
        "cpu_seconds": round(time.process_time() - began, 1),
        "loss_base": decision["loss_base"],
        "loss_personal": decision.get("loss_personal"),
        "improvement": decision["against_base"]["improvement"],
        "standard_error": decision["against_base"]["standard_error"],
        "select_loss_at_a_quarter": quarter.loss,
        "races": plan["learning_rate_search"]["races"],
        "epsilon_relative_error": plan["epsilon_search"]["relative_error"],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as markdown."""
    lines = [
        "# Estimators at equal cost",
        "",
        "Made by `python -m benchmarks.estimators`; all numbers are in `estimators.json`.",
        f"{MODEL}, density {DENSITY}, {SPEAKER}, rows of {ROW_TOKENS} tokens, one thread, one seed.",
        "Every finite difference reads the same number of tokens; forward mode makes the same number of",
        "steps. Loss in nats per token on the test split; SE: of the fall, paired bootstrap over documents.",
        "",
        "| estimator | queries | rows | steps | schedule | CPU s | base | personal | fall | SE | at 1/4 |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['estimator']} | {row['queries']} | {row['batch_rows']} | {row['steps']} "
            f"| {row['schedule']} | {row['cpu_seconds']} | {row['loss_base']:.3f} "
            f"| {row['loss_personal']:.3f} | {row['improvement']:.3f} | {row['standard_error']:.3f} "
            f"| {row['select_loss_at_a_quarter']:.3f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write all rows as JSON, and as a page beside it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("docs/results/estimators.json"))
    arguments = parser.parse_args()
    sources = sources_from_environment()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for index, setting in enumerate(SETTINGS):
            folder = Path(name) / str(index)
            rows.append(measure(sources, setting, Path(name) / "packages", folder))
            sys.stderr.write(json.dumps(rows[-1]) + "\n")
    document = {
        "model": MODEL,
        "density": DENSITY,
        "speaker": SPEAKER,
        "row_tokens": ROW_TOKENS,
        "rows": rows,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(document, indent=2) + "\n")
    arguments.out.with_suffix(".md").write_text(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Does `permille-agent train`, untuned, make a real model better on one person's text?

    PERMILLE_MODELS=DIR PERMILLE_DATA=DIR python -m permille_lab.benchmarks.personalise

A speaker of Shakespeare's plays stands for a user. Each run goes through the agent as the command line does:
search, steps, judgement on a test split that nothing had looked at. The swap control judges each speaker's
state on another speaker's test split: what it gains there is the domain, only the rest is the person.

Writes personalisation.json after each run (a run that is in it is not made again) and personalisation.md at
the end.
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from permille.engines.factory import open_engine
from permille.engines.interface import Engine
from permille.package.reader import Package
from permille_agent.local.model import LocalModel, Variant
from permille_agent.state.activation import Active
from permille_agent.state.home import Home
from permille_agent.text.preparation import prepare
from permille_agent.text.reading import read_documents
from permille_agent.training.evaluation import document_losses, paired_bootstrap
from permille_agent.training.options import TrainOptions
from permille_agent.training.personal import model_values
from permille_agent.training.train import run_training
from permille_lab.benchmarks.model_packages import (
    Sources,
    installed_home,
    sources_from_environment,
    speaker_text,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model with its mask's density and the number of steps."""

    model: str
    density: float
    steps: int


CASES = (
    Case(model="stories260K-hf", density=0.01, steps=200),
    Case(model="reference-7M", density=0.001, steps=160),
)
SPEAKERS = ("GLOUCESTER", "DUKE VINCENTIO", "KING RICHARD II")
SEEDS = (0, 1, 2)


def _engine(package: Package) -> Engine:
    return open_engine(package, threads=1)


def measure(
    sources: Sources, case: Case, speaker: str, seed: int, packages: Path, folder: Path
) -> dict[str, Any]:
    """One person, one seed."""
    home = installed_home(folder, sources, case.model, packages, case.density)
    text = speaker_text(sources, speaker, folder)
    began = time.process_time()
    result = run_training(
        home,
        data_paths=[text],
        steps=case.steps,
        minutes=None,
        seed=seed,
        share_log=False,
        engine_of=_engine,
    )
    decision, metrics, plan = (result.details[name] for name in ("decision", "metrics", "plan"))
    # A run whose steps never beat the base on the select split is not judged: its state is the base.
    against = decision.get("against_base") or {
        "improvement": 0.0,
        "standard_error": None,
        "low": 0,
        "high": 0,
    }
    error = against["standard_error"]
    other = SPEAKERS[(SPEAKERS.index(speaker) + 1) % len(SPEAKERS)]
    return {
        "model": case.model,
        "density": case.density,
        "k": metrics["k"],
        "speaker": speaker,
        "seed": seed,
        "steps": metrics["steps"],
        "outcome": result.outcome.value,
        "train_tokens": metrics["train_tokens"],
        "test_tokens": metrics["test_tokens"],
        "loss_base": decision["loss_base"],
        "loss_personal": decision.get("loss_personal", decision["loss_base"]),
        "improvement": against["improvement"],
        "standard_error": against["standard_error"],
        "low": against["low"],
        "high": against["high"],
        "standard_errors": against["improvement"] / error if error else 0.0,
        "estimator": "{estimator} {queries}".format(**plan["options"]),
        "epsilon": plan["epsilon"],
        "epsilon_relative_error": plan["epsilon_search"]["relative_error"],
        "learning_rate": metrics["learning_rate"],
        "log_bytes": metrics["log_bytes"],
        "peak_rss_bytes": metrics["peak_rss_bytes"],
        "cpu_seconds": round(time.process_time() - began, 1),
        "swap": _swap(sources, home, str(result.run), seed, other),
    }


def _swap(sources: Sources, home: Home, run: str, seed: int, other: str) -> dict[str, Any]:
    """The improvement that this run's state brings on another speaker's test split."""
    with tempfile.TemporaryDirectory() as name, LocalModel(home, _engine) as model:
        documents, _ = read_documents([speaker_text(sources, other, Path(name))])
        row_tokens = TrainOptions(steps=1).row_tokens
        prepared = prepare(documents, model.tokenizer, seed=seed, row_tokens=row_tokens)
        count = len(prepared.test_documents)
        active = Active(package=model.package.digest, run=run)
        values_K = model_values(home, active, model.package)
        base = document_losses(model.engine, model.values(Variant.BASE), prepared.test, count)
        swapped = document_losses(model.engine, values_K, prepared.test, count)
    found = paired_bootstrap(base.nats_D, swapped.nats_D, base.tokens_D, seed=0)
    return {"speaker": other, "improvement": found.improvement, "standard_error": found.standard_error}


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as markdown."""
    lines = [
        "# Personalisation of real models",
        "",
        "Made by `python -m permille_lab.benchmarks.personalise`; the numbers are in",
        "`personalisation.json`. Defaults of `permille-agent train`; the estimator and its queries are those",
        "that were the default when the row was made. One thread, float32; loss in nats per token on the",
        "test split, which neither steps nor selection had looked at. SE: standard error of the",
        "paired bootstrap over documents. Swap: what the same state gains on another speaker's test split.",
        "",
        "| model | k | estimator | speaker | seed | steps | base | personal | fall | in SE | swap "
        "| log bytes |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['model']} | {row['k']} | {row['estimator']} | {row['speaker']} | {row['seed']} "
            f"| {row['steps']} | {row['loss_base']:.3f} | {row['loss_personal']:.3f} "
            f"| {row['improvement']:.3f} "
            f"| {row['standard_errors']:.1f} | {row['swap']['improvement']:.3f} | {row['log_bytes']} |"
        )
    passed = sum(row["standard_errors"] > 3 for row in rows)
    lines += ["", f"{passed} of {len(rows)} runs fall by more than 3 standard errors."]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Make what is missing; the exit code says whether every run fell by more than 3 standard errors."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument("--model", choices=[case.model for case in CASES], help="only this one")
    parser.add_argument("--speaker", choices=SPEAKERS, help="only this one")
    arguments = parser.parse_args()
    sources = sources_from_environment()
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "personalisation.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    known = {(row["model"], row["speaker"], row["seed"]) for row in rows}
    with tempfile.TemporaryDirectory() as name:
        for case in CASES:
            for seed in SEEDS:
                for speaker in SPEAKERS:
                    wanted = arguments.model in (None, case.model) and arguments.speaker in (None, speaker)
                    if not wanted or (case.model, speaker, seed) in known:
                        continue
                    folder = Path(name) / f"{case.model}-{speaker.replace(' ', '-')}-{seed}"
                    rows.append(measure(sources, case, speaker, seed, Path(name) / "packages", folder))
                    path.write_text(json.dumps(rows, indent=1) + "\n")
                    sys.stderr.write(f"{json.dumps(rows[-1])}\n")
    (arguments.out / "personalisation.md").write_text(table(rows))
    return 0 if all(row["standard_errors"] > 3 for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

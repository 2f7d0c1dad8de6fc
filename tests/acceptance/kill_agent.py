"""Kill `train` with SIGKILL at random moments, cut its journal at random bytes, and start it again.

    python -m tests.acceptance.kill_agent --kills 50 --cuts 50

The result must be that of a run without kills, bit by bit: plan, evaluations, journal or state, decision,
active model, and exactly one report. New runs start until the numbers of kills and cuts are reached.

The moments are drawn from a seed, over the whole life of a process: loading, search, steps, evaluation,
judgement, adoption, report. Journals are cut if the run was killed during its steps, at any byte behind the
header.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from permille.package.blobs import BlobFolder
from permille.schemas.runs import LogForm
from permille.zo.journal import encode_header, parse_journal
from permille_agent.link.report import read_reports
from permille_agent.state.home import Home, as_json
from permille_agent.state.models import active_model, history
from permille_agent.training.decision import Decision
from permille_agent.training.personal import shareable
from permille_agent.training.plan import Plan
from permille_agent.training.run import list_runs
from tests.preloaded import Process, run
from tests.unit.edge_agent.runs import home_with_package, user_text

Command = Callable[[Home, Path], Sequence[str]]

# Result files in the order in which a run makes them. The last existing file shows the phase of a run.
PHASES = (
    ("run.json", "search"),
    ("plan.json", "steps"),
    ("losses-base.json", "judgement"),
    ("decision.json", "adoption"),
    ("outcome.json", "report"),
)


@dataclass(slots=True)
class KillReport:
    """The kills, their phases, and the differences from the run without kills."""

    kills: int = 0
    cuts: int = 0
    runs: int = 0
    by_phase: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)


def torch_command(home: Home, text: Path) -> list[str]:
    """Return the command of the agent with its own engine."""
    command = [sys.executable, "-m", "permille_agent", "--home", str(home.root), "train", str(text)]
    return [*command, "--steps", "12", "--threads", "1", "--share-log", "--json"]


def bigram_command(home: Home, text: Path) -> list[str]:
    """Return the command of a run with the bigram engine that shares its log."""
    return [sys.executable, "-m", "tests.bigram_agent", str(home.root), str(text), "40", "64"]


def private_command(home: Home, text: Path) -> list[str]:
    """Return the command of a run with the bigram engine that follows the gradient and has no log."""
    return [sys.executable, "-m", "tests.bigram_agent", str(home.root), str(text), "40", "0"]


def kill_runs(folder: Path, command: Command, *, kills: int, cuts: int = 0, seed: int) -> KillReport:
    """Kill the runs of `command` and cut their journals. Compare the results with a run without kills."""
    rng = random.Random(seed)
    text = user_text(folder)
    expected_home, _ = home_with_package(folder / "whole")
    began = time.monotonic()
    assert run(command(expected_home, text)).returncode == 0
    whole_s = time.monotonic() - began
    expected = end_of(expected_home)
    report = KillReport()
    while report.kills < kills or report.cuts < cuts:
        home, _ = home_with_package(folder / f"killed-{report.runs}")
        while report.kills < kills or report.cuts < cuts:
            if not _killed(command(home, text), rng.uniform(0.0, 1.1 * whole_s)):
                break
            report.kills += 1
            report.by_phase[_phase(home)] += 1
            if report.cuts < cuts and _phase(home) == "steps":
                report.cuts += _cut(home, rng)
        assert run(command(home, text)).returncode == 0
        report.runs += 1
        differing = [name for name, value in end_of(home).items() if expected[name] != value]
        report.differences += [f"run {report.runs}: {name}" for name in differing]
    return report


def _cut(home: Home, rng: random.Random) -> bool:
    """Cut the newest journal of the run at a random byte behind its header. Return False if it is empty."""
    (run,) = list_runs(home)
    paths = sorted(run.path.glob("descent-*.journal"))
    if not paths:
        return False
    data = paths[-1].read_bytes()
    header = len(encode_header(parse_journal(data, paths[-1]).header))
    if len(data) == header:
        return False
    os.truncate(paths[-1], rng.randrange(header, len(data)))
    return True


def end_of(home: Home) -> dict[str, str]:
    """Return all results of a run that must not depend on kills, by name."""
    (run,) = list_runs(home)
    decision = run.require("decision", Decision)
    (sent,) = read_reports(home)
    metrics = as_json(sent.metrics)
    clocked = ("seconds", "peak_rss_bytes", "began_at", "ended_at")
    unclocked = {name: metrics[name] for name in sorted(metrics) if name not in clocked}
    journal = run.journal(decision.descent)
    states = (run.path / "state.i64", run.best_state(decision.descent))
    return {
        "plan": repr(run.require("plan", Plan)),
        "evaluations": repr([(at.step, at.loss) for at in run.evaluations(decision.descent)]),
        "journal": _digest(journal.read_bytes()) if journal.exists() else "",
        "log": _digest(shareable(run, LogForm.LOG, BlobFolder(home.blobs))) if journal.exists() else "",
        "state": "".join(_digest(path.read_bytes()) for path in states if path.exists()),
        "decision": repr(decision),
        "active": repr((active_model(home), history(home))),
        "report": json.dumps(unclocked, sort_keys=True),
    }


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _killed(command: Sequence[str], after_s: float) -> bool:
    """Start a command and kill it after some seconds. Return False if it ended earlier."""
    with Process(command, stdout=subprocess.DEVNULL) as process:
        try:
            code = process.wait(timeout=after_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            return True
    if code != 0:
        raise RuntimeError(f"expected exit code 0 of {' '.join(command)}, got {code}")
    return False


def _phase(home: Home) -> str:
    runs = list_runs(home)
    found = [phase for name, phase in PHASES if runs and (runs[0].path / name).exists()]
    return found[-1] if found else "start"


_COMMANDS = {"agent": torch_command, "shared": bigram_command, "private": private_command}


def main() -> int:
    """Print a report as JSON. Return 1 if a run ended differently."""
    parser = argparse.ArgumentParser(description="kill `train` at random moments, and compare its ends")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--cuts", type=int, default=0, help="of journals, among the kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", choices=_COMMANDS, default="agent", help="what is killed")
    arguments = parser.parse_args()
    command = _COMMANDS[arguments.run]
    with tempfile.TemporaryDirectory() as folder:
        report = kill_runs(
            Path(folder), command, kills=arguments.kills, cuts=arguments.cuts, seed=arguments.seed
        )
    document = {
        "run": arguments.run,
        "kills": report.kills,
        "cuts": report.cuts,
        "runs": report.runs,
        "kills_by_phase": dict(sorted(report.by_phase.items())),
        "differences": report.differences,
    }
    sys.stdout.write(json.dumps(document, indent=2) + "\n")
    return 1 if report.differences else 0


if __name__ == "__main__":
    sys.exit(main())

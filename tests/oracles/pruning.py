"""Compare our pruning with llm-compressor's: `make oracle-pruning`.

Print a line for each model, method and pattern: the share of weights on whose zeros both agree, and the
linear with the least share. The line ends with the distance between the weights that both keep. The exit code
is 1 if a share is below 99.9 % at one half or 2:4. docs/results/pruning.md says where they differ, and why
4:8 is only printed.
"""

import itertools
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from permille.corpora.sequences import token_sequences
from permille.corpora.sources import ReadReport, file_texts
from permille.errors import InputError
from permille.models.checkpoint import Checkpoint
from permille.models.loading import FileTokenizer
from permille_sparsify.plan import Pattern, PruningMethod, PruningPlan
from permille_sparsify.streaming import PruningText, prune_model

_REFERENCE = Path(__file__).with_name("llm_compressor.py")
_TEXT = Path("examples/corpus.jsonl.gz")
_LEAST = 0.999
_ROWS, _LENGTH = 32, 256


def main(python: str, models: list[str]) -> int:
    """Compare all, and print a line for each. Return the exit code."""
    worst = 1.0
    methods = (PruningMethod.WANDA, PruningMethod.SPARSEGPT)
    for model, method, pattern in itertools.product(models, methods, (None, "2:4", "4:8")):
        plan = PruningPlan(method=method, rates=0.5, pattern=Pattern.parse(pattern) if pattern else None)
        try:
            plan.check(Checkpoint(Path(model)).config)
        except InputError as exc:
            print(f"{Path(model).name} {method} {pattern}: left out, {exc}")
            continue
        with tempfile.TemporaryDirectory() as folder:
            same, line = compare(python, Path(model), plan, Path(folder))
        print(f"{Path(model).name} {method} {pattern or 'half of each row'}: {line}", flush=True)
        worst = min(worst, same) if pattern != "4:8" else worst
    print(f"least {worst:.5%}, expected {_LEAST:.1%}")
    return int(worst < _LEAST)


def compare(python: str, model: Path, plan: PruningPlan, work: Path) -> tuple[float, str]:
    """Return the share of places where both agree, and a line with details."""
    rows_NT = token_sequences(FileTokenizer(model), file_texts(_TEXT, ReadReport()), _ROWS, _LENGTH, 0)
    np.save(work / "rows.npy", rows_NT)
    command = [
        str(Path(python).absolute()),  # Do not resolve this link: its place selects the environment.
        str(_REFERENCE),
        str(model.resolve()),
        str(work / "rows.npy"),
        plan.method,
        str(plan.pattern).lower(),
    ]
    done = subprocess.run([*command, str(work / "other.npz")], capture_output=True, text=True, cwd=work)
    if done.returncode:
        raise SystemExit(f"llm-compressor failed: {done.stderr[-2000:]}")
    source = Checkpoint(model)
    prune_model(source, work / "ours", PruningText(calibration_NT=rows_NT), plan)
    ours, other = Checkpoint(work / "ours"), np.load(work / "other.npz")
    weights = {name: (ours.float32(name), other[name]) for name in other.files}
    agree = {name: float(((mine == 0) == (its == 0)).mean()) for name, (mine, its) in weights.items()}
    sizes = {name: mine.size for name, (mine, _) in weights.items()}
    same = sum(agree[name] * sizes[name] for name in agree) / sum(sizes.values())
    least = min(agree, key=agree.__getitem__)
    return same, (
        f"{same:.4%} of {sum(sizes.values())} places, least {agree[least]:.4%} in {least}, "
        f"zeros {_zeros(weights, 0):.4%} and {_zeros(weights, 1):.4%}, "
        f"weights that both keep {_apart(weights):.1e} apart"
    )


Weights = dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]]


def _zeros(weights: Weights, which: int) -> float:
    return sum(int((pair[which] == 0).sum()) for pair in weights.values()) / sum(
        pair[which].size for pair in weights.values()
    )


def _apart(weights: Weights) -> float:
    """Return the relative distance over all weights that neither sets to zero."""
    squared = total = 0.0
    for mine, its in weights.values():
        both = (mine != 0) & (its != 0)
        squared += float(np.square(mine[both] - its[both], dtype=np.float64).sum())
        total += float(np.square(its[both], dtype=np.float64).sum())
    return float(np.sqrt(squared / total))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], sys.argv[2:]))

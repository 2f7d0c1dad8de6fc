"""Does a learned basis hold across users, domains and models, and how far is it from first-order training?

    PERMILLE_MODELS=DIR PERMILLE_DATA=DIR python -m permille_lab.benchmarks.learned_directions [--model NAME] [--report]

The mask is chosen on C4. Every setting makes the same steps on the same batches of a user's text: 8 queries a
step, exact directional derivatives (what forward mode gives; here `grad . z` by one backward pass), constant
step size, equal trials of it, the best by the user's select rows, the loss on the user's test rows. Nothing
is learned from any evaluated user's text. One thread, float32.

Settings. `plain`: random signs. `fisher p`: random signs times the powers of two near F^p. The others move
along `U b`, b random signs, U of 32 columns: learned from C4, from other users of the same domain or of the
other one, whitened unless it says so; `then plain`: plain after 50 steps. `start`: from values that Adam has
first trained on the domain's texts that the basis is learned from, then plain, or along a basis learned
there. `adam`: first order, on the same weights and batches.

Each run is a row of learned_directions.json and is not made again; learned_directions.md is made of what
there is.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from permille.files import write_atomic
from permille.sensitivity.basis import captured, learn_basis, whitening
from permille.sensitivity.scores import fisher_exponents
from permille_lab.benchmarks.learned_directions_page import page
from permille_lab.benchmarks.masked_model import MaskedModel, domain_of, learning_texts, user_texts
from permille_lab.benchmarks.model_packages import Sources, sources_from_environment

CHECKPOINTS = (10, 25, 50, 100, 200, 400)
QUERIES, BATCH_ROWS, RANK, LEARNING_ROWS, SWITCH = 8, 4, 32, 128, 50
START_STEPS, START_ROWS = 100, 8
USERS = ("GLOUCESTER", "61899", "KING RICHARD II", "61847", "DUKE VINCENTIO")
SETTINGS = (
    "plain",
    "domain",
    "adam",
    "c4",
    "other domain",
    "start, plain",
    "start, domain",
    "domain, then plain",
    "domain, not whitened",
    "fisher -1/4",
    "fisher +1/4",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, its mask, how long to run, and the lengths of a first step that are tried."""

    model: str
    density: float
    steps: int
    lengths: tuple[float, ...]


_SMALL, _REFERENCE = (0.1, 0.3, 0.9), (0.6, 1.8, 5.4)
CASES = (
    Case(model="stories260K-hf", density=0.01, steps=100, lengths=_SMALL),
    Case(model="reference-7M", density=0.001, steps=100, lengths=_REFERENCE),
    Case(model="stories260K-hf", density=0.01, steps=400, lengths=_SMALL),
    Case(model="reference-7M", density=0.001, steps=400, lengths=_REFERENCE),
)


class Directions:
    """Draws z [q, k]: `columns` None draws signs for each weight, else signs for each column."""

    def __init__(self, k: int, columns: NDArray[np.int8] | None = None, scale_K: Any = 1.0) -> None:
        self._k = k
        self._columns = None if columns is None else columns.astype(np.float32)
        self._scale_K = np.float32(1) * scale_K

    def draw(self, rng: np.random.Generator, queries: int) -> Tensor:
        """`queries` directions."""
        width = self._k if self._columns is None else self._columns.shape[1]
        signs = (rng.integers(0, 2, (queries, width)) * 2 - 1).astype(np.float32)
        z_QK = signs if self._columns is None else signs @ self._columns.T
        return torch.from_numpy(np.asarray(z_QK * self._scale_K, np.float32))


class Laboratory:
    """One model with what is learned on it for each source, made when first asked for."""

    def __init__(self, sources: Sources, case: Case) -> None:
        self.masked = MaskedModel(sources, case.model, case.density)
        self._texts = learning_texts(sources, USERS)
        self._gradients: dict[str, NDArray[np.float32]] = {}
        self._starts: dict[str, Tensor] = {}

    def gradients(self, source: str, *, at_start: bool = False) -> NDArray[np.float32]:
        """A gradient a row of the source, at the model's own values or at the start of that domain."""
        name = f"{source} start" if at_start else source
        if name not in self._gradients:
            values_K = self.start(source) if at_start else self.masked.base_K
            rows = self.masked.rows(self._texts[source], LEARNING_ROWS)
            self._gradients[name] = self.masked.row_gradients(values_K, rows)
        return self._gradients[name]

    def start(self, source: str) -> Tensor:
        """Values after Adam on the rows that a basis of this source is learned from."""
        if source not in self._starts:
            rows = self.masked.rows(self._texts[source], LEARNING_ROWS)
            length = 0.3 if self.masked.k < 5000 else 0.6
            stepper = Adam(self.masked.k, length)
            rng, values_K = np.random.default_rng(0), self.masked.base_K.clone()
            for _ in range(START_STEPS):
                batch = rows[rng.choice(len(rows), START_ROWS, replace=False)]
                values_K = values_K - stepper.step(self.masked.gradient(values_K, batch))
            self._starts[source] = values_K
        return self._starts[source]

    @cached_property
    def plain(self) -> Directions:
        """Signs for each weight."""
        return Directions(self.masked.k)

    def directions(self, setting: str, domain: str) -> Directions:
        """What a setting moves along."""
        other = "tweets" if domain == "shakespeare" else "shakespeare"
        if setting in ("plain", "start, plain"):
            return self.plain
        if setting.startswith("fisher"):
            power = {"fisher -1/4": -0.25, "fisher +1/4": 0.25}[setting]
            return Directions(self.masked.k, scale_K=2.0 ** fisher_exponents(self.masked.scores_K, power))
        if setting == "start, domain":
            return Directions(self.masked.k, learn_basis(self.gradients(domain, at_start=True), RANK))
        source = {"c4": "c4", "other domain": other}.get(setting, domain)
        power = 0.0 if setting.endswith("not whitened") else -0.5
        return Directions(self.masked.k, learn_basis(self.gradients(source), RANK, power=power))


class Adam:
    """Steps of about `length` at the beginning: length / sqrt(k) a weight."""

    def __init__(self, k: int, length: float) -> None:
        self._rate, self._step = length / k**0.5, 0
        self._mean_K, self._square_K = torch.zeros(k), torch.zeros(k)

    def step(self, gradient_K: Tensor) -> Tensor:
        """What to subtract (betas 0.9 and 0.99)."""
        self._step += 1
        self._mean_K = 0.9 * self._mean_K + 0.1 * gradient_K
        self._square_K = 0.99 * self._square_K + 0.01 * gradient_K**2
        root_K = torch.sqrt(self._square_K / (1 - 0.99**self._step)) + 1e-8
        change_K: Tensor = self._rate * self._mean_K / (1 - 0.9**self._step) / root_K
        return change_K


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """A user's rows: steps read `train`, the step size is chosen on `select`, `test` is reported."""

    name: str
    domain: str
    train: NDArray[np.int64]
    select: NDArray[np.int64]
    test: NDArray[np.int64]


def user_of(sources: Sources, masked: MaskedModel, name: str) -> User:
    """A third of the rows, at most 32, to test, a sixth, at most 16, to select; the rest to train."""
    domain = domain_of(sources, name)
    rows = masked.rows(user_texts(sources, domain)[name], 400)
    test, select = min(32, len(rows) // 3), min(16, len(rows) // 6)
    parts = np.split(rows, [test, test + select])
    return User(name=name, domain=domain, test=parts[0], select=parts[1], train=parts[2])


def measure(lab: Laboratory, case: Case, user: User, setting: str, length: float) -> dict[str, Any]:
    """One run: losses on select and test rows at each checkpoint; null once they are not finite."""
    masked = lab.masked
    began = time.process_time()
    values_K = (lab.start(user.domain) if setting.startswith("start") else masked.base_K).clone()
    losses = [(0, masked.loss(values_K, user.select), masked.loss(values_K, user.test))]
    adam = Adam(masked.k, length) if setting == "adam" else None
    along = lab.plain if adam else lab.directions(setting, user.domain)
    batches, rng, rate = np.random.default_rng([0, 1]), np.random.default_rng([0, 2]), 0.0
    for step in range(case.steps):
        rows = user.train[batches.choice(len(user.train), BATCH_ROWS, replace=False)]
        gradient_K = masked.gradient(values_K, rows)
        if not torch.isfinite(gradient_K).all():
            break
        if setting.endswith("then plain") and step == SWITCH:
            along, rate = lab.plain, 0.0
        if adam is not None:
            values_K = values_K - adam.step(gradient_K)
        else:
            rate = rate or first_rate(along, gradient_K, length)
            z_QK = along.draw(rng, QUERIES)
            values_K = values_K - rate / QUERIES * (z_QK @ gradient_K) @ z_QK
        if step + 1 in CHECKPOINTS:
            losses.append((step + 1, masked.loss(values_K, user.select), masked.loss(values_K, user.test)))
    return {
        "model": case.model,
        "density": case.density,
        "k": masked.k,
        "steps": case.steps,
        "user": user.name,
        "domain": user.domain,
        "setting": setting,
        "length": length,
        "losses": [[step, _finite(select), _finite(test)] for step, select, test in losses],
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def first_rate(along: Directions, gradient_K: Tensor, length: float) -> float:
    """The learning rate with which a step of independent directions is `length` long."""
    z_QK = along.draw(np.random.default_rng([0, 3]), 64)
    slope = float((z_QK @ gradient_K).square().mean().sqrt() * z_QK.square().sum(dim=1).mean().sqrt())
    return length * float(QUERIES**0.5) / slope


def shares(lab: Laboratory, case: Case, user: User) -> dict[str, Any]:
    """Share of the user's mean gradient in each source's basis, whitened as it was learned, and plain."""
    mean_1K = lab.masked.row_gradients(lab.masked.base_K, user.train).mean(axis=0, keepdims=True)
    found = {}
    for source in ("c4", "shakespeare", "tweets"):
        rows_NK = lab.gradients(source)
        white_K, ones_K = whitening(rows_NK), np.ones(lab.masked.k)
        found[source] = {
            "whitened": [
                float(captured(learn_basis(rows_NK, r), mean_1K, white_K)[0]) for r in (1, 16, 32, 64)
            ],
            "plain": [
                float(captured(learn_basis(rows_NK, r, power=0), mean_1K, ones_K)[0]) for r in (1, 16, 32, 64)
            ],
        }
    return {"model": case.model, "k": lab.masked.k, "user": user.name, "domain": user.domain, "shares": found}


def _finite(number: float) -> float | None:
    return number if np.isfinite(number) else None


def _wanted(case: Case, known: set[tuple[Any, ...]]) -> Iterator[tuple[str, str, float]]:
    for user in USERS:
        for setting in SETTINGS:
            for length in case.lengths:
                if (case.model, case.steps, user, setting, length) not in known:
                    yield user, setting, length


def main() -> int:
    """Make what is missing, writing after each run; then the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("docs/results/learned_directions.json"))
    parser.add_argument("--model", choices=sorted({case.model for case in CASES}), help="only this one")
    parser.add_argument(
        "--steps", type=int, choices=sorted({case.steps for case in CASES}), help="only these"
    )
    parser.add_argument("--users", type=int, default=len(USERS), help="only the first so many")
    parser.add_argument("--report", action="store_true", help="only write the page from what there is")
    arguments = parser.parse_args()
    document: dict[str, Any] = {"shares": [], "runs": []}
    if arguments.out.exists():
        document = json.loads(arguments.out.read_text())
    torch.set_num_threads(1)
    for case in CASES:
        left_out = arguments.model not in (None, case.model) or arguments.steps not in (None, case.steps)
        if not (arguments.report or left_out):
            _make(case, document, arguments.out, USERS[: arguments.users])
    arguments.out.with_suffix(".md").write_text(page(document))
    return 0


def _make(case: Case, document: dict[str, Any], out: Path, users: tuple[str, ...]) -> None:
    runs = document["runs"]
    known = {(r["model"], r["steps"], r["user"], r["setting"], r["length"]) for r in runs}
    missing = [item for item in _wanted(case, known) if item[0] in users]
    if not missing:
        return
    sources = sources_from_environment()
    lab = Laboratory(sources, case)
    for name, setting, length in missing:
        user = user_of(sources, lab.masked, name)
        if not any(r["model"] == case.model and r["user"] == name for r in document["shares"]):
            document["shares"].append(shares(lab, case, user))
        runs.append(measure(lab, case, user, setting, length))
        write_atomic(out, (json.dumps(document, indent=1) + "\n").encode())
        sys.stderr.write(json.dumps(runs[-1]) + "\n")


if __name__ == "__main__":
    sys.exit(main())

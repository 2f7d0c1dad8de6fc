"""Train the reference model from scratch; kill it at any time and run the same command again to go on.

The step size is constant after a short warm-up, so the run may stop anywhere ("stable"). `--decay N` branches
from the newest stable checkpoint, brings the step size to zero over N steps and writes a Hugging Face folder;
the stable run can go on afterwards as if nothing had happened. With the same machine, thread count and torch,
a resumed run has the same bits as one that never stopped.

    python -m permille_lab.reference.train --corpus build/reference/corpus --run build/reference/run --minutes 80
    python -m permille_lab.reference.train --corpus build/reference/corpus --run build/reference/run --decay 400

`--begin-from MODEL` begins a new run with the weights of an exported model, after the windows that it read;
the optimizer starts anew, with a warm-up. So a released model can be trained on where its run is lost.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from permille.errors import InputError
from permille.files import write_atomic
from permille_lab.reference.export import export
from permille_lab.reference.model import Shape, initial, loss, rotation
from permille_lab.reference.muon import Optimizer
from permille_lab.reference.windows import Windows, grid


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """All that decides the bits of a run, beside the corpus, torch and the thread count."""

    seed: int = 0
    context: int = 256
    batch: int = 16
    micro: int = 4
    warmup: int = 40
    matrix_rate: float = 0.02
    rate: float = 3e-3
    embed_rate: float = 2e-2
    weight_decay: float = 0.05
    compute: str = "float32"
    """Of products and of Muon's iteration; weights, momenta and validation are float32. A GPU's products are
    bfloat16."""


COMPUTE = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Run:
    """A training run in a folder: `stable.pt`, `decay-<first>-<steps>.pt`, `log.jsonl`, `recipe.json`."""

    def __init__(self, corpus: Path, folder: Path, shape: Shape, recipe: Recipe, device: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.corpus, self.folder, self.device = corpus, folder, device
        self._kept = _kept(folder / "recipe.json", shape, recipe, corpus)
        self.shape, self.recipe = Shape(**self._kept["shape"]), Recipe(**self._kept["recipe"])
        mixture = json.loads((corpus / "manifest.json").read_text(encoding="utf-8"))["mixture"]
        self.windows = Windows(corpus, mixture, self.recipe.context, self.recipe.seed)
        self.parameters = initial(self.shape, self.recipe.seed, device)
        self.optimizer = Optimizer(
            self.parameters,
            matrix_rate=self.recipe.matrix_rate,
            rate=self.recipe.rate,
            embed_rate=self.recipe.embed_rate,
            decay=self.recipe.weight_decay,
            iteration=COMPUTE[self.recipe.compute],
        )
        self.turn = rotation(self.recipe.context, self.shape.head, device)
        self.steps = self.first = 0
        self.seconds = 0.0
        self.begun_from: dict[str, Any] | None = None

    def pin(self) -> None:
        """Write `recipe.json`: from here on the run has begun, with this shape and recipe."""
        write_atomic(self.folder / "recipe.json", (json.dumps(self._kept, indent=1) + "\n").encode())

    def begin_from(self, model: Path) -> None:
        """Take the weights of an exported model, and go on after what it read. The optimizer begins anew.

        Raises:
            InputError: it was not exported here, or is of another shape, text, seed, context or batch.
        """
        try:
            facts = json.loads((model / "recipe.json").read_text(encoding="utf-8"))
            told = {key: facts["recipe"][key] for key in ("seed", "context", "batch")}
            told["shape"] = facts["shape"]
            steps, seconds = int(facts["steps"]), float(facts["training_seconds"])
            manifest = (model / "manifest.json").read_bytes()
            weights = (model / "model.safetensors").read_bytes()
            found = {name: value.float() for name, value in load(weights).items()}
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as exc:
            raise InputError(f"expected a model that was exported here in {model}, got {exc!r}") from exc
        own = {key: getattr(self.recipe, key) for key in ("seed", "context", "batch")}
        own["shape"] = asdict(self.shape)
        if told != own:
            raise InputError(f"expected a model of {own}, got {told} in {model}")
        if manifest != (self.corpus / "manifest.json").read_bytes():
            raise InputError(
                f"expected a model of the texts in {self.corpus}, got another manifest in {model}"
            )
        if missing := [name for name in self.parameters if name not in found]:
            raise InputError(f"expected {missing[0]} in {model}, found {len(found)} other tensors")
        with torch.no_grad():
            for name, value in self.parameters.items():
                value.copy_(found[name])
        for step in range(steps):
            self.windows.skip(step, self.recipe.batch)
        self.steps = self.first = steps
        self.seconds = seconds
        self.begun_from = {"model_sha256": hashlib.sha256(weights).hexdigest(), "steps": steps}
        if "begun_from" in facts:
            self.begun_from["begun_from"] = facts["begun_from"]

    def check_begun_from(self, model: Path) -> None:
        """
        Raises:
            InputError: the run began otherwise, or there is no model.
        """
        begun = (self.begun_from or {}).get("model_sha256", "fresh weights")
        try:
            asked = hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()
        except OSError as exc:
            raise InputError(f"expected the model that the run began from in {model}, got {exc!r}") from exc
        if begun != asked:
            raise InputError(
                f"expected the run in {self.folder} to have begun from {model} ({asked[:12]}), it began from "
                f"{begun[:13]}: begin another run"
            )

    def load(self, path: Path) -> None:
        """Go on from a checkpoint."""
        state = torch.load(path, weights_only=True, map_location=self.device)
        with torch.no_grad():
            for name, value in state["parameters"].items():
                self.parameters[name].copy_(value)
            for name, value in state["optimizer"].items():
                self.optimizer.state[name].copy_(value)
        self.steps, self.first = state["steps"], state.get("first", 0)
        self.optimizer.steps = self.steps - self.first
        self.begun_from = state.get("begun_from")
        self.seconds = state["seconds"]
        self.windows.drawn = dict(state["drawn"])

    def save(self, path: Path) -> None:
        """Write a checkpoint: whole, or not at all."""
        state = {
            "parameters": {name: value.detach() for name, value in self.parameters.items()},
            "optimizer": self.optimizer.state,
            "steps": self.steps,
            "first": self.first,
            "begun_from": self.begun_from,
            "seconds": self.seconds,
            "drawn": self.windows.drawn,
        }
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)

    def step(self, scale: float) -> float:
        """One update with all step sizes times `scale`; the mean training loss of its windows."""
        begun = time.perf_counter()
        rows = torch.from_numpy(self.windows.batch(self.steps, self.recipe.batch)).to(self.device)
        total = 0.0
        for part in torch.split(rows, self.recipe.micro):
            value = self._loss(part) * (len(part) / len(rows))
            value.backward()  # type: ignore[no-untyped-call]
            total += float(value.detach())
        if not math.isfinite(total):
            raise InputError(
                f"expected a finite loss, got {total} at step {self.steps}: lower the step sizes"
            )
        self.optimizer.step(scale)
        self.steps += 1
        self.seconds += time.perf_counter() - begun
        return total

    def _loss(self, tokens: Tensor, *, exact: bool = False) -> Tensor:
        low = self.device == "cuda" or self.recipe.compute == "bfloat16"
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=low and not exact):
            return loss(self.parameters, self.shape, tokens, self.turn)

    @torch.no_grad()
    def validation(self, count: int = 64) -> float:
        """Mean loss over windows spread over the corpus's own validation text (never trained on)."""
        rows = grid(np.load(self.corpus / "validation.npy", mmap_mode="r"), self.recipe.context, count)
        parts = torch.split(torch.from_numpy(rows).to(self.device), self.recipe.micro)
        return sum(float(self._loss(part, exact=True)) * len(part) for part in parts) / len(rows)

    def note(self, phase: str, training: float | None, validation: float | None) -> None:
        """A line in `log.jsonl` and on the terminal; without a loss that was not computed (None)."""
        row: dict[str, Any] = {
            "phase": phase,
            "step": self.steps,
            "tokens": self.steps * self.recipe.batch * self.recipe.context,
            "seconds": round(self.seconds, 1),
        }
        losses = {"training_loss": training, "validation_loss": validation}
        row |= {name: round(loss, 4) for name, loss in losses.items() if loss is not None}
        line = json.dumps(row, allow_nan=False)
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        print(line, flush=True)


def train_stable(
    run: Run, *, steps: int | None, minutes: float | None, save_every: int, begin_from: Path | None = None
) -> None:
    """Constant step size until `steps` in all or `minutes` from now; goes on from the last checkpoint, and
    where there is none from an exported model."""
    path = run.folder / "stable.pt"
    if path.exists():
        run.load(path)
        if begin_from is not None:
            run.check_begun_from(begin_from)
    elif begin_from is not None:
        run.begin_from(begin_from)
    run.pin()
    end = None if minutes is None else time.monotonic() + 60 * minutes
    training: float | None = None
    while (steps is None or run.steps < steps) and (end is None or time.monotonic() < end):
        training = run.step(min(1.0, (run.steps - run.first + 1) / run.recipe.warmup))
        if run.steps % save_every == 0:
            run.save(path)
            run.note("stable", training, run.validation())
        elif run.steps % 10 == 0:
            run.note("stable", training, None)
    run.save(path)
    run.note("stable", training, run.validation())


def train_decay(run: Run, *, steps: int, save_every: int, out: Path | None) -> Path:
    """Bring the step size to zero over `steps` from the stable checkpoint, then export; resumes likewise."""
    stable = run.folder / "stable.pt"
    if not stable.exists():
        raise InputError(f"expected a stable checkpoint {stable}, found none: train without --decay first")
    run.load(stable)
    run.pin()
    first = run.steps
    path = run.folder / f"decay-{first}-{steps}.pt"
    if path.exists():
        run.load(path)
    training: float | None = None
    while run.steps < first + steps:
        training = run.step(1.0 - (run.steps - first) / steps)
        if run.steps % save_every == 0:
            run.save(path)
        if run.steps % 10 == 0:
            run.note("decay", training, None)
    run.save(path)
    validation = run.validation(10**9)
    run.note("decay", training, validation)
    folder = out or run.folder / f"model-{run.steps}"
    tokens = run.steps * run.recipe.batch * run.recipe.context
    facts = {
        "recipe": asdict(run.recipe),
        "shape": asdict(run.shape),
        "steps": run.steps,
        "decay_steps": steps,
        "tokens_seen": tokens,
        "training_seconds": round(run.seconds),
        "threads": torch.get_num_threads(),
        "validation_loss_nats_per_token": round(validation, 4),
    }
    if run.begun_from is not None:
        facts["begun_from"] = run.begun_from
    export(run.parameters, run.shape, run.corpus, folder, facts)
    return folder


def _kept(path: Path, shape: Shape, recipe: Recipe, corpus: Path) -> dict[str, Any]:
    """The run's shape and recipe: those it began with, whatever a later command says.

    Raises:
        InputError: the corpus is another one than the run began with.
    """
    manifest = hashlib.sha256((corpus / "manifest.json").read_bytes()).hexdigest()
    kept: dict[str, Any] = {"shape": asdict(shape), "recipe": asdict(recipe)}
    if path.exists():
        kept = json.loads(path.read_text(encoding="utf-8"))
    if kept.setdefault("corpus_manifest_sha256", manifest) != manifest:
        raise InputError(
            f"expected the corpus that the run began with, manifest {kept['corpus_manifest_sha256'][:12]}, "
            f"got {manifest[:12]} in {corpus}: begin another run"
        )
    return kept


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--steps", type=int, help="stop after this many stable steps in all")
    parser.add_argument("--minutes", type=float, help="stop after this time (checkpoint written)")
    parser.add_argument("--decay", type=int, metavar="N", help="branch: N steps down to zero, then export")
    parser.add_argument("--begin-from", type=Path, metavar="MODEL", help="a new run only: an exported model")
    parser.add_argument("--out", type=Path, help="where the decayed model goes (else in the run)")
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    for kind in (Shape, Recipe):
        for item in fields(kind):
            if item.name == "compute":
                parser.add_argument("--compute", choices=tuple(COMPUTE), default=item.default)
            elif item.name != "tied":
                flag = f"--{item.name.replace('_', '-')}"
                parser.add_argument(flag, type=type(item.default), default=item.default)
    return parser


def main() -> None:
    parser = _parser()
    args = parser.parse_args()
    if args.decay and args.begin_from:
        parser.error("--begin-from begins a stable run, --decay ends one: give one of them")
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(args.device == "cpu")
    shape = Shape(**{item.name: getattr(args, item.name) for item in fields(Shape) if item.name != "tied"})
    recipe = Recipe(**{item.name: getattr(args, item.name) for item in fields(Recipe)})
    run = Run(args.corpus, args.run, shape, recipe, args.device)
    if args.decay:
        print(train_decay(run, steps=args.decay, save_every=args.save_every, out=args.out))
    else:
        train_stable(
            run,
            steps=args.steps,
            minutes=args.minutes,
            save_every=args.save_every,
            begin_from=args.begin_from,
        )


if __name__ == "__main__":
    main()

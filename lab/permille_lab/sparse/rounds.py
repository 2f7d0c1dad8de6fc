"""Pruning and fine-tuning of a model in turns, each round to a higher rate (algorithm 1 of the paper).

    report = iterate(Checkpoint(source), folder, texts, IterativePlan(rate=0.6, method=PruningMethod.WANDA))

A round has these steps:

1. Take its rate from the cubic schedule, and the rates of the layers by CKA on the model as it is.
2. Prune, one decoder layer at a time.
3. Attach adapters whose sizes follow the loss from pruning.
4. Take steps along the gradient; the last round takes `longer` times as many.
5. Merge the adapters at kept places.

Each round has a folder whose `report.json` is written last. After a kill, the same call continues there. It
repeats at most a layer's pruning or `STEPS_A_CHECKPOINT` steps of `recover`, and ends with the same bits.

# Legend: N, M, E rows of calibration, recovery, evaluation; T tokens; D features; L decoder layers.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from permille.digests import canonical_json, digest_of
from permille.errors import InputError
from permille.files import write_atomic
from permille.models.checkpoint import Checkpoint
from permille.models.families import scoped_tensors, shape_of
from permille.models.layerwise import LayerStream
from permille.models.loading import load_model
from permille.pruning.plan import Pattern, PruningMethod, PruningPlan, RecoveryPlan
from permille.pruning.recovery import recover
from permille.pruning.streaming import (
    LinearReport,
    PruningText,
    check_not_pruned,
    copy_model,
    prune_model,
    write_weight,
)
from permille.quantization.perplexity import perplexity
from permille_lab.sparse.adapters import AdapterKind, allocate, attach, change_norms, merge
from permille_lab.sparse.rates import SPREAD, cubic_rate, importance, layer_rates, similarities

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CKA_TOKENS = 1024
"""Of the calibration text, evenly: similarities of layers are made of so many."""
_PRUNED = 0.3  # of a round's time
_REPORT, _PLAN = "report.json", "plan.json"

Progress = Callable[[float, str], None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IterativeText:
    """Token ids, int64: rows for pruning, for training adapters, and for judging the result."""

    calibration_NT: NDArray[np.int64]
    recovery_MT: NDArray[np.int64]
    evaluation_ET: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IterativePlan:
    """The plan of iterative pruning.

    Attributes:
        rate: the share of zeros at the end.
        rounds: 1 is one-shot pruning and one fine-tuning.
        rank: the adapters have as many numbers as LoRA's of this rank, in all.
        by_loss: if True, sizes of pooling adapters follow the loss from pruning; else they are equal.
        masked: if True, pruned places do not count while adapters train.
        spread: largest distance of a layer's rate from the mean; 0 makes them equal. A pattern's always are.
        beta: of `importance`; its sign alone matters, and below 0 the rates are those of (21) as printed.
        recovery: the steps of a round; `seed` is of the first one.
        l2: weight of the squared trained numbers in the loss, halved (norm control, 4.2).
        longer: factor on the number of steps of the last round.
        device: the device of torch's computations.
    """

    rate: float
    method: PruningMethod = PruningMethod.WANDA
    pattern: Pattern | None = None
    rounds: int = 10
    adapter: AdapterKind = AdapterKind.POOLING
    rank: int = 8
    by_loss: bool = True
    masked: bool = True
    spread: float = SPREAD
    beta: float = 1.0
    recovery: RecoveryPlan
    l2: float = 0.0
    longer: int = 4
    device: str = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport:
    """One round. Losses are nats per token of the evaluation rows; None without any.

    Attributes:
        rates: by decoder layer.
        loss_before: at the beginning of the round.
        loss_pruned: before the fine-tuning.
        loss_dense: with dense adapters beside the weights, before merging; None where they are masked.
        loss_merged: at the end of the round.
        numbers: how many were trained.
        norms: of the adapters' changes at kept and at pruned places.
        linears: what pruning lost; none where the round's rate left nothing to prune.
    """

    rate: float
    rates: tuple[float, ...]
    loss_before: float | None
    loss_pruned: float | None
    loss_dense: float | None
    loss_merged: float | None
    numbers: int
    norms: tuple[float, float]
    linears: tuple[LinearReport, ...]


def iterate(
    source: Checkpoint,
    folder: Path,
    text: IterativeText,
    plan: IterativePlan,
    *,
    progress: Progress = lambda _share, _note: None,
) -> tuple[Path, list[RoundReport]]:
    """Make the sparse model below `folder`. Returns its folder, and a report for each round.

    Results of an earlier call with the same arguments are used. Anything else in `folder` is deleted.

    Raises:
        InputError: as `PruningPlan.check` and `recover`, no round or rank, or a source as sparse already.
        OSError: as the file system reports it.
    """
    if plan.rounds < 1 or plan.rank < 1 or plan.longer < 1:
        raise InputError(
            "expected at least 1 round, rank and turn of the last, got "
            f"{plan.rounds}, {plan.rank} and {plan.longer}"
        )
    final = PruningPlan(method=plan.method, rates=plan.rate, pattern=plan.pattern, device=plan.device)
    final.check(source.config)
    check_not_pruned(source, final)
    _prepare(source, folder, text, plan)
    reports: list[RoundReport] = []
    model, base = source, 0.0
    for number in range(1, plan.rounds + 1):
        place = folder / f"round-{number}"
        share = _share_of_steps(plan, number)

        def report(
            done: float, note: str, start: float = base, part: float = share, at: int = number
        ) -> None:
            progress(start + part * done, f"round {at}/{plan.rounds}: {note}")

        if not (place / _REPORT).exists():
            before = reports[-1].loss_merged if reports else _loss(_loaded(source, plan), text)
            found = _Round(model, place, text, plan, number).run(before, report)
            write_atomic(place / _REPORT, json.dumps(asdict(found)).encode())
            for done in ("pruned", "resume"):
                shutil.rmtree(place / done, ignore_errors=True)
        reports.append(_read(place / _REPORT))
        base += share
        if number > 1:
            shutil.rmtree(folder / f"round-{number - 1}" / "model", ignore_errors=True)
        if number == plan.rounds or not (folder / f"round-{number + 1}" / _REPORT).exists():
            model = Checkpoint(place / "model")
    return model.folder, reports


class _Round:
    """The state of one round."""

    def __init__(
        self, source: Checkpoint, folder: Path, text: IterativeText, plan: IterativePlan, number: int
    ) -> None:
        self.source, self.folder, self.text, self.plan, self.number = source, folder, text, plan, number
        self.rate = cubic_rate(plan.rate, number, plan.rounds)
        folder.mkdir(exist_ok=True)

    def run(self, loss_before: float | None, progress: Progress) -> RoundReport:
        """Prune, fine-tune, merge, judge."""
        rates = self._rates()
        linears = self._prune(rates, lambda done, of: progress(_PRUNED * done / of, f"layer {done}/{of}"))
        pruned = Checkpoint(self.folder / "pruned")
        model = _loaded(pruned, self.plan)
        loss_pruned = _loss(model, self.text)
        sizes = self._sizes(linears)
        trained = attach(
            model, sizes, self.plan.adapter, masked=self.plan.masked, seed=self.plan.recovery.seed
        )
        for parameter in trained if self.plan.l2 else ():
            parameter.register_hook(partial(_pulled, parameter, self.plan.l2))  # type: ignore[no-untyped-call]
        steps = self.plan.recovery.steps * (self.plan.longer if self.number == self.plan.rounds else 1)
        recover(
            model,
            trained,
            self.text.recovery_MT,
            replace(self.plan.recovery, steps=steps, seed=self.plan.recovery.seed + self.number - 1),
            checkpoint=self.folder / "steps.npz",
            progress=lambda done, of: progress(_PRUNED + (0.98 - _PRUNED) * done / of, f"step {done}/{of}"),
        )
        loss_dense = None if self.plan.masked else _loss(model, self.text)
        norms = change_norms(model)
        numbers = sum(parameter.numel() for parameter in trained)
        merge(model)
        target = self.folder / "model"
        copy_model(pruned, target)
        for name in sizes:
            write_weight(pruned, target, name, model.get_parameter(name).detach(), updated=True)
        loss_merged = _loss(_loaded(Checkpoint(target), self.plan), self.text)
        return RoundReport(
            rate=self.rate,
            rates=tuple(rates),
            loss_before=loss_before,
            loss_pruned=loss_pruned,
            loss_dense=loss_dense,
            loss_merged=loss_merged,
            numbers=numbers,
            norms=norms,
            linears=linears,
        )

    def _rates(self) -> list[float]:
        """Return the layers' rates. They are kept, since a pruned layer's inputs change."""
        path = self.folder / "rates.json"
        if not path.exists():
            weights_L = np.array(
                [sum(sizes) for sizes in self._by_layer(lambda name: _size(self.source, name))]
            )
            zeros_L = np.array(
                [sum(zeros) for zeros in self._by_layer(lambda name: _zeros(self.source, name))]
            )
            spread = 0.0 if self.plan.pattern else self.plan.spread
            worth_L = np.ones(len(weights_L))
            if spread:
                features = layer_features(self.source, self.text.calibration_NT, self.plan.device)
                worth_L = importance(similarities(features), self.plan.beta)
            rates_L = layer_rates(worth_L, weights_L, self.rate, zeros_L / weights_L, spread=spread)
            write_atomic(path, json.dumps(rates_L.tolist()).encode())
        rates: list[float] = json.loads(path.read_bytes())
        return rates

    def _by_layer(self, count: Callable[[str], int]) -> list[list[int]]:
        layers = range(shape_of(self.source.config).layers)
        return [
            [count(name) for name, _ in scoped_tensors(self.source.config, f"layers:{layer}")]
            for layer in layers
        ]

    def _prune(self, rates: list[float], progress: Callable[[int, int], None]) -> tuple[LinearReport, ...]:
        plan = PruningPlan(
            method=self.plan.method,
            rates=dict(enumerate(rates)),
            pattern=self.plan.pattern,
            device=self.plan.device,
        )
        target = self.folder / "pruned"
        try:
            check_not_pruned(self.source, plan)
        except InputError:  # late rounds of a narrow model differ by less than a weight a row
            copy_model(self.source, target)
            return ()
        text = PruningText(calibration_NT=self.text.calibration_NT)
        return prune_model(
            self.source, target, text, plan, resume=self.folder / "resume", progress=progress
        ).linears

    def _sizes(self, linears: tuple[LinearReport, ...]) -> dict[str, int]:
        """Return the rank or the groups of each linear's adapter."""
        shapes = dict(scoped_tensors(self.source.config))
        if self.plan.adapter is AdapterKind.LORA:
            return {name: min(self.plan.rank, *shape) for name, shape in shapes.items()}
        losses = dict.fromkeys(shapes, 1.0)
        if self.plan.by_loss and linears:
            losses = {row.name: row.error / row.norm if row.norm else 0.0 for row in linears}
        average = self.plan.rank * sum(map(sum, shapes.values())) / len(shapes)
        return allocate(losses, shapes, average)


def _pulled(parameter: torch.nn.Parameter, l2: float, gradient: torch.Tensor) -> torch.Tensor:
    """Add the gradient of the squares. The rows of a step go through the model in one pass here."""
    return gradient.add(parameter.detach(), alpha=l2)


def layer_features(source: Checkpoint, rows_NT: NDArray[np.int64], device: str) -> list[NDArray[np.float32]]:
    """Return hidden states behind each decoder layer at some tokens, float32 [at most CKA_TOKENS, D] each."""
    taken = np.unique(np.linspace(0, rows_NT.size - 1, min(CKA_TOKENS, rows_NT.size)).astype(np.int64))
    stream = LayerStream(source, device=device)
    found = []
    with torch.no_grad():
        with stream.ends() as ends:
            hidden = [ends.embed(torch.from_numpy(tokens_T)[None]) for tokens_T in rows_NT]
        for index in range(stream.layers):
            with stream.layer(index) as layer:
                hidden = [layer(row) for row in hidden]
            states = torch.cat([row[0] for row in hidden]).float().cpu().numpy()
            found.append(states[taken].copy())
    return found


def _prepare(source: Checkpoint, folder: Path, text: IterativeText, plan: IterativePlan) -> None:
    """Delete files of another plan, source or text."""
    rows = [each for each in (text.calibration_NT, text.recovery_MT, text.evaluation_ET) if each is not None]
    about = {
        "source": source.digest(),
        "rows": [digest_of(repr(each.shape).encode() + each.astype("<i8").tobytes()) for each in rows],
        "plan": repr(plan),
    }
    name = canonical_json(about)
    path = folder / _PLAN
    if path.exists() and path.read_bytes() == name:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_atomic(path, name)


def _loaded(model: Checkpoint, plan: IterativePlan) -> "PreTrainedModel":
    loaded: PreTrainedModel = load_model(model.folder).to(plan.device)
    return loaded


def _loss(model: "PreTrainedModel", text: IterativeText) -> float | None:
    return None if text.evaluation_ET is None else perplexity(model, text.evaluation_ET)["loss"]


def _share_of_steps(plan: IterativePlan, number: int) -> float:
    return (plan.longer if number == plan.rounds else 1) / (plan.rounds - 1 + plan.longer)


def _read(path: Path) -> RoundReport:
    found = json.loads(path.read_bytes())
    linears = tuple(LinearReport(**row) for row in found.pop("linears"))
    return RoundReport(
        **found | {"rates": tuple(found["rates"]), "norms": tuple(found["norms"]), "linears": linears}
    )


def _size(source: Checkpoint, name: str) -> int:
    rows, columns = source.shape(name)
    return rows * columns


def _zeros(source: Checkpoint, name: str) -> int:
    return int(np.count_nonzero(source.float32(name) == 0))

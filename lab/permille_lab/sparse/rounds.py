"""Pruning and fine-tuning of a model in rounds with rising rates (algorithm 1 of the paper).

    report = iterate(Checkpoint(source), folder, texts, IterativePlan(rate=0.6, method=PruningMethod.WANDA))

A round has these steps:

1. Take the round's rate from the cubic schedule. Distribute it over the layers by CKA of the current model.
2. Prune, one decoder layer at a time.
3. Attach adapters. Their sizes follow the loss from pruning.
4. Train the adapters by gradients. The last round takes `longer` times as many steps.
5. Merge the adapters at kept weights.

Each round has a folder. Its `report.json` is written last. After a kill, the same call continues in the
unfinished round, and ends with the same bits. It repeats at most the pruning of one layer, or
`STEPS_A_CHECKPOINT` steps of `recover`.

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
from permille.quantization.perplexity import perplexity
from permille_lab.sparse.adapters import RecoveryAdapter, allocate, attach, change_norms, merge
from permille_lab.sparse.rates import SPREAD, cubic_rate, importance, layer_rates, similarities
from permille_sparsify.plan import Pattern, PruningMethod, PruningPlan, RecoveryPlan
from permille_sparsify.recovery import recover
from permille_sparsify.streaming import (
    LinearReport,
    PruningText,
    check_not_pruned,
    copy_model,
    prune_model,
    write_weight,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CKA_TOKENS = 1024
"""Number of tokens of the calibration text, evenly spaced, from which similarities of layers are computed."""
_PRUNED = 0.3  # share of a round's time that pruning takes, for the progress
_REPORT, _PLAN = "report.json", "plan.json"

Progress = Callable[[float, str], None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IterativeText:
    """Token ids, int64: rows for pruning, for the training of adapters, and for the losses of the reports."""

    calibration_NT: NDArray[np.int64]
    recovery_MT: NDArray[np.int64]
    evaluation_ET: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IterativePlan:
    """The plan of iterative pruning.

    Attributes:
        rate: share of zeros at the end.
        rounds: number of rounds. With 1, the model is pruned once and fine-tuned once.
        rank: sets the number of trained numbers: about as many as LoRA of this rank has for all linears.
        by_loss: if True, the sizes of pooling adapters follow the loss from pruning. Else they are equal.
        masked: if True, pruned weights stay 0 while adapters train.
        spread: largest difference of a layer's rate from the mean. It is ignored with a pattern, since then
            all rates are equal.
        beta: factor of `importance`. Only its sign matters. Below 0, rates are those of (21) as printed.
        recovery: plan of a round's training. `seed` is that of the first round.
        l2: norm control (4.2). `l2 / 2` times the sum of the squared trained numbers is added to the loss.
        longer: factor on the number of steps of the last round.
        device: torch device of the computations.
    """

    rate: float
    method: PruningMethod = PruningMethod.WANDA
    pattern: Pattern | None = None
    rounds: int = 10
    adapter: RecoveryAdapter = RecoveryAdapter.POOLING
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
    """The report of a round. Losses are nats per token of the evaluation rows, None if there are no rows.

    Attributes:
        rates: rate of each decoder layer.
        loss_before: loss at the start of the round.
        loss_pruned: loss after pruning, before the fine-tuning.
        loss_dense: loss with dense adapters before merging, None if the adapters are masked.
        loss_merged: loss at the end of the round.
        numbers: number of trained numbers.
        norms: norms of the adapters' changes at kept and at pruned weights.
        linears: report of each pruned linear. Empty if the round's rate left nothing to prune.
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
    """Make the sparse model below `folder`. Return the model's folder, and a report of each round.

    Results of an earlier call with the same arguments are reused. Otherwise the contents of `folder` are
    deleted.

    Raises:
        InputError: `PruningPlan.check` or `recover` refuses, `rounds`, `rank` or `longer` is below 1, or the
            source is as sparse already.
        OSError: the file system failed.
    """
    if plan.rounds < 1 or plan.rank < 1 or plan.longer < 1:
        raise InputError(
            "expected at least 1 round, a rank of at least 1 and `longer` of at least 1, got "
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
    """One round, with its source and folder."""

    def __init__(
        self, source: Checkpoint, folder: Path, text: IterativeText, plan: IterativePlan, number: int
    ) -> None:
        self.source, self.folder, self.text, self.plan, self.number = source, folder, text, plan, number
        self.rate = cubic_rate(plan.rate, number, plan.rounds)
        folder.mkdir(exist_ok=True)

    def run(self, loss_before: float | None, progress: Progress) -> RoundReport:
        """Prune, fine-tune, merge the adapters, and measure the losses."""
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
        """Return the layers' rates. They are stored, so that a continued round has the same ones."""
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
        except InputError:  # rates of late rounds may differ by less than one weight per row
            copy_model(self.source, target)
            return ()
        text = PruningText(calibration_NT=self.text.calibration_NT)
        return prune_model(
            self.source, target, text, plan, resume=self.folder / "resume", progress=progress
        ).linears

    def _sizes(self, linears: tuple[LinearReport, ...]) -> dict[str, int]:
        """Return the rank, or the number of groups, of each linear's adapter."""
        shapes = dict(scoped_tensors(self.source.config))
        if self.plan.adapter is RecoveryAdapter.LORA:
            return {name: min(self.plan.rank, *shape) for name, shape in shapes.items()}
        losses = dict.fromkeys(shapes, 1.0)
        if self.plan.by_loss and linears:
            losses = {row.name: row.error / row.norm if row.norm else 0.0 for row in linears}
        average = self.plan.rank * sum(map(sum, shapes.values())) / len(shapes)
        return allocate(losses, shapes, average)


def _pulled(parameter: torch.nn.Parameter, l2: float, gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient with that of the norm control added.

    The hook runs once for each backward pass. All rows of a step must therefore fit into one pass, of
    `TOKENS_A_PASS` tokens.
    """
    return gradient.add(parameter.detach(), alpha=l2)


def layer_features(source: Checkpoint, rows_NT: NDArray[np.int64], device: str) -> list[NDArray[np.float32]]:
    """Return each decoder layer's output at some tokens, float32 [at most CKA_TOKENS, D] each."""
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
    """Delete the files of another plan, source or text, and write this plan."""
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

"""Pruning of a model folder into another, with one decoder layer in memory at a time.

    report = prune_model(Checkpoint(source), target, PruningText(calibration_NT=rows), plan, resume=folder)

Wanda and SparseGPT need the inputs of a linear layer. To get these, calibration text goes through all earlier
decoder layers, which are already pruned. Then it goes through the linear's own decoder layer, which is not
yet pruned. The papers do the same (`PruningMethod`). The target has the same files as the source, with the
same headers. Only the weights of the pruned linear layers have other bits.

The folder `resume` keeps the output of the last finished decoder layer, and the results in JSON. After a
kill, a call with the same arguments repeats the unfinished layer from the source, and ends with the same
bits as a call without a kill.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from permille.digests import canonical_json, digest_of
from permille.errors import InputError
from permille.files import fsync_folder, write_atomic
from permille.machine_memory import give_back
from permille.models.checkpoint import Checkpoint
from permille.models.families import scoped_tensors
from permille.models.layerwise import DecoderLayer, LayerStream
from permille_sparsify.plan import PruningMethod, PruningPlan
from permille_sparsify.selection import prune_linear

_STATE = "state.json"
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PruningText:
    """Token ids, int64: rows [N, T] for calibration, and rows [E, T] to measure the loss on."""

    calibration_NT: NDArray[np.int64]
    evaluation_ET: NDArray[np.int64] | None = None

    def rows(self) -> NDArray[np.int64]:
        """Return all rows that go through the pruned layers, those for calibration first."""
        if self.evaluation_ET is None:
            return self.calibration_NT
        return np.concatenate((self.calibration_NT, self.evaluation_ET))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearReport:
    """Result for a linear layer.

    Attributes:
        zeros: the number of zeros in the pruned weight.
        error: `|(W - W') X|^2`, where W is the weight, W' the pruned weight, and X the layer's inputs on the
            calibration text.
        norm: `|W X|^2`.
    """

    name: str
    weights: int
    zeros: int
    error: float
    norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PruningReport:
    """Result of pruning.

    `loss_before` and `loss_after` are the losses of the evaluation rows before and after pruning, in nats per
    token. Without evaluation rows, they are None.
    """

    linears: tuple[LinearReport, ...]
    loss_before: float | None = None
    loss_after: float | None = None

    @property
    def rate(self) -> float:
        """Return the share of zeros in all linear layers together."""
        return sum(row.zeros for row in self.linears) / sum(row.weights for row in self.linears)


def prune_model(
    source: Checkpoint,
    target: Path,
    text: PruningText,
    plan: PruningPlan,
    *,
    resume: Path | None = None,
    progress: Progress = lambda _done, _total: None,
) -> PruningReport:
    """Write the pruned model to the folder `target`.

    Args:
        source: the model.
        target: the new folder. An existing one is replaced, or completed if `resume` has finished layers of
            an earlier call with the same arguments.
        text: token ids.
        plan: the options.
        resume: a folder for continuing after a kill. None keeps nothing.
        progress: called with the decoder layers done and their total.

    Raises:
        InputError: the plan does not fit the model, the model already has the zeros of the plan, weights,
            inputs or losses are not finite, or SparseGPT needs more calibration text.
        OSError: the file system failed.
    """
    plan.check(source.config)
    check_not_pruned(source, plan)
    walk = _Walk(source, target, text, plan, resume)
    total = walk.stream.layers
    for index in range(walk.finished, total):
        progress(index, total)
        walk.advance(index)
    progress(total, total)
    return walk.report()


def check_not_pruned(source: Checkpoint, plan: PruningPlan) -> None:
    """Check that the plan removes weights.

    Raises:
        InputError: every linear layer already has the zeros of the plan.
    """
    for name, _ in scoped_tensors(source.config):
        zero_NK = source.float32(name) == 0
        if zero_NK.mean() < int(zero_NK.shape[1] * plan.rate_of(name)) / zero_NK.shape[1]:
            return
        pattern = plan.pattern
        if pattern is not None and plan.rate_of(name) >= pattern.rate:
            groups = zero_NK.reshape(-1, pattern.of).sum(axis=1)
            if bool((groups < pattern.of - pattern.kept).any()):
                return
    raise InputError("The model has these zeros already. Choose a higher rate or another pattern.")


class _Walk:
    """State of `prune_model`: hidden states of all rows, and results of the finished layers.

    The buffers begin with all rows of the text, which go through the pruned layers. A second copy of the
    evaluation rows follows. It goes through the layers of the source, for the loss before pruning. Each layer
    reads one of two buffers and fills the other.
    """

    def __init__(
        self, source: Checkpoint, target: Path, text: PruningText, plan: PruningPlan, folder: Path | None
    ) -> None:
        self.source, self.target, self.text, self.plan, self.folder = source, target, text, plan, folder
        self.stream = LayerStream(source, device=plan.device)
        rows = text.rows()
        self._pruned = len(rows)
        if text.evaluation_ET is not None:
            rows = np.concatenate((rows, text.evaluation_ET))
        self._rows = torch.from_numpy(np.ascontiguousarray(rows))
        self.finished, self.linears = 0, list[LinearReport]()
        self._fingerprint = "" if folder is None else self._name()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._load()
        width = int(source.config["hidden_size"])
        self._hidden = tuple(_buffer(folder, number, (*self._rows.shape, width)) for number in (0, 1))
        if self.finished == 0:
            copy_model(source, target)
            with self.stream.ends() as ends, torch.no_grad():
                for row, tokens_T in enumerate(self._rows):
                    self._hidden[0][row] = ends.embed(tokens_T[None])[0]

    def advance(self, index: int) -> None:
        """Prune a layer, and compute the next hidden states."""
        # A kill leaves the input of the layer whole, because the output goes to the other buffer.
        before, after = self._hidden[index % 2], self._hidden[(index + 1) % 2]
        with self.stream.layer(index) as layer, torch.no_grad():
            # The rows for the loss before pruning go through the layer while it is still the source's.
            for row in range(self._pruned, len(before)):
                after[row] = layer(before[row][None])[0]
            grams = _Grams(layer, self._linears(layer))
            with grams.recording():
                # Record only calibration rows: rows that measure the loss must not influence the choice.
                for row in range(len(self.text.calibration_NT)):
                    layer(before[row][None])
            # One recording serves all linears, so they are pruned on the inputs of the unpruned layer.
            rows = [self._prune(layer, name, gram_KK) for name, gram_KK in grams.found()]
            # Free the matrices, one of K x K for each input, before the rows go through again.
            del grams
            for row in range(self._pruned):
                after[row] = layer(before[row][None])[0]
        self.linears += rows
        # glibc would keep the memory of this layer while the next one is loaded.
        give_back()
        self.finished = index + 1
        self._save((index + 1) % 2)

    def report(self) -> PruningReport:
        """Return the final result."""
        losses: list[float | None] = [None, None]
        if self.text.evaluation_ET is not None:
            count, hidden = len(self.text.evaluation_ET), self._hidden[self.stream.layers % 2]
            with self.stream.ends() as ends, torch.no_grad():
                for which, first in enumerate((self._pruned, self._pruned - count)):
                    losses[which] = self._loss(ends.logits, hidden, range(first, first + count))
        return PruningReport(linears=tuple(self.linears), loss_before=losses[0], loss_after=losses[1])

    def _loss(self, logits: Callable[[Tensor], Tensor], hidden: Tensor, rows: range) -> float:
        total = 0.0
        for row in rows:
            logits_TV, next_T = logits(hidden[row][None])[0, :-1].float(), self._rows[row, 1:]
            losses_T = functional.cross_entropy(logits_TV, next_T.to(logits_TV.device), reduction="none")
            total += float(losses_T.double().sum())
        if not np.isfinite(total):
            raise InputError(f"The loss on the evaluation rows is not finite: {total}.")
        return total / (len(rows) * (self._rows.shape[1] - 1))

    def _prune(self, layer: DecoderLayer, name: str, gram_KK: Tensor) -> LinearReport:
        plan, full_name = self.plan, f"{layer.prefix}.{name}"
        parameter = layer.module.get_parameter(name)
        weight_NK = parameter.data.clone()
        if not bool(torch.isfinite(weight_NK).all() and torch.isfinite(gram_KK.diagonal()).all()):
            raise InputError(
                f"{full_name} has weights, or inputs on the calibration text, that are NaN or infinite. The "
                "model may be damaged: download it again."
            )
        pruned_NK = prune_linear(weight_NK, gram_KK, plan.method, plan.rate(layer.index), plan.pattern)
        pruned_NK = write_weight(
            self.source, self.target, full_name, pruned_NK, updated=plan.method is PruningMethod.SPARSEGPT
        )
        # Continue with the weight as it was written, so that later layers see the rounding to the model's
        # dtype.
        parameter.data.copy_(pruned_NK)
        return LinearReport(
            name=full_name,
            weights=weight_NK.numel(),
            zeros=int((pruned_NK == 0).sum()),
            error=_squared(weight_NK - pruned_NK, gram_KK),
            norm=_squared(weight_NK, gram_KK),
        )

    def _linears(self, layer: DecoderLayer) -> list[str]:
        start = f"{layer.prefix}."
        return [
            name.removeprefix(start)
            for name, _ in scoped_tensors(self.source.config, f"layers:{layer.index}")
        ]

    def _name(self) -> str:
        """Return a name for the work: a hash of weights, rows and plan."""
        rates = self.plan.rates
        about = {
            "source": self.source.digest(),
            "rows": digest_of(self._rows.numpy().astype("<i8").tobytes()),
            "shape": [*self._rows.shape, self._pruned, len(self.text.calibration_NT)],
            "method": self.plan.method.value,
            "rates": repr(sorted(rates.items()) if isinstance(rates, Mapping) else rates),
            "pattern": str(self.plan.pattern),
            "device": self.plan.device,
            "target": str(self.target),
        }
        return digest_of(canonical_json(about))

    def _load(self) -> None:
        assert self.folder is not None
        path = self.folder / _STATE
        found: dict[str, Any] = json.loads(path.read_bytes()) if path.exists() else {}
        # Without the target folder, the finished layers are lost, so the work begins anew.
        if found.get("fingerprint") == self._fingerprint and self.target.is_dir():
            self.finished = found["finished"]
            self.linears = [LinearReport(**row) for row in found["linears"]]

    def _save(self, buffer: int) -> None:
        if self.folder is None:
            return
        # Flush hidden states and weights first, since the state must not name results that a crash has lost.
        flush(_buffer_path(self.folder, buffer))
        for file in {self.source.place(row.name).file for row in self.linears}:
            flush(self.target / file)
        state = {
            "fingerprint": self._fingerprint,
            "finished": self.finished,
            "linears": [asdict(row) for row in self.linears],
        }
        write_atomic(self.folder / _STATE, json.dumps(state).encode())


class _Grams:
    """Gram matrices `X X^T` of the inputs of a layer's linears.

    Linears that get the same input tensor share a matrix.
    """

    def __init__(self, layer: DecoderLayer, names: list[str]) -> None:
        self._modules = {name: layer.module.get_submodule(name.removesuffix(".weight")) for name in names}
        self._grams: dict[str, Tensor] = {}
        self._leader: dict[str, str] = {}
        self._input: tuple[str, Tensor] | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record while the layer runs."""
        handles = [
            module.register_forward_pre_hook(self._hook(name)) for name, module in self._modules.items()
        ]
        try:
            yield
        finally:
            self._input = None
            for handle in handles:
                handle.remove()

    def found(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the matrix of each linear layer, in the order of the model."""
        for name in self._modules:
            yield name, self._grams[self._leader[name]]

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def add(_module: nn.Module, args: tuple[Any, ...]) -> None:
            x = args[0]
            if name not in self._leader:
                # Query, key and value projections get the same tensor, so one matrix serves all three.
                same = self._input is not None and self._input[1] is x
                self._leader[name] = self._input[0] if same and self._input is not None else name
            if self._leader[name] != name:
                return
            self._input = (name, x)
            x_DK = x.reshape(-1, x.shape[-1]).float()
            if name not in self._grams:
                self._grams[name] = torch.zeros(x_DK.shape[1], x_DK.shape[1], device=x_DK.device)
            self._grams[name].addmm_(x_DK.T, x_DK)

        return add


def copy_model(source: Checkpoint, target: Path) -> None:
    """Create a folder with the files of the model, and nothing else. An existing folder is removed first."""
    # An earlier call may have left an unfinished model.
    if target.exists():
        shutil.rmtree(target)
    target.mkdir(parents=True)
    for name in source.files():
        shutil.copyfile(source.folder / name, target / name)
        flush(target / name)
    fsync_folder(target)


def write_weight(source: Checkpoint, target: Path, name: str, weight_NK: Tensor, *, updated: bool) -> Tensor:
    """Write a tensor into the copy of the model, in the model's dtype. Return what was written.

    Args:
        updated: whether kept weights changed. If False, they keep their bits.
    """
    place, raw = source.place(name), source.raw(name)
    if updated:
        own = weight_NK.to("cpu", _DTYPES[raw.dtype]).contiguous()
        data = own.view(torch.uint8).numpy().reshape(-1)
    else:
        data = raw.data.copy()
        # View the data as integers, because numpy has no bfloat16. In all three types, zero has no bits set.
        words = data.view("<u4" if raw.dtype == "F32" else "<u2")
        # Write zeros only, so that all other weights keep their bits.
        words[(weight_NK == 0).cpu().numpy().reshape(-1)] = 0
    with (target / place.file).open("r+b") as file:
        file.seek(place.begin)
        file.write(data.data)
    written = torch.from_numpy(data).view(_DTYPES[raw.dtype]).reshape(weight_NK.shape)
    return written.to(weight_NK.device, weight_NK.dtype)


def flush(path: Path) -> None:
    """Make the content of a file durable."""
    # fsync flushes the file, whichever descriptor or map wrote to it.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _squared(weight_NK: Tensor, gram_KK: Tensor) -> float:
    # Rounding can make the sum of squares slightly negative.
    return max(0.0, float(((weight_NK @ gram_KK) * weight_NK).double().sum()))


def _buffer(folder: Path | None, number: int, shape: tuple[int, ...]) -> Tensor:
    size = int(np.prod(shape))
    if folder is None:
        return torch.empty(shape)
    # Use a shared map, so that the states outlive the process.
    return torch.from_file(str(_buffer_path(folder, number)), shared=True, size=size).reshape(shape)


def _buffer_path(folder: Path, number: int) -> Path:
    return folder / f"hidden-{number}"

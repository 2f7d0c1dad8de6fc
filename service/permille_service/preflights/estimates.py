"""Estimates of the memory, disk and time that a job needs, and measurements of what this machine has.

Needs are computed from the model's config alone. No model file is read. The figures are upper estimates of
the worker's methods: weights in float32, one sequence at a time, one tensor's gradient, checkpointed
activations. They serve to refuse hopeless jobs early, not to predict.

Free memory takes the limit of the control group into account. The speed of the machine is assumed.
"""

import os
import shutil
from dataclasses import dataclass
from math import prod
from pathlib import Path

from permille.memory import available_memory
from permille.models.families import Config, expected_tensors, scoped_tensors, shape_of
from permille.schemas.masks import FisherMask, WeightMask
from permille.schemas.packages import PoolingCreate
from permille.schemas.quantizations import AnyOptions, AutoRound, Int8
from permille.schemas.sparsifications import Recovery, SparsificationCreate
from permille_service.settings import Settings

FLOAT_BYTES = 4
FLOPS_A_CORE = 8e9  # float32 matrix products on a modest core; `flops_per_s` replaces it
MAX_JOB_S = 7 * 86_400.0  # preflight refuses a longer job
_TOKENS_A_PASS = 1024  # in the fine-tuning of adapters
PROCESS_BYTES = 400 * 1024 * 1024  # interpreter and torch before the first weight
# Floating-point operations a token and weight: forward 2, backward 4, the forward again for checkpointing 2.
FISHER_FLOPS = 8
FORWARD_FLOPS = 2
SHARD_SEQUENCES, MOST_SHARDS = 16, 64  # of a mask that is scored in parts: `permille.sensitivity.scores`
# auto-round, with the arguments that `permille.quantization.rounding` uses: steps for each block, sequences
# of a step, copies of the model, and hidden vectors kept for each token of the text and of a step.
ROUNDING_STEPS, ROUNDING_BATCH = 200, 8
ROUNDING_COPIES, ROUNDING_CACHES, ROUNDING_VECTORS = 4, 4, 64
# Exporting a program: copies of the model in float32, and the time of its graph, layer by layer.
EXPORT_COPIES, EXPORT_LAYER_S = 6, 20
SECONDS_A_WEIGHT = 60e-9  # reading, coding and writing one weight on one core


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Counts of weights, the widths that decide activations, and the highest ranks with which an adapter is
    smaller than every linear in scope."""

    parameters: int
    scoped: int
    largest: int  # weights of the largest scoped tensor
    layers: int
    hidden: int
    vocabulary: int
    lora_rank: int
    lora_fa_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Upper bounds of a job's needs."""

    memory_bytes: int
    disk_bytes: int
    seconds: float

    def then(self, other: "Needs") -> "Needs":
        """Return the needs of two jobs in sequence: the larger memory, and the sums of disk and time."""
        return Needs(
            memory_bytes=max(self.memory_bytes, other.memory_bytes),
            disk_bytes=self.disk_bytes + other.disk_bytes,
            seconds=self.seconds + other.seconds,
        )


def sizes_of(config: Config, scope: str = "all") -> Sizes:
    """Count a model's weights from its config. Raises InputError for a family or scope that is not known."""
    shapes = expected_tensors(config)
    scoped = scoped_tensors(config, scope)
    counts = [prod(shape) for _, shape in scoped]
    model = shape_of(config)
    return Sizes(
        parameters=sum(prod(shape) for shape in shapes.values()),
        scoped=sum(counts),
        largest=max(counts),
        layers=len({name.split("layers.", 1)[-1].split(".", 1)[0] for name, _ in scoped}),
        hidden=model.hidden,
        vocabulary=model.vocabulary,
        lora_rank=min(rows * columns // (rows + columns) for _, (rows, columns) in scoped),
        lora_fa_rank=min(columns for _, (_, columns) in scoped),
    )


def sparsification_needs(
    sizes: Sizes, request: SparsificationCreate, *, model_bytes: int, flops_per_s: float
) -> Needs:
    """Estimate the needs of a sparsification.

    Memory: embedding and head, or one decoder layer with the Gram matrices of its inputs and SparseGPT's
    temporaries. Disk: two copies of the model, and the hidden states.
    """
    rows = request.sequences + 2 * request.evaluation_sequences
    tokens = rows * request.length
    layer = sizes.scoped // sizes.layers
    inputs = sizes.largest // min(sizes.hidden, sizes.largest)  # input features of the widest linear
    ends = sizes.parameters - sizes.scoped + request.length * sizes.vocabulary
    held = max(ends, layer + 3 * sizes.largest + 6 * max(inputs, sizes.hidden) ** 2)
    products = (
        tokens * layer * FORWARD_FLOPS * 2 + tokens * 4 * FORWARD_FLOPS * max(inputs, sizes.hidden) ** 2
    )
    needs = Needs(
        memory_bytes=PROCESS_BYTES + held * FLOAT_BYTES,
        disk_bytes=2 * model_bytes + 2 * tokens * sizes.hidden * FLOAT_BYTES,
        seconds=sizes.layers * products / flops_per_s + 4 * sizes.scoped * SECONDS_A_WEIGHT,
    )
    if request.recovery is None:
        return needs
    return _recovery_needs(sizes, request, request.recovery, pruning=needs, flops_per_s=flops_per_s)


def _recovery_needs(
    sizes: Sizes, request: SparsificationCreate, recovery: Recovery, *, pruning: Needs, flops_per_s: float
) -> Needs:
    """Return the needs of pruning and fine-tuning.

    Memory: the whole model with a decoder layer's changed weights and gradients, adapters with gradients and
    moments, logits and their gradients. Disk: both the pruned model and the fine-tuned one. Time: a step
    takes two forward passes, and a backward pass of twice the work.
    """
    adapters = 4 * 2 * recovery.rank * sizes.scoped // min(sizes.hidden, sizes.scoped)
    logits = 4 * max(request.length, _TOKENS_A_PASS) * sizes.vocabulary
    held = sizes.parameters + 3 * sizes.scoped // sizes.layers + adapters + logits
    tokens = recovery.steps * recovery.rows * request.length
    return Needs(
        memory_bytes=max(pruning.memory_bytes, PROCESS_BYTES + held * FLOAT_BYTES),
        disk_bytes=2 * pruning.disk_bytes,
        seconds=pruning.seconds + 4 * tokens * FORWARD_FLOPS * sizes.parameters / flops_per_s,
    )


def mask_needs(
    sizes: Sizes,
    options: FisherMask | WeightMask,
    *,
    memory_bytes: int | None,
    flops_per_s: float,
    split_flops: float,
) -> Needs:
    """Estimate the needs of a mask.

    Scores that do not fit into `memory_bytes` go to the disk. A job of more work than `split_flops` is split
    into shards, and the scores of each shard go to the disk, too.
    """
    scores = sizes.scoped * FLOAT_BYTES
    mask_disk = round(sizes.scoped * options.density) * 2 * FLOAT_BYTES
    if not isinstance(options, FisherMask):
        memory = PROCESS_BYTES + 4 * sizes.largest * FLOAT_BYTES
        return Needs(memory_bytes=memory, disk_bytes=mask_disk, seconds=sizes.scoped * SECONDS_A_WEIGHT)
    activations = options.length * (sizes.layers + 16) * sizes.hidden + 3 * options.length * sizes.vocabulary
    memory = _held(sizes, activations, memory_bytes)
    if memory_bytes is None or memory + scores <= memory_bytes:
        memory += scores
    work = float(options.sequences) * options.length * sizes.parameters * FISHER_FLOPS
    shards = min(-(-options.sequences // SHARD_SEQUENCES), MOST_SHARDS) if work > split_flops else 0
    seconds = work / flops_per_s + sizes.scoped * SECONDS_A_WEIGHT
    return Needs(memory_bytes=memory, disk_bytes=mask_disk + (1 + shards) * scores, seconds=seconds)


def _held(sizes: Sizes, activations: int, memory_bytes: int | None) -> int:
    """Return the bytes of the whole model, or of its largest part if the whole does not fit."""
    whole = PROCESS_BYTES + (sizes.parameters + 2 * sizes.largest + activations) * FLOAT_BYTES
    if memory_bytes is None or whole <= memory_bytes:
        return whole
    part = max(3 * sizes.parameters // sizes.layers, 2 * sizes.vocabulary * sizes.hidden)
    return min(whole, PROCESS_BYTES + (part + 2 * sizes.largest + activations) * FLOAT_BYTES)


def quantization_needs(
    sizes: Sizes,
    options: AnyOptions,
    *,
    evaluated: bool,
    flops_per_s: float,
    memory_bytes: int | None,
) -> Needs:
    """Estimate the needs of a quantization. Measuring perplexity runs the model in float32, twice."""
    codes = sizes.scoped if isinstance(options, Int8) else sizes.scoped // 2
    plain = (sizes.parameters - sizes.scoped) * FLOAT_BYTES
    memory = PROCESS_BYTES + 6 * sizes.largest * FLOAT_BYTES
    seconds = sizes.scoped * SECONDS_A_WEIGHT
    codes += sizes.scoped // options.group_size * FLOAT_BYTES
    if isinstance(options, AutoRound):
        tokens = options.calibration_sequences * options.calibration_length
        batch = min(ROUNDING_BATCH, options.calibration_sequences) * options.calibration_length
        activations = sizes.hidden * (ROUNDING_CACHES * tokens + ROUNDING_VECTORS * batch)
        memory = PROCESS_BYTES + (ROUNDING_COPIES * sizes.parameters + activations) * FLOAT_BYTES
        seconds += float(ROUNDING_STEPS) * batch * sizes.scoped * FISHER_FLOPS / flops_per_s
    if evaluated:
        memory = max(memory, _held(sizes, options.evaluation_tokens * sizes.hidden, memory_bytes))
        seconds += 2 * FORWARD_FLOPS * float(options.evaluation_tokens) * sizes.parameters / flops_per_s
    return Needs(memory_bytes=memory, disk_bytes=codes + plain, seconds=seconds)


def package_needs(sizes: Sizes) -> Needs:
    """Estimate the needs of a package. Its layers exist already. The values and files are added."""
    return Needs(
        memory_bytes=PROCESS_BYTES + 2 * sizes.largest * FLOAT_BYTES,
        disk_bytes=sizes.scoped // 100 * FLOAT_BYTES + 32 * 1024 * 1024,
        seconds=sizes.scoped * SECONDS_A_WEIGHT,
    )


def pooling_needs(sizes: Sizes, request: PoolingCreate, *, package_bytes: int, flops_per_s: float) -> Needs:
    """Estimate the needs of a pooled state.

    Memory: the mapped package, a hidden vector for each token and decoder layer, the activations of one
    decoder layer, and Adam's moments.
    """
    tokens = request.rows * request.length
    activations = tokens * (sizes.layers + 32) * sizes.hidden * FLOAT_BYTES
    adam = 16 * (sizes.scoped // 100)
    work = float(request.steps) * tokens * sizes.parameters * FISHER_FLOPS
    return Needs(
        memory_bytes=PROCESS_BYTES + package_bytes + activations + 2 * adam,
        disk_bytes=adam + 32 * 1024 * 1024,
        seconds=work / flops_per_s,
    )


def export_needs(sizes: Sizes) -> Needs:
    """Estimate the needs of an export: several copies of the model in float32, and the program."""
    weights = sizes.parameters * FLOAT_BYTES
    return Needs(
        memory_bytes=PROCESS_BYTES + EXPORT_COPIES * weights,
        disk_bytes=weights + 64 * 1024 * 1024,
        seconds=EXPORT_LAYER_S * sizes.layers + sizes.parameters * SECONDS_A_WEIGHT,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Resources that a job may use. None means unknown, and then nothing is refused for it."""

    memory_bytes: int | None
    disk_bytes: int | None
    flops_per_s: float


def measure_machine(settings: Settings) -> Capacity:
    """Measure the machine now."""
    free = settings.memory_bytes if settings.memory_bytes is not None else available_memory()
    return Capacity(
        memory_bytes=free,
        disk_bytes=_free_disk(settings.blob_root),
        flops_per_s=settings.flops_per_s or FLOPS_A_CORE * (os.cpu_count() or 1),
    )


def _free_disk(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(
            next(path for path in (folder, *folder.absolute().parents) if path.exists())
        ).free
    except OSError:
        return None

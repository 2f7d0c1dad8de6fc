"""Estimates of the memory and disk that a job needs, and measurements of what the workers have.

The needs are computed from the model's config alone. No file of the model is read. They are upper bounds
to refuse hopeless jobs early, and do not predict exact figures. Unless a function below says otherwise:

- weights are in float32;
- sequences are processed one at a time, and only one tensor has a gradient at a time;
- the backward pass computes activations again (checkpointing).

The workers report the memory that they have free while they run no job.
"""

import shutil
from dataclasses import dataclass
from math import prod
from pathlib import Path

from permille.models.families import Config, expected_tensors, scoped_tensors, shape_of
from permille.schemas.masks import FisherMask, WeightMask
from permille.schemas.quantizations import AnyOptions, AutoRound, Int8
from permille_service.settings import Settings

FLOAT_BYTES = 4
TOKENS_A_PASS = 1024  # tokens of one forward pass in the fine-tuning of adapters
PROCESS_BYTES = 400 * 1024 * 1024  # the interpreter and torch, before any weight is loaded
# Floating-point operations for each token and weight: 2 for the forward pass, 4 for the backward pass, and 2
# to repeat the forward pass for checkpointed activations.
FISHER_FLOPS = 8
# A mask job with much work is split into shards (`permille.sensitivity.scores`). These are the number of
# sequences in a shard, and the maximum number of shards.
SHARD_SEQUENCES, MOST_SHARDS = 16, 64
# auto-round, with the arguments that `permille.quantization.rounding` gives it:
ROUNDING_BATCH = 8  # sequences in a step
ROUNDING_COPIES = 4  # copies of the model in memory
ROUNDING_CACHES = 4  # hidden vectors in memory for each token of the text
ROUNDING_VECTORS = 64  # further hidden vectors in memory for each token of a step
# Training on public text, for each trained number:
ADAM_BYTES = 16
# A basis, with the arguments of `permille.training.basis`: tokens of a step, and moments of 8 pseudo-users
# on the disk. Their displacements in float64 take half as much memory, and the columns the other half.
BASIS_TOKENS = 3 * 128
BASIS_BYTES = 8 * ADAM_BYTES
# Export of a program:
EXPORT_COPIES = 6  # copies of the model in memory, in float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of a model that decide the needs of a job.

    They are counts of weights and layers, the widths that decide the size of activations, and the highest
    rank of each kind of adapter. This is the largest rank at which the adapter of each linear layer in scope
    trains at most as many numbers as the layer has weights.
    """

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

    def then(self, other: "Needs") -> "Needs":
        """Return the needs of two jobs in sequence: the larger memory, and the sum of disk."""
        return Needs(
            memory_bytes=max(self.memory_bytes, other.memory_bytes),
            disk_bytes=self.disk_bytes + other.disk_bytes,
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


def mask_needs(
    sizes: Sizes,
    options: FisherMask | WeightMask,
    *,
    memory_bytes: int | None,
    split_flops: float,
) -> Needs:
    """Estimate the needs of a mask.

    Scores that do not fit into `memory_bytes` are written to the disk. So the disk of a Fisher mask includes
    one copy of the scores, even if they fit. A job that needs more operations than `split_flops` is split
    into shards, and each shard writes another copy.
    """
    scores = sizes.scoped * FLOAT_BYTES
    mask_disk = round(sizes.scoped * options.density) * 2 * FLOAT_BYTES
    if not isinstance(options, FisherMask):
        memory = PROCESS_BYTES + 4 * sizes.largest * FLOAT_BYTES
        return Needs(memory_bytes=memory, disk_bytes=mask_disk)
    activations = options.length * (sizes.layers + 16) * sizes.hidden + 3 * options.length * sizes.vocabulary
    memory = _held(sizes, activations, memory_bytes)
    if memory_bytes is None or memory + scores <= memory_bytes:
        memory += scores
    work = float(options.sequences) * options.length * sizes.parameters * FISHER_FLOPS
    shards = min(-(-options.sequences // SHARD_SEQUENCES), MOST_SHARDS) if work > split_flops else 0
    return Needs(memory_bytes=memory, disk_bytes=mask_disk + (1 + shards) * scores)


def _held(sizes: Sizes, activations: int, memory_bytes: int | None) -> int:
    """Return the memory for the whole model, or for its largest part if the whole does not fit."""
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
    memory_bytes: int | None,
) -> Needs:
    """Estimate the needs of a quantization.

    If it is `evaluated`, the model runs in float32 twice more, to measure the perplexity before and after.
    """
    codes = sizes.scoped if isinstance(options, Int8) else sizes.scoped // 2
    plain = (sizes.parameters - sizes.scoped) * FLOAT_BYTES
    memory = PROCESS_BYTES + 6 * sizes.largest * FLOAT_BYTES
    codes += sizes.scoped // options.group_size * FLOAT_BYTES
    if isinstance(options, AutoRound):
        tokens = options.calibration_sequences * options.calibration_length
        batch = min(ROUNDING_BATCH, options.calibration_sequences) * options.calibration_length
        activations = sizes.hidden * (ROUNDING_CACHES * tokens + ROUNDING_VECTORS * batch)
        memory = PROCESS_BYTES + (ROUNDING_COPIES * sizes.parameters + activations) * FLOAT_BYTES
    if evaluated:
        memory = max(memory, _held(sizes, options.evaluation_tokens * sizes.hidden, memory_bytes))
    return Needs(memory_bytes=memory, disk_bytes=codes + plain)


def package_needs(sizes: Sizes, *, basis: bool) -> Needs:
    """Estimate the needs of a package. Its large files exist already, so the job only adds small ones.

    A `basis` needs the memory of training: the memory-mapped package, a hidden vector for each token and
    decoder layer, the activations of one decoder layer, and the moments of Adam. It keeps the moments of all
    pseudo-users.
    """
    trained = sizes.scoped // 100
    needs = Needs(
        memory_bytes=PROCESS_BYTES + 2 * sizes.largest * FLOAT_BYTES,
        disk_bytes=trained * FLOAT_BYTES + 32 * 1024 * 1024,
    )
    if not basis:
        return needs
    package = sizes.scoped + (sizes.parameters - sizes.scoped) * FLOAT_BYTES
    activations = BASIS_TOKENS * (sizes.layers + 32) * sizes.hidden * FLOAT_BYTES
    learned = PROCESS_BYTES + package + activations + (ADAM_BYTES + BASIS_BYTES) * trained
    return needs.then(Needs(memory_bytes=learned, disk_bytes=BASIS_BYTES * trained))


def export_needs(sizes: Sizes) -> Needs:
    """Estimate the needs of an export: several copies of the model in float32, and the program."""
    weights = sizes.parameters * FLOAT_BYTES
    return Needs(
        memory_bytes=PROCESS_BYTES + EXPORT_COPIES * weights,
        disk_bytes=weights + 64 * 1024 * 1024,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Resources that a job may use. None means unknown. No job is refused for an unknown resource."""

    memory_bytes: int | None
    disk_bytes: int | None


def measure_machine(settings: Settings, workers_memory: int | None) -> Capacity:
    """Return the resources that a job has.

    The API may run in a small container, and its memory says nothing about that of the workers. With a
    bucket, its disk says nothing about theirs, either.

    Args:
        workers_memory: the most memory that a worker has reported, in bytes. None: none has reported.
    """
    return Capacity(
        memory_bytes=settings.memory_bytes or workers_memory,
        disk_bytes=None if settings.blob_bucket else _free_disk(settings.blob_root),
    )


def _free_disk(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None

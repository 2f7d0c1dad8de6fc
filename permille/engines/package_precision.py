"""The error of one package's projected gradient, over compute types and a short grid of epsilon.

Exact derivatives are the torch engine's forward mode in float32; differences are measured in float32 and
bfloat16. What it costs is bounded by the sizes here: about 580 forward passes of 128 tokens, a third of a
usual Fisher mask's operations, and no more memory than the engine and a few copies of the sparse values.
"""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from permille.engines.precision import MIN_DIRECTIONS, directions_together, measure_differences, rademacher
from permille.package.measurements import EPSILON_DIGITS, PrecisionRow, rounded
from permille.package.reader import Package
from permille.zo.estimators import Batch, LossEngine

DIRECTIONS = MIN_DIRECTIONS
SEQUENCES = 4
LENGTH = 32
# epsilon * sqrt(k): a device's search begins at 0.5 and looks from 1/8 to 2.
EPSILON_NORMS = (1 / 32, 1 / 8, 1 / 2, 2.0)
COMPUTE_DTYPES = ("float32", "bfloat16")
_SEED = 0

Progress = Callable[[float, str], None]


def measure_package(
    package: Package, sequences_BT: NDArray[np.int64], folder: Path, progress: Progress
) -> list[PrecisionRow]:
    """One row for each compute type and epsilon.

    Args:
        sequences_BT: token ids of whole sequences, [b, t].
        folder: for the directions, 32 * k float32 in a file that is removed.
        progress: told a share from 0 to 1 and a message after every few directions; may raise to stop.

    Raises:
        InputError: derivatives that are all zero or not finite: there is nothing to compare with.
        OperatorError: as the engine.
    """
    from permille.engines.torch_engine import TorchEngine

    batch = whole_sequences(sequences_BT)
    values_K = package.values()
    path = folder / "directions.f32"
    parts = 1 + len(COMPUTE_DTYPES) * len(EPSILON_NORMS)
    rows: list[PrecisionRow] = []

    def told(part: int, what: str) -> Callable[[int], None]:
        return lambda done: progress((part + done / DIRECTIONS) / parts, f"{what} {done}/{DIRECTIONS}")

    try:
        directions_QK = _directions(path, len(values_K))
        engine = TorchEngine(package, compute_dtype=COMPUTE_DTYPES[0])
        exact_Q = _exact(engine, values_K, directions_QK, batch, told(0, "exact derivative"))
        for dtype in COMPUTE_DTYPES:
            engine = TorchEngine(package, compute_dtype=dtype)
            for norm in EPSILON_NORMS:
                epsilon = rounded(norm / math.sqrt(len(values_K)), EPSILON_DIGITS)
                found = measure_differences(
                    engine,
                    exact_Q,
                    values_K,
                    directions_QK,
                    batch,
                    epsilon,
                    told(1 + len(rows), f"{dtype} difference"),
                )
                info = engine.info()
                rows.append(
                    PrecisionRow(
                        engine=info["name"],
                        version=info["version"],
                        compute_dtype=info["compute_dtype"],
                        epsilon=epsilon,
                        relative_error=found.relative_error if math.isfinite(found.relative_error) else None,
                        cosine=found.cosine,
                        bfloat16_cosine=found.bfloat16_cosine,
                        directions=found.directions,
                        tokens=int(batch.target_BT.sum()),
                    )
                )
    finally:
        path.unlink(missing_ok=True)
    return rows


def whole_sequences(sequences_BT: NDArray[np.int64]) -> Batch:
    """A batch without padding; every token but the first of a sequence is a target."""
    target_BT = np.ones(sequences_BT.shape, dtype=np.bool_)
    target_BT[:, 0] = False
    return Batch(
        input_ids_BT=sequences_BT,
        attention_BT=np.ones(sequences_BT.shape, dtype=np.bool_),
        target_BT=target_BT,
    )


def _directions(path: Path, k: int) -> NDArray[np.float32]:
    """As a mapped file: of a large mask they are larger than all else."""
    directions_QK = np.memmap(path, np.float32, "w+", shape=(DIRECTIONS, k))
    for query in range(DIRECTIONS):
        directions_QK[query] = rademacher(1, k, _SEED + query)[0]
    return directions_QK


def _exact(
    engine: LossEngine,
    values_K: NDArray[np.float32],
    directions_QK: NDArray[np.float32],
    batch: Batch,
    progress: Callable[[int], None],
) -> NDArray[np.float64]:
    parts = []
    for together in directions_together(directions_QK):
        parts.append(engine.directional_derivatives(values_K, directions_QK[together], batch)[1])
        progress(together.stop)
    return np.concatenate(parts)

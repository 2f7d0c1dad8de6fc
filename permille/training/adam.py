"""Adam on the lattice: steps along the gradient that move each masked weight by whole units.

In a state, each masked weight is its base plus an integer times a unit (`permille.zo.lattice`).

    m = b1 m + (1 - b1) g,   v = b2 v + (1 - b2) g^2        g: the batch's gradient of the masked weights
    change = -rate * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + 1e-8)            (Kingma and Ba, algorithm 1)

`learning_rate` computes the first rate from the package, so no search for a rate is needed. The rate falls to
0 over the steps. Each change is rounded to the nearest multiple of the lattice's unit.

Here, t is the number of steps up to this one, without rejected steps. Shapes: K = masked weights.
"""

import hashlib
import io
import math
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from permille.choices import AdapterKind
from permille.errors import OperatorError
from permille.files import write_atomic
from permille.package.reader import Package
from permille.zo.lattice import STATE_LIMIT
from permille.zo.records import StepFlag, StepRecord

# The constants of `learning_rate`, measured in docs/adr/0009 and, for adapters, docs/results/learning.md.
RATE = 0.3
FULL_RATE_WEIGHTS = 6000
ADAPTER_RATE = 0.12
# A change of size `rate` has at least this many units of the lattice. It may have almost twice as many,
# because the unit is a power of two.
UNITS = 256
# b1 and b2 (docs/adr/0009).
_BETAS = (0.9, 0.99)
_TINY = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Moments:
    """State of Adam before a step.

    Attributes:
        step: the number of the next step.
        taken: the number of earlier steps that were not rejected.
        s_K: the state, for runs without a log.
        coefficients: the coefficients of the previous step, for runs with a log. Together with `loss` and
            `flags`, they form the record of that step.
    """

    step: int
    taken: int
    m_K: NDArray[np.float32]
    v_K: NDArray[np.float32]
    s_K: NDArray[np.int64]
    coefficients: NDArray[np.int64]
    loss: float = 0.0
    flags: int = 0

    @classmethod
    def first(cls, k: int, s_K: NDArray[np.int64]) -> "Moments":
        """Return the initial state of Adam."""
        nothing_K = np.zeros(k, np.float32)
        return cls(step=0, taken=0, m_K=nothing_K, v_K=nothing_K, s_K=s_K, coefficients=np.zeros(0, np.int64))

    def record(self) -> StepRecord:
        """Return the record of the previous step."""
        return StepRecord(
            step=self.step - 1,
            coefficients=tuple(self.coefficients.tolist()),
            loss=self.loss,
            flags=StepFlag(self.flags),
        )

    def to_bytes(self) -> bytes:
        """Encode the moments for storage between steps. The form is private to one machine."""
        file = io.BytesIO()
        numbers = np.array([self.step, self.taken, self.flags], np.int64)
        np.savez(
            file,
            numbers=numbers,
            loss=np.float64(self.loss),
            m=self.m_K,
            v=self.v_K,
            s=self.s_K,
            c=self.coefficients,
        )
        data = file.getvalue()
        # A run must not continue from a damaged file, because it would go on with other weights.
        return data + hashlib.sha256(data).digest()

    def store(self, path: Path) -> None:
        """Write the moments to a file, as a whole or not at all. They are durable on return."""
        # Moments say something about the user's text, so only the owner may read them.
        write_atomic(path, self.to_bytes(), mode=0o600)

    @classmethod
    def load(cls, path: Path) -> "Moments | None":
        """Read the moments. Return None if there is no file yet.

        Raises:
            OperatorError: the file is damaged.
        """
        try:
            return cls.from_bytes(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as exc:
            raise OperatorError(
                f"The state of the run in {path} is damaged: {exc}. Remove {path.parent} to begin it again."
            ) from exc

    @classmethod
    def from_bytes(cls, data: bytes) -> "Moments":
        """Read what `to_bytes` wrote.

        Raises:
            ValueError: the bytes are damaged.
        """
        data, checksum = data[:-32], data[-32:]
        if hashlib.sha256(data).digest() != checksum:
            raise ValueError("its checksum differs")
        try:
            # Allow no pickle, because a pickle in the file could run code.
            with np.load(io.BytesIO(data), allow_pickle=False) as found:
                step, taken, flags = (int(number) for number in found["numbers"])
                loss = float(found["loss"])
                m_K, v_K, s_K, c_Q = (found[name] for name in "mvsc")
        except (OSError, KeyError, EOFError, zipfile.BadZipFile) as exc:
            raise ValueError(f"its content is malformed: {exc}") from exc
        return cls(
            step=step, taken=taken, m_K=m_K, v_K=v_K, s_K=s_K, coefficients=c_Q, loss=loss, flags=flags
        )


def learning_rate(package: Package) -> float:
    """Return the rate of the first step, or 0 if all masked weights are 0.

    For k masked weights, the rate is `0.3 min(1, 6000 / k)` times their root mean square. A step moves every
    weight by up to the rate, and all these moves lower the loss. So the effect of a step grows with k, and
    the rate must fall. The rule was measured with k = 3,624, 5,808 and 106,230 (docs/adr/0009).

    An adapter adds `alpha / rank * B A x` to the output of a linear layer with input x. A step of B changes
    an output by up to `alpha * rate` times the mean size of the elements of `A x`, for any rank. So the rate
    is 0.12 over alpha.

    LoRA trains A, too. A step of A changes an element of `A x` by up to `width * rate` times the mean size of
    the inputs. The elements of B, which start at 0, are then about as large as `rate`. So the output changes
    by up to `alpha * width * rate^2` times the mean size of the inputs. The rate keeps this factor at 0.25 or
    below, with the mean of the widths of all layers as `width`. In "LoRA+" (Hayou et al., 2024), a rate that
    A and B share also falls with the square root of the width.
    """
    adapter = package.manifest.adapter
    if adapter is not None:
        rate = ADAPTER_RATE / adapter.alpha
        if adapter.kind is AdapterKind.LORA_FA:
            return rate
        # Linear layers without an adapter have a count of 0.
        widths = [tensor.shape[1] for tensor in package.manifest.tensors if tensor.count]
        return min(rate, 0.5 / math.sqrt(adapter.alpha * float(np.mean(widths))))
    w_base_K = package.values()
    share = min(1.0, FULL_RATE_WEIGHTS / len(w_base_K))
    return RATE * share * math.sqrt(float(np.mean(np.square(w_base_K, dtype=np.float64))))


def unit_exponent(rate: float) -> int:
    """Return the exponent of the step unit: the largest power of two that is at most `rate / UNITS`.

    >>> unit_exponent(0.256)  # 2**-10 is the largest power of two below 0.001
    -10
    """
    return math.frexp(rate / UNITS)[1] - 1


def adam_step(
    moments: Moments, loss: float, gradient_K: NDArray[np.float32], *, rate: float, step_unit_exponent: int
) -> Moments:
    """Take one step, which moves every weight by its own integer.

    Args:
        moments: the state before the step.
        loss: the loss of the step's batch.
        gradient_K: the gradient of that loss, at the state.
        rate: the rate of this step.
        step_unit_exponent: the exponent of the lattice's unit.

    Returns:
        The state after the step. If the loss or gradient is not finite, or the state would leave the exact
        range, the step is rejected: only its number, loss and flags change.
    """
    # A rejected step leaves the moments as they were. One NaN in the moments would spoil all later steps.
    rejected = replace(moments, step=moments.step + 1, loss=loss, flags=int(StepFlag.REJECTED))
    if not (math.isfinite(loss) and np.isfinite(gradient_K).all()):
        return rejected
    moved, change_K = _adam(moments, gradient_K, rate)
    # The unit is a power of two, so the division is exact. The sum is exact in float64 while |s| is within
    # 2**53, which is checked next (FORMAT 7.3).
    exact_K = np.rint(change_K / math.ldexp(1.0, step_unit_exponent)) + moments.s_K
    if np.abs(exact_K).max() > STATE_LIMIT:
        return rejected
    return replace(moved, step=moments.step + 1, s_K=exact_K.astype(np.int64), loss=loss, flags=0)


def _adam(
    moments: Moments, gradient_K: NDArray[np.float32], rate: float
) -> tuple[Moments, NDArray[np.float64]]:
    """Return the moments after a gradient, and the change of the weights, float64 [K]."""
    b1, b2 = (np.float32(beta) for beta in _BETAS)
    taken = moments.taken + 1
    m_K = b1 * moments.m_K + (1 - b1) * gradient_K
    v_K = b2 * moments.v_K + (1 - b2) * gradient_K * gradient_K
    # Moments are float32 to save memory. Moments start at 0, and the correction for that is in float64.
    mean_K = m_K.astype(np.float64) / (1 - _BETAS[0] ** taken)
    root_K = np.sqrt(v_K.astype(np.float64) / (1 - _BETAS[1] ** taken))
    return replace(moments, taken=taken, m_K=m_K, v_K=v_K), -rate * mean_K / (root_K + _TINY)

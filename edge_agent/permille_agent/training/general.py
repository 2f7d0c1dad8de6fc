"""What a personal state costs on general text, and the strength at which it costs no more than it may.

The package carries a small reference: public text and chat turns with the base's own answers. Training is
pulled towards the base on some of its rows (`gradient_steps`); the loss on other rows is measured here. A
package without a reference bounds nothing.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from permille.training.strength import EIGHTHS, choose_strength, scaled
from permille.zo.lattice import values
from permille_agent.training.run import Run, finite_or_none


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneralLoss:
    """The loss on the reference's measuring rows, nats a token; None where it was not finite.

    Attributes:
        strength: eighths of the trained state that are kept; 0: even one raises the loss by too much.
        loss_base: of the base.
        loss: of the state at that strength, or at one eighth where that is too much.
    """

    strength: int
    loss_base: float | None
    loss: float | None

    @property
    def rise(self) -> float | None:
        """How much the state raises the loss."""
        return None if self.loss is None or self.loss_base is None else self.loss - self.loss_base

    def __str__(self) -> str:
        if self.loss is None or self.loss_base is None or self.rise is None:
            return "not finite"
        return f"{self.loss_base:.4f} of the base -> {self.loss:.4f} ({self.rise:+.4f} nats a token)"


def keep_general(run: Run, s_K: NDArray[np.int64], step_unit_exponent: int) -> GeneralLoss | None:
    """Choose the strength of a trained state; durable on return. None where the package has no reference.

    Args:
        s_K: the trained state.
        step_unit_exponent: of its unit.
    """
    reference = run.reference
    if reference is None:
        return None

    def loss_of(values_K: NDArray[np.float32]) -> float:
        return reference.loss(run.engine, values_K)

    def choose() -> GeneralLoss:
        run.progress.phase("measuring what it still knows of general text")
        base = loss_of(run.w_base_K)

        def rise_of(eighths: int) -> float:
            return loss_of(values(run.w_base_K, scaled(s_K, eighths), step_unit_exponent)) - base

        found = choose_strength(rise_of, run.options.keep_general)
        return GeneralLoss(
            strength=found.eighths, loss_base=finite_or_none(base), loss=finite_or_none(base + found.rise)
        )

    return run.folder.once("general", GeneralLoss, choose)


def strength_words(eighths: int) -> str:
    """Say how much of a trained state is kept."""
    if not eighths:
        return "none: even an eighth of what was trained costs too much"
    return "all of what was trained" if eighths == EIGHTHS else f"{eighths}/{EIGHTHS} of what was trained"

"""Plan of pruning: method, share of zeros by layer, pattern, and recovery. This module needs no torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from permille.errors import InputError
from permille.models.families import Config, layer_of, scoped_tensors, shape_of

_PATTERN = re.compile(r"([1-9][0-9]?):([1-9][0-9]?)")
_LARGEST_GROUP = 32


class PruningMethod(StrEnum):
    """Method of choosing the weights to remove.

    MAGNITUDE removes the smallest weights. WANDA removes the weights whose size times the norm of their input
    is smallest (Sun et al., 2023). When SPARSEGPT removes a weight, it adjusts the later weights of the row.
    It removes the weights for which the error after this adjustment is smallest (Frantar and Alistarh, 2023).
    """

    MAGNITUDE = "magnitude"
    WANDA = "wanda"
    SPARSEGPT = "sparsegpt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """Pattern that keeps at most `kept` of each `of` neighbours along a row: 2:4 keeps two of four."""

    kept: int
    of: int

    @classmethod
    def parse(cls, text: str) -> "Pattern":
        """Parse a pattern.

        >>> Pattern.parse("2:4").rate
        0.5

        Raises:
            InputError: the text has another form, or nothing would be removed.
        """
        found = _PATTERN.fullmatch(text)
        if found is None or not int(found[1]) < int(found[2]) <= _LARGEST_GROUP:
            raise InputError(
                f"A pattern is two rising numbers such as 2:4, the second at most {_LARGEST_GROUP}, "
                f"not {text!r:.40}."
            )
        return cls(kept=int(found[1]), of=int(found[2]))

    @property
    def rate(self) -> float:
        """Return the share of zeros if every group has as many zeros as the pattern asks for."""
        return 1 - self.kept / self.of

    def check(self, config: Config) -> None:
        """Check that the pattern fits a model.

        Raises:
            InputError: the groups do not divide the rows of a linear layer.
        """
        for name, (_, width) in scoped_tensors(config):
            if width % self.of:
                raise InputError(
                    f"The pattern {self} does not fit {name}: groups of {self.of} do not divide its rows of "
                    f"{width}. Choose another pattern."
                )

    def __str__(self) -> str:
        return f"{self.kept}:{self.of}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PruningPlan:
    """Options of `prune_model`.

    Attributes:
        method: the method.
        rates: the share of zeros in every linear of a decoder layer: one share for all layers, or a mapping
            from the index of each layer to its share.
        pattern: the pattern of zeros, or None if zeros may be anywhere. With a rate below the pattern's own,
            only some of the zeros of the full pattern are made, so a group may keep more than `kept`.
        device: the device of torch. Another device may round differently.
    """

    method: PruningMethod
    rates: float | Mapping[int, float]
    pattern: Pattern | None = None
    device: str = "cpu"

    def rate(self, layer: int) -> float:
        """Return the share of zeros in a decoder layer."""
        return self.rates if isinstance(self.rates, float | int) else self.rates[layer]

    def check(self, config: Config) -> None:
        """Check that the plan fits a model.

        Raises:
            InputError: a rate is out of range or above the pattern's, a layer has no rate, or the pattern
                does not fit.
        """
        layers = shape_of(config).layers
        if isinstance(self.rates, Mapping) and self.rates.keys() != set(range(layers)):
            raise InputError(
                f"The model has {layers} decoder layers, and the plan has rates for {len(self.rates)}."
            )
        largest = 1.0 if self.pattern is None else self.pattern.rate
        for layer in range(layers):
            rate = self.rate(layer)
            # A rate of 1 would remove a layer's weights altogether.
            if not 0 <= rate <= largest or rate == 1:
                limit = "below 1" if self.pattern is None else f"at most {largest} with {self.pattern}"
                where = f" in layer {layer}" if isinstance(self.rates, Mapping) else ""
                raise InputError(f"The rate{where} must be at least 0 and {limit}, not {rate}.")
        if not any(self.rate(layer) > 0 for layer in range(layers)):
            raise InputError("All rates are 0: nothing would be removed.")
        if self.pattern is not None:
            self.pattern.check(config)

    def rate_of(self, name: str) -> float:
        """Return the share of zeros in a linear layer, by its name."""
        layer = layer_of(name)
        if layer is None:
            raise KeyError(name)
        return self.rate(layer)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPlan:
    """Options for fine-tuning a pruned model.

    Attributes:
        steps: the number of steps.
        rows: the number of rows in a step.
        rate: Adam's learning rate at the first step.
        rank: the rank of LoRA.
        seed: the seed of LoRA's initial values and of the order of the rows.
    """

    steps: int
    rows: int
    rate: float
    rank: int = 8
    seed: int = 0

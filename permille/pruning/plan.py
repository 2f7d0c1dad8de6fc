"""Plan of pruning: method, share of zeros by layer, pattern, and recovery. No torch."""

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

    MAGNITUDE: the smallest. WANDA: the smallest products of a weight's size and its input's norm (Sun et al.,
    2023). SPARSEGPT: those whose removal costs least once the others of their row make up for it, and they do
    (Frantar and Alistarh, 2023).
    """

    MAGNITUDE = "magnitude"
    WANDA = "wanda"
    SPARSEGPT = "sparsegpt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """Pattern with at most `kept` of `of` neighbours along a row not zero: 2:4 keeps two of four."""

    kept: int
    of: int

    @classmethod
    def parse(cls, text: str) -> "Pattern":
        """The pattern that a text such as "2:4" means.

        Raises:
            InputError: another form, or nothing to remove.
        """
        found = _PATTERN.fullmatch(text)
        if found is None or not int(found[1]) < int(found[2]) <= _LARGEST_GROUP:
            raise InputError(f"expected a pattern such as 2:4, at most :{_LARGEST_GROUP}, got {text!r:.40}")
        return cls(kept=int(found[1]), of=int(found[2]))

    @property
    def rate(self) -> float:
        """The share of zeros where every group is full."""
        return 1 - self.kept / self.of

    def check(self, config: Config) -> None:
        """
        Raises:
            InputError: the groups do not divide the rows of a linear.
        """
        for name, (_, width) in scoped_tensors(config):
            if width % self.of:
                raise InputError(f"{name}: expected rows of a multiple of {self.of} for {self}, got {width}")

    def __str__(self) -> str:
        return f"{self.kept}:{self.of}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PruningPlan:
    """Options of `prune_model`.

    Attributes:
        rates: the share of zeros in every linear of a decoder layer: one for all layers, or one by layer.
        pattern: None: anywhere. With rates below the pattern's own, a group may keep more than `kept`: the
            zeros are a part of some choice that fills it.
        device: where torch computes; another one may round in another way.
    """

    method: PruningMethod
    rates: float | Mapping[int, float]
    pattern: Pattern | None = None
    device: str = "cpu"

    def rate(self, layer: int) -> float:
        """The share of zeros in this decoder layer."""
        return self.rates if isinstance(self.rates, float | int) else self.rates[layer]

    def check(self, config: Config) -> None:
        """
        Raises:
            InputError: a rate out of range or above the pattern's, layers without a rate; as `Pattern.check`.
        """
        layers = shape_of(config).layers
        if isinstance(self.rates, Mapping) and self.rates.keys() != set(range(layers)):
            raise InputError(f"The model has {layers} decoder layers, the plan rates for {len(self.rates)}.")
        largest = 1.0 if self.pattern is None else self.pattern.rate
        for layer in range(layers):
            rate = self.rate(layer)
            if not 0 <= rate <= largest or rate == 1:
                limit = "below 1" if self.pattern is None else f"at most {largest} with {self.pattern}"
                where = f" in layer {layer}" if isinstance(self.rates, Mapping) else ""
                raise InputError(f"The rate{where} must be at least 0 and {limit}, not {rate}.")
        if not any(self.rate(layer) > 0 for layer in range(layers)):
            raise InputError("All rates are 0: nothing would be removed.")
        if self.pattern is not None:
            self.pattern.check(config)

    def rate_of(self, name: str) -> float:
        """The share of zeros in a linear, by its name."""
        layer = layer_of(name)
        if layer is None:
            raise KeyError(name)
        return self.rate(layer)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPlan:
    """Options for fine-tuning a pruned model.

    Attributes:
        rows: of a step.
        rate: Adam's at the first step.
        rank: of LoRA.
        seed: of LoRA's beginning and of the order of the rows.
    """

    steps: int
    rows: int
    rate: float
    rank: int = 8
    seed: int = 0

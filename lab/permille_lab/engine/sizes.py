"""A cell of the engine's benchmarks: a package of random codes and a batch of random tokens."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from permille.choices import Embeddings
from permille.package.reader import Package
from permille.quantization.types import Scheme
from permille.zo.estimators import Batch
from permille_lab.measuring.random_packages import SHAPES, random_package


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The model's shape, the batch's, and how it is measured.

    Attributes:
        layers: fewer layers than the shape has; None: all.
        rounds: how often everything is measured.
        tables: how the embedding and the head are stored.
    """

    shape: str
    layers: int | None
    sequences: int = 16
    tokens: int = 64
    threads: int = 1
    rounds: int = 3
    tables: Embeddings = Embeddings.SOURCE

    def settings(self) -> dict[str, Any]:
        """Name the cell. Earlier cells, all of `SOURCE`, do not name their tables."""
        found = asdict(self)
        if self.tables is Embeddings.SOURCE:
            del found["tables"]
        return found

    def package(
        self,
        folder: Path,
        scheme: Scheme = Scheme.NF4,
        *,
        upper_half: bool = False,
        density: float = 0.001,
    ) -> Package:
        """The random package, made once.

        Args:
            upper_half: only these layers have masked weights.
        """
        shape = SHAPES[self.shape].with_layers(self.layers)
        first = shape.layers // 2 if upper_half else 0
        return random_package(
            folder,
            shape,
            scheme=scheme,
            first_layer=first,
            density=density,
            tables=Embeddings(self.tables),
        )

    def batch(self, package: Package) -> Batch:
        """Full rows of random tokens; every token but the first of a row is a target."""
        shape = (self.sequences, self.tokens)
        target_BT = np.ones(shape, bool)
        target_BT[:, 0] = False
        vocabulary: int = package.config["vocab_size"]
        return Batch(
            input_ids_BT=np.random.default_rng(0).integers(0, vocabulary, shape),
            attention_BT=np.ones(shape, bool),
            target_BT=target_BT,
        )

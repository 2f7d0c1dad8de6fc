"""Inputs of the engine's benchmarks: a package of random codes and a batch of random tokens."""

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
    """The shapes of the model and the batch, and the options of the measurement.

    For example, a step of the 1.1B shape with 4 layers and 16 x 64 tokens on one thread:

        sizes = Sizes(shape="1.1B", layers=4)
        package = sizes.package(Path("build/bench"))
        batch = sizes.batch(package)

    Attributes:
        layers: number of layers, None for all layers of the shape.
        rounds: number of repetitions of each measurement.
        tables: format of the embedding and the head.
    """

    shape: str
    layers: int | None
    sequences: int = 16
    tokens: int = 64
    threads: int = 1
    rounds: int = 3
    tables: Embeddings = Embeddings.SOURCE

    def settings(self) -> dict[str, Any]:
        """Return the settings that identify the cell.

        `tables` is left out if it is `SOURCE`, since older results do not have the key.
        """
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
        """Return the random package. It is made once and then reused.

        Args:
            upper_half: if True, only the upper half of the layers has masked weights.
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
        """Return full rows of random tokens. Every token except the first of a row is a target."""
        shape = (self.sequences, self.tokens)
        target_BT = np.ones(shape, bool)
        target_BT[:, 0] = False
        vocabulary: int = package.config["vocab_size"]
        return Batch(
            input_ids_BT=np.random.default_rng(0).integers(0, vocabulary, shape),
            attention_BT=np.ones(shape, bool),
            target_BT=target_BT,
        )

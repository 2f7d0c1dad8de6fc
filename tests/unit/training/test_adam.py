"""Tests of the first step's rate: by size for sparse values, by alpha and width for adapters."""

from pathlib import Path

import numpy as np
import pytest

from permille.choices import AdapterKind
from permille.package.blobs import BlobFolder
from permille.package.build import ChosenAdapter
from permille.package.reader import Package
from permille.training.adam import learning_rate
from tests.unit.package.tiny import LLAMA, write_tiny


def package_of(folder: Path, kind: AdapterKind | None, *, alpha: int = 16, width: int = 32) -> Package:
    blobs = BlobFolder(folder)
    adapter = None if kind is None else ChosenAdapter(kind=kind, rank=2, alpha=alpha, scope="attention")
    tiny = write_tiny(blobs, adapter=adapter, config=LLAMA | {"hidden_size": width})
    return Package.open(blobs, tiny.digest)


def test_the_rate_of_sparse_values_is_a_share_of_their_size(tmp_path: Path) -> None:
    package = package_of(tmp_path, None)
    expected = 0.3 * np.sqrt(np.mean(package.values().astype(np.float64) ** 2))
    assert learning_rate(package) == pytest.approx(float(expected))


@pytest.mark.parametrize(
    ("kind", "alpha", "width", "rate"),
    [
        (AdapterKind.LORA_FA, 16, 32, 0.0075),
        (AdapterKind.LORA_FA, 4, 1024, 0.03),
        (AdapterKind.LORA, 16, 32, 0.0075),
        (AdapterKind.LORA, 4, 64, 0.03),
        (AdapterKind.LORA, 16, 1024, 0.5 / 128),
    ],
)
def test_the_rate_of_an_adapter_follows_from_alpha_and_width(
    kind: AdapterKind, alpha: int, width: int, rate: float, tmp_path: Path
) -> None:
    assert learning_rate(package_of(tmp_path, kind, alpha=alpha, width=width)) == pytest.approx(rate)

"""Tests of the catalogue of published models: computed numbers equal the published ones."""

import pytest

from permille.models.catalogue import CATALOGUE, Entry, Ran
from permille.models.descriptions import Family
from permille.quantization.types import Scheme

BY_NAME = {entry.name: entry for entry in CATALOGUE}


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.name)
def test_the_number_of_parameters_is_the_published_one(entry: Entry) -> None:
    assert entry.published in (None, entry.parameters)


def test_every_family_has_a_published_model() -> None:
    assert {entry.family for entry in CATALOGUE} == set(Family)


def test_sizes_are_those_of_packages_that_were_made() -> None:
    """The sizes are those in docs/results/real-model.md.

    SmolLM2's package has a tokenizer of 2 MB, the others have none.
    """
    smol = BY_NAME["SmolLM2-135M-Instruct"]
    assert smol.ran is Ran.REAL
    assert 0.95 * 92.9e6 < smol.package_bytes(Scheme.NF4) < 92.9e6
    assert BY_NAME["Qwen2.5-0.5B"].package_bytes(Scheme.NF4) == pytest.approx(348e6, rel=0.01)
    assert BY_NAME["TinyLlama-1.1B"].package_bytes(Scheme.NF4) == pytest.approx(690e6, rel=0.01)


def test_memory_of_a_step_is_that_of_the_shapes_that_were_measured() -> None:
    assert BY_NAME["Qwen2.5-0.5B"].training_bytes == pytest.approx(129e6, rel=0.03)
    assert BY_NAME["TinyLlama-1.1B"].training_bytes == pytest.approx(185e6, rel=0.03)

"""Tests of zeroth-order methods on one text: equal layer passes, and fixed weights below the mask."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from permille.engines.light.engine import LightEngine
from permille_agent.embed import package_tokenizer, prepare, read_documents
from permille_lab.learning.runs import TextRun
from permille_lab.real.zeroth_order import (
    GROUPS,
    KINDS,
    Contender,
    measure,
    with_momentum,
)
from tests.packages import tiny_package
from tests.unit.edge_agent.runs import user_text


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TextRun:
    folder = tmp_path_factory.mktemp("zeroth-order")
    package = tiny_package(folder / "blobs")
    documents, _ = read_documents([user_text(folder)])
    prepared = prepare(documents, package_tokenizer(package), row_tokens=32)
    return TextRun(package=package, engine=LightEngine(package), prepared=prepared, seed=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("normalised", [True, False])
def test_each_contender_takes_steps_for_as_many_layer_passes(
    run: TextRun, kind: str, normalised: bool
) -> None:
    made = [
        Contender(density=0.01, kind=kind, normalised=normalised, first_layer=first, norm=0.5)
        for first in (0, 1)
    ]
    found = [measure(run, contender, 64) for contender in made]
    for each in found:
        assert 64 * 2 <= each["layer_passes"] < 64 * 2 + 2 * 2 * 16
        assert np.isfinite(each["loss_after"])
        assert each["loss_after"] != each["loss_before"]
    assert found[1]["moving"] < found[0]["moving"] == run.package.k
    assert found[1]["steps"] > found[0]["steps"], "the lower layer is computed once a batch"


@pytest.mark.parametrize("change", [{"directions": (4,)}, {"directions": (4, 16)}, {"momentum": 0.9}])
def test_one_change_makes_another_cell_with_as_many_passes(run: TextRun, change: dict[str, Any]) -> None:
    plain = Contender(density=0.01, kind=GROUPS, normalised=True, first_layer=0, norm=0.5)
    changed = replace(plain, **change)
    assert plain.settings().keys() == {"density", "kind", "normalised", "first_layer", "norm", "seed"}
    assert changed.settings() == plain.settings() | change
    found, expected = measure(run, changed, 64), measure(run, plain, 64)
    assert 64 * 2 <= found["layer_passes"] < 64 * 2 + 2 * 2 * 16
    assert found["loss_after"] != expected["loss_after"]
    assert (found["steps"] > expected["steps"]) == ("directions" in change)


def test_momentum_is_a_velocity_that_decays() -> None:
    """Compare with heavy ball, `v = m v + (1 - m) c`, within half a lattice unit per step."""
    c_TQ = np.random.default_rng(0).integers(-5000, 5000, (12, 3))
    velocity_Q = moved_Q = np.zeros(3)
    for c_Q in c_TQ:
        velocity_Q = 0.9 * velocity_Q + 0.1 * c_Q
        moved_Q = moved_Q + velocity_Q
    assert np.abs(with_momentum(c_TQ, 0.9).sum(axis=0) - moved_Q).max() < 12 * 0.6
    np.testing.assert_array_equal(with_momentum(c_TQ, 0.0), c_TQ)

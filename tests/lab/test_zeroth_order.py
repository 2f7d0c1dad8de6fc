"""Zeroth orders on one text: as many layer passes for each, and no weight below the first layer moves."""

import numpy as np
import pytest

from permille.engines.light.engine import LightEngine
from permille_agent.embed import package_tokenizer, prepare, read_documents
from permille_lab.learning.runs import TextRun
from permille_lab.real.zeroth_order import _KINDS, Contender, measure
from tests.packages import tiny_package
from tests.unit.edge_agent.runs import user_text


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TextRun:
    folder = tmp_path_factory.mktemp("zeroth-order")
    package = tiny_package(folder / "blobs")
    documents, _ = read_documents([user_text(folder)])
    prepared = prepare(documents, package_tokenizer(package), row_tokens=32)
    return TextRun(package=package, engine=LightEngine(package), prepared=prepared, seed=0)


@pytest.mark.parametrize("kind", _KINDS)
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

"""Tests of the page about a mask: its curve, and shares by kind, layer and tensor."""

import numpy as np
import pytest

from permille.sensitivity.coverage import mask_report
from permille_console.masks import MaskEvidence, MaskOrder, curve_at_density, parts_of

KINDS = ("self_attn.q_proj", "mlp.up_proj")
NAMES = [f"model.layers.{layer}.{kind}.weight" for layer in (0, 1, 10) for kind in KINDS]


def evidence(*, best_of_all: bool) -> MaskEvidence:
    """Return a report of six tensors of 1,000 weights.

    A tenth is selected, of each tensor or of all together.
    """
    rng = np.random.default_rng(0)
    scores = {
        name: (rng.random((10, 100)) ** 8 * 10**number).astype(np.float32)
        for number, name in enumerate(NAMES)
    }
    if not best_of_all:
        mask = {name: np.argsort(one.ravel())[-100:].astype(np.uint32) for name, one in scores.items()}
    else:
        every = np.concatenate([one.ravel() for one in scores.values()])
        least = np.sort(every)[-600]
        mask = {name: np.flatnonzero(one.ravel() >= least).astype(np.uint32) for name, one in scores.items()}
    return MaskEvidence.model_validate(mask_report(scores, mask))


def test_the_curve_is_above_a_mask_of_each_tensor_and_meets_one_of_all() -> None:
    each, best = evidence(best_of_all=False), evidence(best_of_all=True)
    reach = curve_at_density(each)
    assert reach is not None
    assert reach > each.coverage + 0.01
    assert reach == pytest.approx(best.coverage, abs=0.01)
    assert curve_at_density(MaskEvidence(k=0, numel=0, coverage=0, curve=[], tensors=[])) is None


def test_parts_add_up_by_kind_by_layer_and_by_tensor_in_the_order_asked_for() -> None:
    report = evidence(best_of_all=True)
    found = dict(parts_of(report, MaskOrder.LAYER))
    assert [part.name for part in found["Kind"]] == list(KINDS)
    assert [part.name for part in found["Layer"]] == ["layer 0", "layer 1", "layer 10"]
    assert [part.name for part in found["Tensor"]] == NAMES
    for parts in found.values():
        assert sum(part.count for part in parts) == report.k
    last = found["Layer"][-1]
    rows = report.tensors[-2:]
    assert last.density == sum(row.count for row in rows) / 2000
    held = sum(row.coverage * row.score for row in rows)
    assert last.coverage == pytest.approx(held / sum(row.score for row in rows))
    densest = dict(parts_of(report, MaskOrder.DENSITY))["Tensor"]
    assert [part.density for part in densest] == sorted((part.density for part in densest), reverse=True)
    assert densest[0].name == NAMES[-1]

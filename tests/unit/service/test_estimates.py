"""Estimates against sizes counted by hand, and the verdict."""

from typing import Any

import pytest

from permille.schemas.bases import BasisOptions
from permille.schemas.evaluations import EvaluationOptions
from permille.schemas.masks import FisherMask, MaskMethod, WeightMask
from permille.schemas.quantizations import AutoRound, Int4, Nf4, SchemeName
from permille.sensitivity.basis import block_columns
from permille_lab.evaluate import schemes
from permille_service.preflights.estimates import (
    PROCESS_BYTES,
    Needs,
    basis_needs,
    mask_needs,
    quantization_needs,
    sizes_of,
)
from permille_service.preflights.evaluation_costs import CALIBRATED, TaskFacts, cells_of, evaluation_needs
from permille_service.preflights.machine import Machine
from permille_service.preflights.verdict import judge, require
from permille_service.problems import ApiError
from tests.packages import TINY_LLAMA

CORPUS = "corpus_01jd3kq8z7m4n5p6r7s8t9v0wx"
SIZES = sizes_of(TINY_LLAMA)
FISHER = FisherMask(method=MaskMethod.FISHER, corpus_id=CORPUS, sequences=10, length=16)


def test_sizes_are_counted_from_the_config() -> None:
    # A layer: q, o 32x32; k, v 16x32; gate, up, down 64x32.
    layer = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32
    assert (SIZES.layers, SIZES.scoped, SIZES.largest) == (2, 2 * layer, 64 * 32)
    assert SIZES.parameters == 320 * 32 + 2 * (layer + 2 * 32) + 32
    assert (SIZES.hidden, SIZES.vocabulary) == (32, 320)
    assert sizes_of(TINY_LLAMA, "layers:1").scoped == layer


def test_fisher_holds_weights_and_scores_and_spills_scores_that_do_not_fit() -> None:
    roomy = mask_needs(SIZES, FISHER, memory_bytes=None, flops_per_s=1e9)
    tight = mask_needs(SIZES, FISHER, memory_bytes=roomy.memory_bytes - 1, flops_per_s=1e9)
    assert roomy.memory_bytes > PROCESS_BYTES + 4 * (SIZES.parameters + SIZES.scoped)
    assert roomy.memory_bytes - tight.memory_bytes == 4 * SIZES.scoped
    work = 10 * 16 * SIZES.parameters * 8
    assert roomy.seconds == pytest.approx(work / 1e9, rel=0.1)


def test_other_methods_hold_one_tensor() -> None:
    needs = mask_needs(SIZES, WeightMask(method=MaskMethod.MAGNITUDE), memory_bytes=None, flops_per_s=1e9)
    assert needs.memory_bytes < PROCESS_BYTES + 4 * 5 * SIZES.largest


def test_a_basis_keeps_a_gradient_of_each_sequence_on_the_disk() -> None:
    options = BasisOptions(sequences=64, length=16, rank=8)
    small = basis_needs(SIZES, options, k=100, flops_per_s=1e9)
    large = basis_needs(SIZES, options, k=10_100, flops_per_s=1e9)
    assert large.disk_bytes - small.disk_bytes == 10_000 * (64 * 4 + 2 * 8)
    assert large.memory_bytes >= PROCESS_BYTES + 10_100 * (16 * 64 + 4 * 8)
    assert small.seconds == pytest.approx(64 * 16 * SIZES.parameters * 8 / 1e9, rel=0.1)


def test_perplexity_costs_memory_and_time() -> None:
    options = Nf4(scheme=SchemeName.NF4)
    with_it = quantization_needs(SIZES, options, evaluated=True, flops_per_s=1e9)
    without = quantization_needs(SIZES, options, evaluated=False, flops_per_s=1e9)
    assert with_it.seconds - without.seconds == pytest.approx(8192 * SIZES.parameters * 4 / 1e9)
    assert with_it.memory_bytes > without.memory_bytes


def test_auto_round_holds_the_model_and_takes_steps() -> None:
    texts = {"calibration_corpus_id": "corpus_01jd3kq8z7m4n5p6r7s8t9v0wx", "calibration_length": 64}
    options = AutoRound.model_validate({"scheme": "auto-round", **texts})
    nearest = Int4(scheme=SchemeName.INT4, group_size=128)
    with_it = quantization_needs(SIZES, options, evaluated=False, flops_per_s=1e9)
    without = quantization_needs(SIZES, nearest, evaluated=False, flops_per_s=1e9)
    assert with_it.seconds - without.seconds == pytest.approx(200 * 8 * 64 * SIZES.scoped * 8 / 1e9)
    assert with_it.memory_bytes >= PROCESS_BYTES + 4 * SIZES.parameters * 4
    assert with_it.disk_bytes == without.disk_bytes
    evaluated = quantization_needs(SIZES, options, evaluated=True, flops_per_s=1e9)
    assert evaluated.memory_bytes >= with_it.memory_bytes


def test_steps_in_a_row_need_the_larger_memory_and_the_sum_of_the_rest() -> None:
    first = Needs(memory_bytes=5, disk_bytes=1, seconds=2.0)
    assert first.then(Needs(memory_bytes=3, disk_bytes=4, seconds=1.0)) == Needs(
        memory_bytes=5, disk_bytes=5, seconds=3.0
    )


def test_verdict_names_what_is_missing_and_lets_the_unknown_pass() -> None:
    needs = Needs(memory_bytes=100, disk_bytes=100, seconds=10.0)
    unknown = Machine(memory_bytes=None, disk_bytes=None, flops_per_s=1.0, max_job_s=10.0)
    assert judge(needs, unknown).accepted
    small = Machine(memory_bytes=99, disk_bytes=100, flops_per_s=1.0, max_job_s=9.0)
    with pytest.raises(ApiError, match=r"memory.*time") as caught:
        require(needs, small)
    assert [figure.enough for figure in caught.value.figures or ()] == [False, True, False]


def test_a_basis_of_many_sequences_needs_blocks_of_them_and_their_products() -> None:
    options = BasisOptions(sequences=8192, length=16, rank=8)
    needs = basis_needs(SIZES, options, k=1 << 20, flops_per_s=1e9)
    assert needs.memory_bytes > PROCESS_BYTES + (16 << 22) + 24 * 8192**2
    without = 2.0 * 8192 * (8192 + 16 * 8) * (1 << 20) / 1e9
    assert needs.seconds > without + 10 * 8192**3 / 1e9
    assert block_columns(8192) == max(256, (1 << 22) // 8192)  # the preflight may not import the method


ROW = TaskFacts(size_bytes=1000, tokens=10, longest=40)


def sweep(**changes: object) -> EvaluationOptions:
    body = {"tasks": {"sst2": {"train": "a.tsv"}}, "methods": ["zero-shot"], "seeds": [0], **changes}
    return EvaluationOptions.model_validate(body)


def seconds(options: EvaluationOptions, *, tasks: int = 1) -> float:
    return evaluation_needs([SIZES], options, [ROW] * tasks, cells=1, flops_per_s=1e9).seconds


def test_cells_are_counted() -> None:
    options = sweep(methods=["zero-shot", "icl:1"], seeds=[0, 1, 2], bases=["nf4", "bf16"])
    assert cells_of(options, 2) == 24


def test_a_zeroth_order_method_takes_two_passes_a_query_for_every_run() -> None:
    few = sweep(methods=["zo:random"], zo_steps=1000, queries=2, trials=3, seeds=[0, 1])
    more = sweep(methods=["zo:random"], zo_steps=3000, queries=2, trials=3, seeds=[0, 1])
    runs, passes, batch = 3 + 2, 2 * 2, 16
    run = 2000 * passes * batch * ROW.tokens * 2 * SIZES.parameters / 1e9
    assert seconds(more) - seconds(few) == pytest.approx(runs * run)
    # Further tuning seeds try the best step size and its neighbours; one trial is no search.
    wide, long = (one.model_copy(update={"tuning_seeds": 3}) for one in (few, more))
    assert seconds(long) - seconds(wide) == pytest.approx((runs + 2 * 3) * run)
    single, alone = (one.model_copy(update={"trials": 1}) for one in (wide, few))
    assert seconds(single) == seconds(alone)
    one = sweep(methods=["zo:random"], zo_steps=1000, queries=64, estimator="forward", seeds=[0, 1])
    other = sweep(methods=["zo:random"], zo_steps=1000, queries=1, estimator="forward", seeds=[0, 1])
    assert seconds(one) == seconds(other)


def test_time_grows_with_bases_tasks_seeds_and_shots_but_not_above_the_longest_prompt() -> None:
    alone = seconds(sweep())
    assert seconds(sweep(bases=["nf4", "bf16"])) == pytest.approx(2 * alone)
    assert seconds(sweep(), tasks=2) > alone
    assert seconds(sweep(seeds=[0, 1])) > alone
    assert seconds(sweep(methods=["icl:1"])) > alone
    assert seconds(sweep(bases=["squeezellm"])) > alone
    assert CALIBRATED == schemes.CALIBRATED  # the preflight may not import what needs torch
    assert seconds(sweep(methods=["icl:50"])) == seconds(sweep(methods=["icl:100"]))


@pytest.mark.parametrize(
    ("choices", "copies"),
    [
        ({"methods": ["zo:full"], "queries": 64, "estimator": "spsa"}, 149),
        ({"methods": ["zo:full"], "queries": 64, "estimator": "forward"}, 86),
        ({"methods": ["zo:sensitive-task"]}, 10),
        ({"methods": ["zo:random-dynamic"], "density": 0.5}, 23),
    ],
)
def test_no_estimate_of_memory_is_below_what_was_measured(choices: dict[str, Any], copies: int) -> None:
    """`copies`: peaks of small models' runs, in float32 copies of their weights; of all weights, one more for
    the best of earlier attempts."""
    needs = evaluation_needs([SIZES], sweep(**choices), [ROW], cells=1, flops_per_s=1e9)
    assert needs.memory_bytes >= PROCESS_BYTES + copies * 4 * SIZES.parameters


def test_memory_grows_with_the_results_that_the_worker_holds() -> None:
    few, many = (
        evaluation_needs([SIZES], sweep(), [ROW], cells=cells, flops_per_s=1e9).memory_bytes
        for cells in (1, 1001)
    )
    assert many - few >= 1000 * 200 * sweep().sizes[2]


def test_training_all_weights_takes_the_memory_of_their_moments() -> None:
    def memory(*methods: str) -> int:
        needs = evaluation_needs([SIZES], sweep(methods=list(methods)), [ROW], cells=1, flops_per_s=1e9)
        return needs.memory_bytes

    assert memory("fo:full") - memory("fo:random") == 18 * 4 * SIZES.parameters
    assert memory("fo:random") > PROCESS_BYTES + 4 * 3 * SIZES.parameters
    nothing = evaluation_needs([], sweep(), [ROW], cells=1, flops_per_s=1e9)
    assert (nothing.memory_bytes, nothing.seconds) == (0, 0.0)  # of models that no worker has read yet

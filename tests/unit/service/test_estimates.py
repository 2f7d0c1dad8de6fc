"""Tests of estimates against sizes counted by hand, and of their verdict."""

from permille.choices import MaskMethod
from permille.schemas.masks import FisherMask, WeightMask
from permille.schemas.quantizations import AutoRound, Int4, Int8, Nf4, SchemeName
from permille_service.preflights.estimates import (
    PROCESS_BYTES,
    Capacity,
    Needs,
    mask_needs,
    package_needs,
    quantization_needs,
    sizes_of,
)
from permille_service.preflights.planning import compare
from tests.packages import TINY_LLAMA

CORPUS = "corpus_01jd3kq8z7m4n5p6r7s8t9v0wx"
SIZES = sizes_of(TINY_LLAMA)
FISHER = FisherMask(method=MaskMethod.FISHER, corpus_id=CORPUS, sequences=10, length=16)


def test_sizes_are_counted_from_the_config() -> None:
    # A layer: q and o have 32x32 weights, k and v 16x32, gate, up and down 64x32.
    layer = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32
    assert (SIZES.layers, SIZES.scoped, SIZES.largest) == (2, 2 * layer, 64 * 32)
    assert SIZES.parameters == 320 * 32 + 2 * (layer + 2 * 32) + 32
    assert (SIZES.hidden, SIZES.vocabulary) == (32, 320)
    assert sizes_of(TINY_LLAMA, "layers:1").scoped == layer
    assert (SIZES.lora_rank, SIZES.lora_fa_rank) == (16 * 32 // 48, 32)


def test_the_vocabulary_is_that_of_the_config_even_if_another_tensor_is_larger() -> None:
    """Phi-3-medium's stacked gate has more rows than its embedding."""
    sizes = sizes_of(TINY_LLAMA | {"vocab_size": 16})
    assert (sizes.vocabulary, sizes.hidden) == (16, TINY_LLAMA["hidden_size"])
    assert sizes.largest > sizes.vocabulary * sizes.hidden


def test_fisher_holds_weights_and_scores_and_spills_scores_that_do_not_fit() -> None:
    roomy = mask_needs(SIZES, FISHER, memory_bytes=None, split_flops=1e99)
    tight = mask_needs(SIZES, FISHER, memory_bytes=roomy.memory_bytes - 1, split_flops=0)
    assert roomy.memory_bytes > PROCESS_BYTES + 4 * (SIZES.parameters + SIZES.scoped)
    assert roomy.memory_bytes - tight.memory_bytes == 4 * SIZES.scoped
    assert tight.disk_bytes - roomy.disk_bytes == 4 * SIZES.scoped  # scores of its only shard


def test_other_methods_hold_one_tensor() -> None:
    needs = mask_needs(SIZES, WeightMask(method=MaskMethod.MAGNITUDE), memory_bytes=None, split_flops=0)
    assert needs.memory_bytes < PROCESS_BYTES + 4 * 5 * SIZES.largest


def test_perplexity_costs_memory() -> None:
    options = Nf4(scheme=SchemeName.NF4)
    with_it = quantization_needs(SIZES, options, evaluated=True, memory_bytes=None)
    without = quantization_needs(SIZES, options, evaluated=False, memory_bytes=None)
    assert with_it.memory_bytes > without.memory_bytes


def test_auto_round_holds_the_model() -> None:
    texts = {"calibration_corpus_id": "corpus_01jd3kq8z7m4n5p6r7s8t9v0wx", "calibration_length": 64}
    options = AutoRound.model_validate({"scheme": "auto-round", **texts})
    nearest = Int4(scheme=SchemeName.INT4, group_size=128)
    with_it = quantization_needs(SIZES, options, evaluated=False, memory_bytes=None)
    without = quantization_needs(SIZES, nearest, evaluated=False, memory_bytes=None)
    assert with_it.memory_bytes >= PROCESS_BYTES + 4 * SIZES.parameters * 4
    assert with_it.disk_bytes == without.disk_bytes
    evaluated = quantization_needs(SIZES, options, evaluated=True, memory_bytes=None)
    assert evaluated.memory_bytes >= with_it.memory_bytes


def test_int8_has_twice_the_codes() -> None:
    disk: dict[str, int] = {}
    for options in (Int4(scheme=SchemeName.INT4, group_size=128), Int8(scheme=SchemeName.INT8)):
        needs = quantization_needs(SIZES, options, evaluated=False, memory_bytes=None)
        disk[options.scheme] = needs.disk_bytes
    assert disk["int8"] - disk["int4"] == SIZES.scoped // 2


def test_a_basis_needs_the_memory_of_training_and_keeps_moments() -> None:
    plain, learned = (package_needs(SIZES, basis=basis) for basis in (False, True))
    trained = SIZES.scoped // 100
    # Eight pseudo-users have displacements in float64, and moments. A step has three rows of 128 tokens.
    assert learned.disk_bytes - plain.disk_bytes >= 8 * (4 + 4 + 8) * trained
    assert learned.memory_bytes >= PROCESS_BYTES + 3 * 128 * SIZES.layers * SIZES.hidden * 4 + 8 * 8 * trained
    assert plain.memory_bytes < learned.memory_bytes


def test_jobs_in_a_row_need_the_larger_memory_and_the_sum_of_the_disk() -> None:
    first = Needs(memory_bytes=5, disk_bytes=1)
    assert first.then(Needs(memory_bytes=3, disk_bytes=4)) == Needs(memory_bytes=5, disk_bytes=5)


def test_verdict_names_what_is_missing_and_lets_the_unknown_pass() -> None:
    needs = Needs(memory_bytes=100, disk_bytes=100)
    unknown = Capacity(memory_bytes=None, disk_bytes=None)
    assert compare(needs, unknown).accepted
    small = Capacity(memory_bytes=99, disk_bytes=100)
    verdict = compare(needs, small)
    assert not verdict.accepted
    assert [figure.enough for figure in verdict.figures] == [False, True]

"""The paired bootstrap against known answers, and losses by document."""

from pathlib import Path

import numpy as np
import pytest

from permille.errors import InputError
from permille_agent.text.rows import document_rows
from permille_agent.text.tokens import TokenizedDocument
from permille_agent.training.evaluation import DocumentLosses, document_losses, mean_loss, paired_bootstrap
from tests.bigram_engine import BigramEngine
from tests.packages import tiny_package


def test_losses_by_document_are_those_of_each_document_alone(tmp_path: Path) -> None:
    package = tiny_package(tmp_path)
    engine = BigramEngine(package)
    rng = np.random.Generator(np.random.PCG64(0))
    documents = [
        TokenizedDocument(
            rng.integers(3, 300, length), np.arange(length) % 3 != 0, np.full(length, 2, dtype=np.int64)
        )
        for length in (5, 30, 12, 2)
    ]
    rows = document_rows(documents, 8)
    values_K = package.values()

    losses = document_losses(engine, values_K, rows, 4)

    for index, document in enumerate(documents):
        alone = document_losses(engine, values_K, document_rows([document], 8), 1)
        assert losses.nats_D[index] == pytest.approx(alone.nats_D[0], rel=1e-6)
        assert losses.tokens_D[index] == sum(int(r.target_T.sum()) for r in document_rows([document], 8))
    assert losses.bytes_D.tolist() == (2 * losses.tokens_D).tolist()
    assert mean_loss(engine, values_K, rows) == pytest.approx(losses.per_token, rel=1e-6)


def test_bits_per_byte_and_per_token() -> None:
    losses = DocumentLosses(np.array([np.log(2) * 8, np.log(2) * 4]), np.array([2, 2]), np.array([4, 2]))

    assert losses.per_token == pytest.approx(np.log(2) * 3)
    assert losses.bits_per_byte == pytest.approx(2.0)


def test_the_interval_is_that_of_the_normal_limit() -> None:
    rng = np.random.Generator(np.random.PCG64(1))
    difference_D = rng.normal(0.3, 1.0, 400)
    weight_D = np.full(400, 10)

    found = paired_bootstrap(difference_D + 5.0, np.full(400, 5.0), weight_D, seed=0)

    error = difference_D.std(ddof=1) / np.sqrt(400) / 10
    assert found.improvement == pytest.approx(difference_D.mean() / 10)
    assert found.standard_error == pytest.approx(error, rel=0.05)
    assert found.low == pytest.approx(found.improvement - 1.96 * error, abs=0.15 * error)
    assert found.high == pytest.approx(found.improvement + 1.96 * error, abs=0.15 * error)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.Generator(np.random.PCG64(2))
    covered = 0
    for trial in range(200):
        difference_D = rng.normal(0.1, 1.0, 40)
        found = paired_bootstrap(difference_D, np.zeros(40), np.ones(40, np.int64), seed=trial, resamples=500)
        covered += found.low <= 0.1 <= found.high
    assert 175 <= covered <= 199


def test_few_documents_without_a_difference_are_seldom_better() -> None:
    rng = np.random.Generator(np.random.PCG64(5))
    better = 0
    for trial in range(600):
        difference_D = rng.normal(0.0, 1.0, 8)
        found = paired_bootstrap(difference_D, np.zeros(8), np.ones(8, np.int64), seed=trial, resamples=1000)
        better += found.better
    assert better <= 24  # 2.5% are 15; plain quantiles give 36


def test_pairing_sees_small_steady_differences_between_documents_that_differ_much() -> None:
    base_D = np.linspace(1.0, 100.0, 30)

    found = paired_bootstrap(base_D, base_D * 0.99, np.full(30, 7), seed=0)

    assert found.better
    assert found.low > 0


def test_noise_and_harm_are_not_better() -> None:
    rng = np.random.Generator(np.random.PCG64(3))
    base_D = rng.normal(50.0, 5.0, 60)
    noise_D = base_D + rng.normal(0.0, 1.0, 60)

    assert not paired_bootstrap(base_D, base_D, np.full(60, 9), seed=0).better
    assert not paired_bootstrap(base_D, noise_D, np.full(60, 9), seed=0).better
    assert not paired_bootstrap(base_D, base_D + 1.0, np.full(60, 9), seed=0).better


def test_a_loss_that_is_not_finite_is_never_better() -> None:
    base_D = np.full(20, 5.0)
    for bad in (np.nan, np.inf, -np.inf):
        personal_D = np.full(20, 1.0)
        personal_D[3] = bad
        assert not paired_bootstrap(base_D, personal_D, np.full(20, 3), seed=0).better


def test_the_same_seed_gives_the_same_bits_whatever_the_blocks() -> None:
    rng = np.random.Generator(np.random.PCG64(4))
    base_D, personal_D = rng.normal(5, 1, 50), rng.normal(4.9, 1, 50)

    first = paired_bootstrap(base_D, personal_D, np.full(50, 3), seed=9)

    assert first == paired_bootstrap(base_D, personal_D, np.full(50, 3), seed=9)
    assert first != paired_bootstrap(base_D, personal_D, np.full(50, 3), seed=10)


def test_a_model_is_not_better_because_its_tokenizer_leaves_bytes_out() -> None:
    bytes_D = np.arange(40, 80)
    fewer_D = bytes_D - 5  # short documents, whose first token is no target
    nats_D, equal_D, worse_D = (
        0.7 * bytes_D.astype(np.float64),
        0.7 * fewer_D.astype(np.float64),
        0.75 * fewer_D.astype(np.float64),
    )

    equal = paired_bootstrap(nats_D, equal_D, bytes_D, second_weight_D=fewer_D, seed=0)

    assert not equal.better
    assert equal.improvement == pytest.approx(0.0, abs=1e-12)
    assert paired_bootstrap(nats_D, worse_D, bytes_D, second_weight_D=fewer_D, seed=0).high < 0
    assert paired_bootstrap(nats_D, worse_D, bytes_D, seed=0).better  # what the bytes left out would hide


def test_refuses_one_document_or_lengths_that_differ() -> None:
    one = np.ones(1)
    with pytest.raises(InputError, match="two or more documents, got 1, 1 and 1"):
        paired_bootstrap(one, one, np.ones(1, np.int64), seed=0)
    with pytest.raises(InputError, match="got 3, 2 and 3"):
        paired_bootstrap(np.ones(3), np.ones(2), np.ones(3, np.int64), seed=0)

"""Tests of losses per document."""

from pathlib import Path

import numpy as np
import pytest

from permille_agent.text.rows import document_rows
from permille_agent.text.tokens import TokenizedDocument
from permille_agent.training.evaluation import DocumentLosses, document_losses, mean_loss
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

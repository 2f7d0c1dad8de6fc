"""A short `python -m tests.rounds.crashes`."""

import pytest

from tests.rounds import crashes
from tests.rounds.crashes import measure


def test_every_summed_vector_is_charged_once_whatever_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    # At one in a hundred, a busy machine had a run without a SIGKILL.
    monkeypatch.setattr(crashes, "_KILLED_SHARE", 0.06)
    found = measure(trials=150, seed=7)
    assert found.trials == 150
    assert found.trials - found.after_commit > 60
    assert found.killed > 0
    assert found.rounds > 10
    assert (found.charged_twice, found.lost, found.beyond) == (0, 0, 0)

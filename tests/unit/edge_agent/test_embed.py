"""Tests of the interface for programs that embed the agent: it trains the same values as the agent."""

from pathlib import Path

import numpy as np
import pytest

from permille.schemas.runs import Outcome
from permille_agent import embed
from permille_agent.link.extension import AgentExtension
from permille_agent.state.models import installed_release
from tests.bigram_engine import BigramEngine, bigram_engine
from tests.packages import tiny_package
from tests.unit.edge_agent.runs import QUICK, user_text


def test_a_program_trains_without_a_home_and_goes_on_after_a_kill(tmp_path: Path) -> None:
    package = tiny_package(tmp_path / "blobs")
    documents, _ = embed.read_documents([user_text(tmp_path)])
    tokenizer = embed.package_tokenizer(package)
    prepared = embed.prepare(documents, tokenizer, row_tokens=QUICK.row_tokens)

    def train(folder: str, start_K: np.ndarray | None = None) -> embed.Personalised:
        engine = BigramEngine(package)
        return embed.personalise(package, engine, prepared, QUICK, folder=tmp_path / folder, start_K=start_K)

    found = train("run")

    losses = {evaluation.step: evaluation.loss or np.inf for evaluation in found.curve}
    assert list(losses) == list(range(0, found.steps + 1, 2))
    assert losses[found.step] == min(losses.values()) < losses[0]
    seconds = [evaluation.seconds for evaluation in found.curve]
    assert seconds[0] > 0 and seconds == sorted(seconds)
    assert embed.mean_loss(BigramEngine(package), found.values_K, prepared.select) == losses[found.step]
    (journal,) = (tmp_path / "run").glob("*.journal")
    journal.write_bytes(journal.read_bytes()[:-60])
    assert (train("run").values_K == found.values_K).all()
    further = train("further", found.values_K)
    assert further.curve[0].loss == losses[found.step]


def test_a_program_installs_a_package_and_trains_in_a_home(tmp_path: Path) -> None:
    package = tiny_package(tmp_path / "elsewhere")
    home = embed.open_home(tmp_path / "home")

    embed.install_package(home, package)

    installed = installed_release(home)
    assert installed is not None and installed.manifest_digest == package.digest
    context = embed.RunContext(engine_of=bigram_engine)
    result = embed.run_training(home, [user_text(tmp_path)], QUICK, context)
    assert result.outcome is Outcome.ADOPTED
    assert [run.name for run in embed.list_runs(home)] == [result.run]


def test_extensions_add_names_and_no_other_name_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    adding = AgentExtension(name="a", title="a", status=lambda _home: None, embedded={"take_part": len})
    monkeypatch.setattr(embed, "agent_extensions", lambda: (adding,))
    assert embed.take_part is len
    with pytest.raises(AttributeError, match=r"permille_agent\.embed' has no attribute 'nothing'"):
        _ = embed.nothing

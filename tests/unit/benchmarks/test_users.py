"""People under four states, on the real agent's phases with an engine that starts in no time."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from permille.errors import InputError
from permille.zo.estimators import Batch
from permille_agent.training.options import TrainOptions
from permille_agent.training.train import package_tokenizer
from permille_lab.benchmarks.cells import Cells
from permille_lab.benchmarks.user_runs import Bench, targets
from permille_lab.benchmarks.users import POOL, main, measured, measured_onward, pairs, settings_of
from permille_lab.benchmarks.users_page import FIGURE, groups_of, is_onward, page, restore, write
from permille_lab.evaluate.personal import FURTHER, State
from permille_lab.evaluate.user_texts import Collection, User, own_words
from tests.bigram_engine import bigram_engine
from tests.packages import sentences
from tests.unit.edge_agent.runs import home_with_package


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    home, package = home_with_package(tmp_path)
    return Bench(
        home=home,
        package=package,
        engine=bigram_engine(package),
        tokenizer=package_tokenizer(package),
        options=TrainOptions(steps=8, queries=2, row_tokens=32),
    )


def people(count: int, *, documents: int = 60) -> list[User]:
    """Each ends every sentence in a way of their own."""
    found = []
    for number in range(count):
        common = sentences(documents, seed=number)
        own = tuple({"text": f"{text} {'xyzw'[number % 4] * 12}"} for text in common)
        found.append(User(name=f"p{number}", documents=own))
    return found


def test_parts_share_no_document_and_the_seed_decides(bench: Bench) -> None:
    (user,) = people(1)
    person = bench.person(user)
    parts = [person.train, person.select, person.test]
    assert sum(map(len, parts)) == len({own_words(row) for row in user.documents})
    assert targets(person.train) > targets(person.test) > targets(person.select) >= 30
    again = bench.person(replace(user, documents=user.documents[::-1]))
    assert [targets(part) for part in (again.train, again.select, again.test)] == [*map(targets, parts)]
    other = replace(bench, options=replace(bench.options, seed=1)).person(user)
    assert other.held_out_words != person.held_out_words


def test_who_wrote_too_little_is_left_out(bench: Bench) -> None:
    few = User(name="few", documents=({"text": "just this"},))
    with pytest.raises(InputError, match="in each part of few's text"):
        bench.person(few)
    found = pairs(bench, [few, *people(4)], 3)
    assert [[person.name for person in pair] for pair in found] == [["p0", "p1"], ["p2", "p3"]]
    assert pairs(bench, [few, *people(4)], 2)[0][0].name == "p0"


def test_the_pool_is_as_long_and_holds_nothing_held_out(bench: Bench) -> None:
    users = people(4)
    # A stranger who says what the person's test part says must not teach it.
    thief = User(name="thief", documents=users[0].documents)
    person = bench.person(users[0])
    pool = bench.pooled(person, [*users, thief])
    assert targets(pool.train) == targets(person.train)
    # What selects is the person's own, or the choice of a step size would pass for a gain.
    assert pool.select == person.select
    held_out = {tuple(document.ids_T.tolist()) for document in (*person.test, *person.select)}
    whole, last = pool.train[:-1], pool.train[-1]
    assert not held_out & {tuple(document.ids_T.tolist()) for document in pool.train}
    assert len(last.ids_T) == len(last.target_T) == len(last.bytes_T)
    assert last.target_T[-1]  # nothing stands after what counts
    assert len(whole) > 3
    with pytest.raises(InputError, match="other people's text"):
        bench.pooled(person, [users[0]])


def test_a_pair_is_measured_under_four_states_and_the_same_twice(bench: Bench, tmp_path: Path) -> None:
    users = people(4)
    (pair,) = pairs(bench, users, 2)
    result = measured(bench, pair, users)
    assert [person["user"] for person in result["people"]] == ["p0", "p1"]
    first, second = result["people"]
    assert first["stranger"] == "p1"
    own_K, told = bench.train(pair[0], "own")
    assert told == first["own_run"]
    assert told["step"] > 0
    assert bench.nats(pair[0], own_K) == (first["nats"]["own"], first["tokens"], first["bytes"])
    # Under the other's state it is the other's log.
    assert bench.nats(pair[1], own_K)[0] == second["nats"]["swapped"]
    assert first["nats"]["own"] < first["nats"]["base"]
    cells = Cells(tmp_path / "cells.jsonl")
    settings = settings_of(bench, "m", Collection.LAMP7, pair)
    cells.once(FIGURE, settings, lambda: result)
    (outcomes,) = groups_of(Cells(tmp_path / "cells.jsonl").of(FIGURE)).values()
    assert [outcome.nats[State.OWN] for outcome in outcomes] == [
        person["nats"]["own"] for person in result["people"]
    ]
    text = page(cells.of(FIGURE), {"lamp7": ["lamp7_dev.jsonl:128 (broken)"], "shakespeare": []})
    assert "Lines of lamp7 that are no person and are left out: lamp7_dev.jsonl:128 (broken)." in text
    assert "Lines of shakespeare" not in text
    assert "## m, lamp7, 8 steps, seed 0, one_sided with 2 queries, run " in text
    assert "(one_sided with 2 queries, linear schedule; search" in text
    # Another choice is another cell in another group, though model, collection, steps and seed are the same.
    other = replace(bench, options=replace(bench.options, batch_rows=4))
    cells.once(FIGURE, settings_of(other, "m", Collection.LAMP7, pair), lambda: result)
    assert [len(outcomes) for outcomes in groups_of(cells.of(FIGURE)).values()] == [2, 2]
    assert settings["package"] == bench.package.digest
    json.dumps(result, allow_nan=False)


def test_training_goes_on_from_the_pooled_and_from_the_own_state(bench: Bench, tmp_path: Path) -> None:
    users = people(4)
    (pair,) = pairs(bench, users, 2)
    result = measured(bench, pair, users)
    further = measured_onward(bench, pair, users)
    assert is_onward(further) and not is_onward(result)
    person = pair[0]
    pooled_K, _ = bench.train(bench.pooled(person, users), "pooled")
    onward_K, told = bench.train(person, "pooled-own", pooled_K)
    assert told == further["people"][0]["further_runs"]["pooled-own"]
    assert told["step"] > 0  # it moved from where the pooled state had come to
    assert not np.array_equal(onward_K, pooled_K)
    nats = further["people"][0]["nats"]
    assert bench.nats(person, onward_K)[0] == nats["pooled-own"] < nats["pooled"]
    own_K, _ = bench.train(person, "own")
    own_own_K, _ = bench.train(person, "own-own", own_K)
    assert bench.nats(person, own_own_K)[0] == nats["own-own"]
    assert {name: nats[name] for name in ("base", "own", "pooled", "swapped")} == result["people"][0]["nats"]
    # A page of before takes nothing from what went on; one that went on completes what did not.
    settings = settings_of(bench, "m", Collection.LAMP7, pair)
    for here, there in ((result, further), (further, result)):
        cells = Cells(tmp_path / f"{is_onward(here)}.jsonl")
        cells.keep(FIGURE, settings, here)
        file = tmp_path / "users.json"
        file.write_text(json.dumps([{"settings": settings, "result": there}]))
        restore(file, cells)
        assert cells.of(FIGURE) == [(settings, json.loads(json.dumps(further)))]
        assert "| pooled-own | " in page(cells.of(FIGURE), {})
        assert write(tmp_path, cells, "new\n", elsewhere=tmp_path / "else") == tmp_path
    assert "own-own | " not in page([(settings, result)], {})
    # A page of other losses replaces nothing that was measured here, and is not replaced by less.
    halved = json.loads(json.dumps(further))
    halved["people"][0]["nats"]["own"] /= 2
    file.write_text(json.dumps([{"settings": settings, "result": halved}]))
    measured_here = Cells(tmp_path / "here.jsonl")
    measured_here.keep(FIGURE, settings, result)
    restore(file, measured_here)
    assert measured_here.of(FIGURE) == [(settings, json.loads(json.dumps(result)))]
    assert write(tmp_path, measured_here, "less\n", elsewhere=tmp_path / "else") == tmp_path / "else"


def row(number: int, *names: str, **changed: Any) -> dict[str, Any]:
    """A finished pair."""
    of_person = {
        "nats": {state.value: 10.0 for state in State if state not in FURTHER},
        "tokens": 5,
        "bytes": 20,
    }
    of_person |= {"train_tokens": 9, "pooled_tokens": 9} | changed
    settings = {"model": "m", "collection": "lamp7", "steps": 2, "seed": 0, "people": list(names)}
    settings |= {"options": TrainOptions(steps=2).definition(), "package": f"p{number}"}
    return {"settings": settings, "result": {"people": [{"user": name} | of_person for name in names]}}


def test_pairs_of_a_committed_page_are_not_measured_again(tmp_path: Path) -> None:
    rows = [row(0, "a", "b"), row(1, "a", "b")]
    file = tmp_path / "users.json"
    cells = Cells(tmp_path / "cells.jsonl")
    own = row(0, "a", "b", tokens=6)["result"]
    cells.keep(FIGURE, rows[0]["settings"], own)
    file.write_text(json.dumps(rows))
    restore(file, cells)
    # What was measured here is kept.
    found = Cells(tmp_path / "cells.jsonl").of(FIGURE)
    assert found == [(rows[0]["settings"], own), (rows[1]["settings"], rows[1]["result"])]
    # Of before pools had a length of their own: said, and in a group apart.
    exact = [(at | {"pool": POOL}, result) for at, result in found]
    text = page([*found, *exact], {})
    assert [
        line.endswith("fewer tokens than one's own: 2 people")
        for line in text.splitlines()
        if line[:3] == "## "
    ] == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    "broken",
    [
        "[{",
        "{}",
        "[" * 100_000,
        json.dumps([{"settings": None, "result": row(1, "a", "b")["result"]}]),
        json.dumps([{"settings": {"people": ["a", "b"]}, "result": row(1, "a", "b")["result"]}]),
        json.dumps([row(1, "a", "b"), row(2, "a")]),
        json.dumps([row(1, "a", "b"), row(1, "b", "a")]),
        json.dumps([row(1, "a", "b") | {"result": {"people": []}}]),
        json.dumps([row(1, "a", "b") | {"result": row(1, "a", "c")["result"]}]),
        json.dumps([row(1, "a", "b", nats={state.value: 1e7 for state in State})]),
        json.dumps([row(1, "a", "b", nats={state.value: -1.0 for state in State})]),
        json.dumps([row(1, "a", "b", tokens=0)]),
        json.dumps([row(1, "a", "b", train_tokens=float("inf"))]),
        json.dumps([row(1, "a", "\ud800")]),
    ],
)
def test_a_damaged_page_is_refused_whole(broken: str, tmp_path: Path) -> None:
    file = tmp_path / "users.json"
    cells = Cells(tmp_path / "cells.jsonl")
    cells.keep(FIGURE, row(0, "a", "b")["settings"], row(0, "a", "b")["result"])
    before = (tmp_path / "cells.jsonl").read_bytes()
    file.write_text(broken)
    with pytest.raises(InputError, match=r"expected a users.json of this benchmark at .*users.json"):
        restore(file, cells)
    assert (tmp_path / "cells.jsonl").read_bytes() == before
    assert page(cells.of(FIGURE), {})


def test_a_page_with_more_pairs_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, elsewhere = tmp_path / "output", tmp_path / "elsewhere"
    more, fewer = Cells(tmp_path / "more.jsonl"), Cells(tmp_path / "fewer.jsonl")
    for number in range(2):
        more.keep(FIGURE, row(number, "a", "b")["settings"], row(number, "a", "b")["result"])
    fewer.keep(FIGURE, row(1, "a", "b")["settings"], row(1, "a", "b")["result"])
    assert write(output, more, "whole\n", elsewhere=elsewhere) == output
    assert write(output, fewer, "part\n", elsewhere=elsewhere) == elsewhere
    assert "shows pairs that are not here: it stays" in capsys.readouterr().err
    assert (output / "users.md").read_text() == "whole\n"
    assert (elsewhere / "users.md").read_text() == "part\n"
    assert write(output, more, "again\n", elsewhere=elsewhere) == output


def test_a_run_that_was_killed_goes_on(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    person = bench.person(people(1)[0])
    whole_K, told = bench.train(person, "own")
    other = replace(bench, engine=bigram_engine(bench.package))
    calls = 0
    losses = other.engine.losses

    def stop_at_nine(values_VK: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise KeyboardInterrupt
        return losses(values_VK, batch)

    monkeypatch.setattr(other.engine, "losses", stop_at_nine)
    with pytest.raises(KeyboardInterrupt):
        other.train(person, "again")
    again_K, again = other.train(person, "again")
    np.testing.assert_array_equal(again_K, whole_K)
    assert again == told


def test_a_page_that_is_gone_is_refused_with_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("PERMILLE_MODELS", "PERMILLE_DATA"):
        monkeypatch.setenv(name, str(tmp_path))
    gone, cells = tmp_path / "users.json", tmp_path / "cells.jsonl"
    assert main(["--restore", str(gone), "--cells", str(cells)]) == 1
    assert f"error: expected a users.json of this benchmark at {gone}" in capsys.readouterr().err
    assert not cells.exists()

"""Tests of federations in one process: methods are definitions, rounds replay, and traffic is counted."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from permille.zo.lattice import values
from permille_agent.embed import document_rows, package_tokenizer, packed_rows, read_documents
from permille_lab.federation import computation
from permille_lab.federation.clients import Client
from permille_lab.federation.computation import CONTENDERS, curve, passes_to, tuned_rate
from permille_lab.federation.methods import METHODS, definition_of
from permille_lab.federation.page import tables
from permille_lab.federation.references import VALUES, averaged
from permille_lab.federation.simulation import Plan, World, federate
from permille_lab.measuring.cells import Cells
from permille_rounds.definition import Definition
from tests.bigram_engine import BigramEngine
from tests.packages import sentences, tiny_package

PLAN = Plan(cohort=2, rounds=2)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    package = tiny_package(tmp_path_factory.mktemp("blobs"))
    return World(package=package, engine=BigramEngine(package))


@pytest.fixture(scope="module")
def clients(world: World, tmp_path_factory: pytest.TempPathFactory) -> list[Client]:
    tokenizer, folder = package_tokenizer(world.package), tmp_path_factory.mktemp("text")
    found = []
    for number in range(3):
        path = folder / f"{number}.txt"
        path.write_text("\n\n".join(sentences(40, seed=number)))
        documents, _ = read_documents([path])
        tokens = [tokenizer.tokenize(each.content, row_tokens=32) for each in documents]
        train, test = packed_rows(tokens[:-1], 32), document_rows(tokens[-1:], 32)
        found.append(Client(name=f"{number}", train=train, test=test))
    return found


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_a_definition_whose_rounds_move_the_state(
    name: str, world: World, clients: list[Client]
) -> None:
    method = METHODS[name]
    rules = definition_of(world, method, rounds=2, rate=method.rates[0])
    plan = replace(PLAN, own=method.own)
    found = federate(world, rules, clients, plan)
    assert Definition.from_bytes(rules.to_bytes()).digest == found.history.definition.digest
    assert found.history.number == 2
    unit = rules.log.step_unit_exponent
    assert np.array_equal(found.values_W, values(world.package.values(), found.history.s_W, unit))
    assert found.history.s_W.any()
    assert found.traffic.up > rules.steps * rules.log.queries
    again = federate(world, rules, clients, plan)
    assert np.array_equal(again.history.s_W, found.history.s_W)


def test_who_sends_the_opposite_moves_the_state_the_other_way(world: World, clients: list[Client]) -> None:
    rules = definition_of(world, METHODS["DeComFL"], rounds=1, rate=0.01)
    honest = federate(world, rules, clients, Plan(cohort=2, rounds=1))
    turned = federate(world, rules, clients, Plan(cohort=2, rounds=1, attack=lambda _, c_TQ: -c_TQ))
    assert np.array_equal(honest.history.s_W, -turned.history.s_W)
    assert honest.history.s_W.any()


def test_averaged_values_gain_on_a_text_that_learns(world: World, clients: list[Client]) -> None:
    found = averaged(world, VALUES, clients, Plan(cohort=3, rounds=2), 0.3)
    assert len(found.gains) == 3 and np.mean(found.gains) > 0
    assert found.traffic.up > 0 and found.traffic.down > 0


@pytest.mark.parametrize("name", CONTENDERS)
def test_a_curve_has_the_passes_and_the_gain_of_each_round(
    name: str, world: World, clients: list[Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(computation, "ROUNDS", 2)
    monkeypatch.setattr(computation, "COHORT", 2)
    method = CONTENDERS[name]
    tuned = tuned_rate(world, method, clients)
    assert tuned["rate"] > 0 and len(tuned["gains"]) >= 3
    found = curve(world, method, clients, tuned["rate"], 0)
    (first, _), (second, gain) = found["points"]
    layers = world.package.config["num_hidden_layers"]
    # The engine of this test counts one layer, and shares nothing.
    variants = 2 * 8 if method.estimator == "split" else method.queries
    passes = method.batch_rows * method.steps * variants
    assert (first, second) == pytest.approx((passes / layers, 2 * passes / layers))
    plan = Plan(cohort=2, rounds=2, own=method.own)
    rules = definition_of(world, method, rounds=2, rate=tuned["rate"])
    assert gain == np.mean(world.gains(federate(world, rules, clients, plan).values_W, clients))


def test_the_upper_block_can_begin_at_a_chosen_layer(world: World) -> None:
    method = replace(METHODS["FedSPZO"], upper_layer=-1)
    split = definition_of(world, method, rounds=1, rate=0.01).log.split
    layers, tensors = world.package.config["num_hidden_layers"], len(world.package.counts)
    assert split is not None and split.first_upper_tensor == (layers - 1) * tensors // layers


def test_computation_to_a_gain_is_that_of_the_first_point_that_has_it(tmp_path: Path) -> None:
    points = [(10.0, 0.1), (20.0, 0.5), (30.0, 0.4)]
    assert passes_to(points, 0.4) == 20.0
    assert passes_to(points, 0.6) is None
    cells = Cells(tmp_path / "federation.jsonl")
    for name, scale, on_edge in (("FedSPZO", 1.0, False), ("DeComFL", 3.0, True)):
        cells.keep("computation rate", {"method": name, "split": "a"}, {"on_edge": on_edge})
        found = {"rate": 0.01, "points": [(scale * passes, gain) for passes, gain in points]}
        cells.keep("computation", {"method": name, "split": "a", "seed": 0}, found)
    table = tables(tmp_path)["computation"]
    # FedSPZO reaches DeComFL's best gain, 0.5, after 20 row passes, and DeComFL after 60.
    assert "| 3.0 " in table and "0.01, on the edge" in table


def test_tables_hold_intervals_over_devices_and_every_figure(tmp_path: Path) -> None:
    cells = Cells(tmp_path / "federation.jsonl")
    of_method = {"row_passes": 100.0, "up": 2000.0, "down": 1000.0, "seconds": 0.5}
    for split, gains in (("a", [1.0, 2.0, 3.0]), ("b", [0.0, 1.0, 2.0])):
        settings = {"method": "one", "split": split, "seed": 0}
        cells.keep("methods", settings, {"gains": gains} | of_method)
        cells.keep("directions", settings, {"gains": gains})
    pooled, own = [1.0, 1.5, 2.0], [0.5, 1.0, 3.0]
    names = ("pooled", "own", "pooled, then own", "first order, pooled", "first order, pooled, then own")
    states = dict(zip(names, (pooled, own, own, pooled, pooled), strict=True))
    cells.keep("people", {"seed": 0}, {"gains": states})
    cells.keep("attackers", {"attack": "flipped", "rule": "median"}, {"gains": pooled})
    cells.keep("privacy", {"cohort": 30, "noise_hundredths": 220}, {"gains": own, "dp_epsilon": 8.0})
    found = tables(tmp_path)
    assert "+2.000 (-0.484 to +4.484)" in found["methods"] and "2.0 " in found["methods"]
    assert "+1.500" in found["attackers"] and "z = 2.2, epsilon 8.0" in found["privacy"]
    assert found["people"].count(" of 3 ") == 6 and "+2.000 (1 seeds)" in found["directions"]

"""Computation to a loss: FedSPZO with its split at two places, against DeComFL and FedZO (FedSPZO, figure 4).

Each method uses the best rate of a grid, chosen on other text with as many rounds and devices a round,
because a mean over devices with separate directions allows longer steps. The grid grows until its best rate
is not on the edge. Rates are constant as in the paper. Computation is row passes through the decoder layers
of one device that takes part in every round. Embeddings and head are not counted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from permille.zo.header import Schedule
from permille_lab.evaluate.tuning import Trial, tune
from permille_lab.federation.clients import Client
from permille_lab.federation.methods import METHODS, Method, definition_of
from permille_lab.federation.simulation import Plan, World, federate
from permille_lab.measuring.cells import Result

ROUNDS, COHORT = 12, 5
_MIDDLE_RATE = 0.03
_CONSTANT = {name: replace(method, schedule=Schedule.CONSTANT) for name, method in METHODS.items()}
CONTENDERS: Mapping[str, Method] = {
    "FedSPZO, upper block from the middle": _CONSTANT["FedSPZO"],
    "DeComFL": _CONSTANT["DeComFL"],
    "FedZO": _CONSTANT["FedZO, values"],
    "FedSPZO, upper block is the last layer": replace(_CONSTANT["FedSPZO"], upper_layer=-1),
}
"""The paper's upper block is the head, which has no masked weights here. The last layer is nearest to it."""


def tuned_rate(world: World, method: Method, clients: Sequence[Client]) -> Result:
    """Return the best rate with the gains of all that were tried, and whether it is on the grid's edge."""

    def run(rate: float) -> Trial:
        rules = definition_of(world, method, rounds=ROUNDS, rate=rate)
        found = federate(world, rules, clients, Plan(cohort=COHORT, rounds=ROUNDS, own=method.own))
        return Trial(loss=-float(np.mean(world.gains(found.values_W, clients))))

    found = tune(run, middle=_MIDDLE_RATE)
    gains = {str(power): -loss for power, loss in sorted(found.losses.items())}
    return {"rate": found.step_factor, "gains": gains, "on_edge": found.on_edge}


def curve(world: World, method: Method, clients: Sequence[Client], rate: float, seed: int) -> Result:
    """Return the row passes and the mean gain after each round."""
    points: list[tuple[float, float]] = []
    rows = int(world.package.config["num_hidden_layers"]) * COHORT
    spent, before = 0, world.engine.layer_passes

    def after_round(values_W: NDArray[np.float32]) -> None:
        nonlocal spent, before
        spent += world.engine.layer_passes - before
        points.append((spent / rows, float(np.mean(world.gains(values_W, clients)))))
        before = world.engine.layer_passes  # the passes of the gains do not count

    rules = definition_of(world, method, rounds=ROUNDS, rate=rate)
    plan = Plan(cohort=COHORT, rounds=ROUNDS, seed=seed, own=method.own, after_round=after_round)
    federate(world, rules, clients, plan)
    return {"rate": rate, "points": points}


def passes_to(points: Sequence[tuple[float, float]], gain: float) -> float | None:
    """Return the row passes after which a curve first has at least this gain. None if it never has."""
    return next((passes for passes, found in points if found >= gain), None)

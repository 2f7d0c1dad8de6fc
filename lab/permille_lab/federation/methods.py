"""The methods of the papers and ours, as definitions of federations.

    FedSPZO     split perturbation, P_1 = 2, P_2 = 8, K = 20, each device has separate directions
    DeComFL     one-sided differences, P = 10, K = 20, all devices share the directions
    FedZO       one-sided differences, P = 5, K = 20, separate directions, a packed state each way
    FedKSeed    two-sided differences, P = 1, K = 100, separate directions; K stands for its pool of seeds
    ours        gradient steps on every weight, projected on 1,024 groups, as in Ferret but with integers
    one-sided   forward passes only: 16 groups, K = 12

P is the number of directions of a step, and K the number of steps. We deviate from the papers in two points.
A one-sided difference is to the mean of the other losses, and not to the loss at the state. For all methods,
projected gradients are normalised, so that only the learning rate decides the length of a step. The learning
rate falls linearly, except in the figure `computation`.
"""

import base64
from collections.abc import Mapping
from dataclasses import dataclass, replace

from permille.choices import EstimatorKind
from permille.training.adam import RATE, learning_rate, unit_exponent
from permille.zo.header import BlockSplit, DirectionKind, LogHeader, Schedule
from permille.zo.lattice import step_unit_exponent_for
from permille_lab.federation.clients import ROW_TOKENS
from permille_lab.federation.simulation import World
from permille_rounds.definition import Definition

_FORWARD_RATES = (0.01, 0.03, 0.1)
_ADAM_RATES = (0.1, 0.2, 0.4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """The steps of devices, and the messages that they exchange.

    Attributes:
        queries: number of directions of a device's step. For `SPLIT`, of both blocks together.
        own: True if each device of a cohort has separate directions.
        values: True if the traffic is a packed state each way, instead of integers.
        upper_layer: first layer of the upper block of `SPLIT`, -1 for the last one. None is the middle of the
            masked layers.
        schedule: of the learning rate.
        rates: learning rates to choose from. With the gradient, relative to the weights' root mean square.
    """

    estimator: EstimatorKind
    queries: int
    steps: int
    batch_rows: int = 2
    local_steps: int = 1
    own: bool = False
    groups: bool = False
    values: bool = False
    epsilon: float = 1e-3
    upper_layer: int | None = None
    schedule: Schedule = Schedule.LINEAR
    rates: tuple[float, ...] = _FORWARD_RATES


_GRADIENT = Method(
    estimator=EstimatorKind.GRADIENT,
    queries=1024,
    steps=1,
    batch_rows=4,
    local_steps=16,
    groups=True,
    rates=_ADAM_RATES,
)
OURS = "ours, gradient, 1,024"
METHODS: Mapping[str, Method] = {
    "FedSPZO": Method(estimator=EstimatorKind.SPLIT, queries=10, steps=20, own=True),
    "DeComFL": Method(estimator=EstimatorKind.ONE_SIDED, queries=10, steps=20),
    "FedZO, values": Method(estimator=EstimatorKind.ONE_SIDED, queries=5, steps=20, own=True, values=True),
    "FedKSeed-like": Method(estimator=EstimatorKind.SPSA, queries=1, steps=100, own=True),
    OURS: _GRADIENT,
    "ours, one-sided": Method(
        estimator=EstimatorKind.ONE_SIDED, queries=16, steps=12, groups=True, epsilon=0.01
    ),
}


def definition_of(world: World, method: Method, *, rounds: int, rate: float) -> Definition:
    """Return the federation of a method. Callers add further rules by `dataclasses.replace`.

    Args:
        rate: learning rate of the first step. With the gradient, relative to the weights' root mean square.
    """
    package = world.package
    split, layers = None, int(package.config["num_hidden_layers"])
    if method.estimator is EstimatorKind.SPLIT:  # P_1 = 2 directions of the lower block
        split = BlockSplit.halving(package.counts, layers, 2)
        if method.upper_layer is not None:
            first = method.upper_layer % layers * len(package.counts) // layers
            split = replace(split, first_upper_tensor=first)
    guard_bits = 2
    if method.estimator is EstimatorKind.GRADIENT:
        rate *= learning_rate(package) / RATE
        exponent = unit_exponent(rate) - guard_bits
    else:
        fewest = method.queries if split is None else split.lower_queries
        exponent = step_unit_exponent_for(rate, 1.0, fewest, 1.0) - guard_bits
    header = LogHeader(
        package_digest=package.digest,
        mask_digest=package.mask_digest,
        seed=0,
        directions=DirectionKind.GROUPS if method.groups else DirectionKind.RADEMACHER,
        estimator=method.estimator,
        queries=method.queries,
        epsilon=method.epsilon,
        learning_rate=rate,
        schedule=method.schedule,
        total_steps=rounds * method.steps,
        step_unit_exponent=exponent,
        counts=package.counts,
        split=split,
    )
    raw = world.key.public_key().public_bytes_raw()
    return Definition(
        log=header,
        round_key=base64.urlsafe_b64encode(raw).decode().rstrip("="),
        steps=method.steps,
        guard_bits=guard_bits,
        batch_rows=method.batch_rows,
        row_tokens=ROW_TOKENS,
        local_steps=method.local_steps,
    )

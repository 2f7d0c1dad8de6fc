"""A federation in one process, with the service's code for definitions, contributions, rules and history.

Devices take their steps by `permille_rounds.local`, one after the other. Their messages are encoded,
counted, decoded and combined. Only the network is missing.

# Legend: W masked weights, T steps, Q queries, V integers of a contribution.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

from permille.engines.interface import Engine, GradientEngine
from permille.package.reader import Package
from permille.zo.estimators import Batch
from permille.zo.lattice import values
from permille_agent.embed import TrainingBatches, mean_loss
from permille_lab.federation.clients import Client
from permille_rounds.catch_up import encode_catch_up
from permille_rounds.contribution import Contribution, decode_contribution, encode_contribution
from permille_rounds.definition import Definition
from permille_rounds.local import LocalRound, take_local_steps
from permille_rounds.private_rounds import draw_round_noise, noised_sum, round_of_sum
from permille_rounds.rounds import History, Round, combine

Attack = Callable[[int, NDArray[np.int64]], NDArray[np.int64]]
"""Returns the integers that a device sends, from its number and its true integers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A package, its engine, and the key that signs all messages."""

    package: Package
    engine: Engine
    key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)

    def gradient(self, values_W: NDArray[np.float32], batch: Batch) -> tuple[float, NDArray[np.float32]]:
        """Return the loss of a batch and its gradient."""
        return cast("GradientEngine", self.engine).gradient(values_W, batch)

    def gains(self, values_W: NDArray[np.float32], clients: Sequence[Client]) -> list[float]:
        """Return the gain of each device's test part over the package's values, in nats per token."""
        base_W = self.package.values()
        return [
            mean_loss(self.engine, base_W, client.test) - mean_loss(self.engine, values_W, client.test)
            for client in clients
        ]


@dataclass(slots=True)
class Traffic:
    """Encoded bytes that a device sends and fetches, if it takes part in every round."""

    up: float = 0.0
    down: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a federation. Seconds are processor time of all devices and the service."""

    history: History
    values_W: NDArray[np.float32]
    traffic: Traffic
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The rounds of a federation and the devices that take part.

    Attributes:
        cohort: number of devices of a round. They are drawn without replacement.
        rounds: number of rounds to run.
        seed: seed of the draw and of the batches.
        attack: changes the integers that devices send.
        own: True if each device of a cohort has separate directions.
        after_round: called with the values after each round.
    """

    cohort: int
    rounds: int
    seed: int = 0
    attack: Attack | None = None
    own: bool = False
    after_round: Callable[[NDArray[np.float32]], object] | None = None


def federate(world: World, definition: Definition, clients: Sequence[Client], plan: Plan) -> Outcome:
    """Run a federation from the package's values."""
    history, traffic = History.begin(definition), Traffic()
    base_W, unit = world.package.values(), definition.log.step_unit_exponent
    rng = np.random.default_rng([plan.seed, 1])
    begun = time.process_time()
    with tempfile.TemporaryDirectory(dir=_memory()) as name:
        for number in range(plan.rounds):
            invited = rng.choice(len(clients), size=plan.cohort, replace=False).tolist()
            parts, sent = [], []
            for place, index in enumerate(invited):
                part = LocalRound(
                    definition=_own(definition, place) if plan.own else definition,
                    number=number,
                    start_W=history.s_W,
                    w_base_W=base_W,
                )
                c_TQ = _steps(world, part, clients[index], Path(name) / str(index), plan)
                if plan.attack is not None:
                    c_TQ = plan.attack(index, c_TQ)
                parts.append(part)
                sent.append(_contribution(part, c_TQ, history))
            data = [encode_contribution(each, world.key) for each in sent]
            public = world.key.public_key()
            received = [
                decode_contribution(each, part.definition, public)
                for part, each in zip(parts, data, strict=True)
            ]
            traffic.up += sum(map(len, data)) / len(data)
            if plan.own:
                traffic.down += _add_own(history, parts, received, data)
            else:
                published = closed(definition, number, received)
                history.apply([published])
                head = history.head.signed(world.key)
                traffic.down += len(encode_catch_up(None, [published.to_bytes()], head))
            if plan.after_round is not None:
                plan.after_round(values(base_W, history.s_W, unit))
    seconds = time.process_time() - begun
    values_W = values(base_W, history.s_W, unit)
    return Outcome(history=history, values_W=values_W, traffic=traffic, seconds=seconds)


def closed(definition: Definition, number: int, received: Sequence[Contribution]) -> Round:
    """Return the round of these contributions, with fresh noise if the definition has privacy."""
    if definition.privacy is None:
        return combine(definition, number, received)
    noised_V = noised_sum(definition, number, received, draw_round_noise(definition))
    return round_of_sum(definition, number, len(received), noised_V)


def _own(definition: Definition, place: int) -> Definition:
    """Return the definition of a device with separate directions."""
    return replace(definition, log=replace(definition.log, seed=definition.log.seed + place))


def _add_own(
    history: History, parts: Sequence[LocalRound], received: Sequence[Contribution], data: Sequence[bytes]
) -> int:
    """Move the state by the mean of the devices' moves. Return the bytes that each device fetches.

    A round of the product has one set of directions for all devices, so it cannot record separate
    directions. Instead, each device fetches the contributions of all devices.
    """
    moved_W = sum(part.moved(each.c_TQ) for part, each in zip(parts, received, strict=True))
    scale = float(1 << history.definition.guard_bits)
    history.s_W = history.s_W + np.rint(moved_W * (scale / len(parts))).astype(np.int64)
    history.number += 1
    return sum(map(len, data))


def _steps(world: World, part: LocalRound, client: Client, folder: Path, plan: Plan) -> NDArray[np.int64]:
    rules = part.definition
    batches = TrainingBatches(client.train, batch_rows=rules.batch_rows, seed=plan.seed)
    here = folder / str(part.number)
    here.mkdir(parents=True)
    return take_local_steps(part, world.engine, batches, here)


def _contribution(part: LocalRound, c_TQ: NDArray[np.int64], history: History) -> Contribution:
    return Contribution(
        definition=part.definition,
        round_number=part.number,
        weight=1,
        start_digest=history.digest,
        c_TQ=c_TQ,
    )


def _memory() -> Path | None:
    """Return a folder in memory, if there is one. On a disk, the journal of each step would be slow."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() else None

"""First-order references: federated averaging. Devices take steps of Adam, and their weights are averaged.

    the masked values    the package's sparse values; a packed state each way
    all weights          the dense float32 model; all weights each way
    LoRA                 adapters of all linear layers, r = 8; all adapter weights each way

The moments start at 0 in each round. The learning rate falls linearly over the rounds.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from permille.training.adam import RATE, Moments, adam_step, learning_rate, unit_exponent
from permille.zo.lattice import values
from permille.zo.packed_state import StateHeader, StateOrigin, encode_state
from permille_agent.embed import TrainingBatches, batch_of
from permille_lab.federation.clients import Client
from permille_lab.federation.simulation import Plan, Traffic, World
from permille_lab.measuring.dense import batch_loss, dense_model, mean_loss

ROWS, STEPS = 4, 16
"""Rows of a batch, and steps of a device in a round, as in our gradient method."""
VALUES, DENSE, LORA = "FedAvg, the masked values", "FedAvg, all weights", "FedAvg-LoRA"
RATES = {VALUES: (0.1, 0.2, 0.4), DENSE: (1e-3, 3e-3, 1e-2), LORA: (1e-3, 3e-3, 1e-2)}
"""Learning rates to choose from. For the masked values, relative to their root mean square."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The result of an averaging.

    Attributes:
        gains: gain of each device's test part, in nats per token.
        seconds: processor seconds of all rounds.
    """

    gains: list[float]
    traffic: Traffic
    seconds: float


def averaged(world: World, name: str, clients: Sequence[Client], plan: Plan, rate: float) -> Reference:
    """Run the averaging `name`, a key of `RATES`."""
    if name == VALUES:
        return averaged_values(world, clients, plan, rate)
    torch.manual_seed(plan.seed)
    torch.set_num_threads(1)
    model, trained = _model(world, name)
    base = [batch_loss(model, batch_of(client.test)) for client in clients]
    pooled = [weight.detach().clone() for weight in trained]
    rng = np.random.default_rng([plan.seed, 1])
    begun = time.process_time()
    for number in range(plan.rounds):
        invited = rng.choice(len(clients), size=plan.cohort, replace=False).tolist()
        sums = [torch.zeros_like(weight) for weight in pooled]
        for index in invited:
            _load(trained, pooled)
            batches = TrainingBatches(clients[index].train, batch_rows=ROWS, seed=plan.seed)
            optimizer = torch.optim.AdamW(trained, lr=rate * (1 - number / plan.rounds), weight_decay=0.0)
            for step in range(number * STEPS, (number + 1) * STEPS):
                optimizer.zero_grad(set_to_none=True)
                mean_loss(model, batches(step)).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            for total, weight in zip(sums, trained, strict=True):
                total += weight.detach()
        pooled = [total / plan.cohort for total in sums]
    seconds = time.process_time() - begun
    _load(trained, pooled)
    gains = [
        before - batch_loss(model, batch_of(client.test))
        for before, client in zip(base, clients, strict=True)
    ]
    sent = 4.0 * plan.rounds * sum(weight.numel() for weight in pooled)
    return Reference(gains=gains, traffic=Traffic(up=sent, down=sent), seconds=seconds)


def averaged_values(world: World, clients: Sequence[Client], plan: Plan, share: float) -> Reference:
    """Average states on the lattice. Devices train all masked weights by steps of Adam."""
    base_W = world.package.values()
    rate = share * learning_rate(world.package) / RATE
    exponent = unit_exponent(rate)
    s_W, traffic = np.zeros(len(base_W), np.int64), Traffic()
    header = StateHeader(
        package_digest=world.package.digest,
        mask_digest=world.package.mask_digest,
        step_unit_exponent=exponent,
        k=len(base_W),
        origin=StateOrigin.POOLED,
    )
    rng = np.random.default_rng([plan.seed, 1])
    begun = time.process_time()
    for number in range(plan.rounds):
        invited = rng.choice(len(clients), size=plan.cohort, replace=False).tolist()
        sum_W = np.zeros_like(s_W)
        for index in invited:
            moments = Moments.first(len(s_W), s_W)
            batches = TrainingBatches(clients[index].train, batch_rows=ROWS, seed=plan.seed)
            for step in range(number * STEPS, (number + 1) * STEPS):
                found = world.gradient(values(base_W, moments.s_K, exponent), batches(step))
                step_rate = rate * (1 - number / plan.rounds)
                moments = adam_step(moments, *found, rate=step_rate, step_unit_exponent=exponent)
            sum_W += moments.s_K
            traffic.up += len(encode_state(header, moments.s_K - s_W)) / plan.cohort
        moved_W = np.rint(sum_W / plan.cohort).astype(np.int64)
        traffic.down += len(encode_state(header, moved_W - s_W))
        s_W = moved_W
    seconds = time.process_time() - begun
    gains = world.gains(values(base_W, s_W, exponent), clients)
    return Reference(gains=gains, traffic=traffic, seconds=seconds)


def _model(world: World, name: str) -> tuple[Any, list[torch.Tensor]]:
    """Return a dense model of the package, and its trained weights."""
    model = dense_model(world.package, prepacked=False)
    if name == DENSE:
        model.requires_grad_(True)
        return model, [*model.parameters()]
    import peft

    config = peft.LoraConfig(
        r=8, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    adapted = peft.get_peft_model(model, config)
    return adapted.base_model.model, [weight for weight in adapted.parameters() if weight.requires_grad]


def _load(trained: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for weight, value in zip(trained, found, strict=True):
            weight.copy_(value)

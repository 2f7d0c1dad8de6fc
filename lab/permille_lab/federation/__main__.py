"""Measure federations in one process with the product's exact arithmetic: `make bench-federation`.

    PERMILLE_MODELS=DIR PERMILLE_DATA=DIR python -m permille_lab.federation [FIGURE ...]

The figures are:

    methods      every method on every division of text
    directions   one shared direction, one of each device, or as many shared ones as a cohort has devices
    people       own, pooled, and pooled then own states, and the same with pooling by first order
    attackers    a fifth of the devices sends flipped or scaled integers, under each rule
    privacy      noise in the integers, for several sizes of a cohort
    computation  row passes to a loss, of FedSPZO with its split at two places, DeComFL and FedZO

Learning rates are chosen in a few rounds on text of other people, or on other sentences. All messages are
encoded, and their bytes are counted. `make federation` runs real processes with sockets.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from permille.choices import EstimatorKind
from permille.engines.factory import open_engine
from permille.training.adam import RATE, Moments, adam_step, learning_rate, unit_exponent
from permille.zo.lattice import values
from permille_agent.embed import TrainingBatches
from permille_lab.federation import computation as computing
from permille_lab.federation import references
from permille_lab.federation.clients import Client, Division, clients_of, small_clients
from permille_lab.federation.methods import METHODS, OURS, Method, definition_of
from permille_lab.federation.simulation import Attack, Outcome, Plan, World, federate
from permille_lab.measuring.cells import Cells, Result, Settings, settings_parser
from permille_lab.measuring.machine import machine
from permille_lab.measuring.model_packages import Sources, model_package, sources_from_environment
from permille_rounds.catch_up import pack_state
from permille_rounds.definition import Rule
from permille_rounds.privacy.rules import Privacy, PrivacyMode

MODEL = "stories260K-hf"
DEVICES, COHORT, ROUNDS = 20, 5, 6
TUNING = Plan(cohort=2, rounds=2)
_TUNING_DEVICES = 4
_KIND = {
    Division.SST2_IID: Division.SST2_IID,
    Division.SST2_DIRICHLET: Division.SST2_IID,
    Division.TWEETS_PERSON: Division.TWEETS_PERSON,
}
"""Division for the choice of the learning rate, with other text."""
DIRECTIONS = Method(estimator=EstimatorKind.SPSA, queries=1, steps=20)
"""The method of the paper's figure 5: two-sided, one direction per step."""
PRIVATE = Method(
    estimator=EstimatorKind.GRADIENT, queries=64, steps=1, batch_rows=4, local_steps=1, groups=True
)
_OWN_STEPS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Inputs of all measurements, and the results file."""

    world: World
    sources: Sources
    cells: Cells
    known: dict[tuple[Division, int, int], list[Client]] = field(default_factory=dict)

    def clients(self, split: Division, devices: int, *, turn: int = 0) -> list[Client]:
        """Return devices with text of a division. They are cached."""
        key = (split, devices, turn)
        if key not in self.known:
            self.known[key] = clients_of(self.world.package, self.sources.data, split, devices, turn=turn)
        return self.known[key]

    def rate(self, name: str, rates: Sequence[float], split: Division, gain: Callable[..., float]) -> float:
        """Return the rate with the largest gain in a few rounds on other text. The search is a cell."""
        kind = _KIND[split]
        settings = {"method": name, "split": kind.value, "rates": list(rates), "rounds": TUNING.rounds}
        found = self.cells.once("rate", settings, partial(self._tried, rates, kind, gain))
        return float(found["rate"])

    def _tried(self, rates: Sequence[float], kind: Division, gain: Callable[..., float]) -> Result:
        clients = self.clients(kind, _TUNING_DEVICES, turn=1)
        gains = [gain(clients, rate) for rate in rates]
        return {"gains": gains, "rate": rates[int(np.argmax(gains))]}


def tuned(bench: Bench, name: str, method: Method, split: Division) -> float:
    """Return the best rate of a method."""

    def gain(clients: Sequence[Client], rate: float) -> float:
        rules = definition_of(bench.world, method, rounds=TUNING.rounds, rate=rate)
        found = federate(bench.world, rules, clients, replace(TUNING, own=method.own))
        return float(np.mean(bench.world.gains(found.values_W, clients)))

    return bench.rate(name, method.rates, split, gain)


def measured(bench: Bench, name: str, method: Method, split: Division, seed: int) -> Result:
    """Measure one method on one division."""
    rate = tuned(bench, name, method, split)
    clients = bench.clients(split, DEVICES)
    rules = definition_of(bench.world, method, rounds=ROUNDS, rate=rate)
    plan = Plan(cohort=COHORT, rounds=ROUNDS, seed=seed, own=method.own)
    before = bench.world.engine.layer_passes
    found = federate(bench.world, rules, clients, plan)
    passes = bench.world.engine.layer_passes - before
    up, down = found.traffic.up, found.traffic.down
    if method.values:
        up = down = float(ROUNDS * len(pack_state(rules, found.history.s_W)))
    return {
        "gains": bench.world.gains(found.values_W, clients),
        "rate": rate,
        "row_passes": passes / (int(bench.world.package.config["num_hidden_layers"]) * COHORT),
        "up": up,
        "down": down,
        "seconds": found.seconds / (COHORT * ROUNDS),
        "machine": machine(),
    }


def averaged(bench: Bench, name: str, split: Division, seed: int) -> Result:
    """Measure one first-order reference on one division."""

    def gain(clients: Sequence[Client], rate: float) -> float:
        return float(np.mean(references.averaged(bench.world, name, clients, TUNING, rate).gains))

    rate = bench.rate(name, references.RATES[name], split, gain)
    clients = bench.clients(split, DEVICES)
    plan = Plan(cohort=COHORT, rounds=ROUNDS, seed=seed)
    found = references.averaged(bench.world, name, clients, plan, rate)
    return {
        "gains": found.gains,
        "rate": rate,
        "row_passes": 3 * references.ROWS * references.STEPS * ROUNDS,
        "up": found.traffic.up,
        "down": found.traffic.down,
        "seconds": found.seconds / (COHORT * ROUNDS),
        "machine": machine(),
    }


def methods(bench: Bench) -> None:
    """Measure every method on every division."""
    for name in (OURS, "FedSPZO", "DeComFL", *references.RATES, *METHODS):
        for split in (Division.SST2_IID, Division.SST2_DIRICHLET, Division.TWEETS_PERSON):
            settings: Settings = {
                "method": name,
                "split": split.value,
                "devices": DEVICES,
                "cohort": COHORT,
                "rounds": ROUNDS,
                "seed": 0,
            }
            if name in METHODS:
                run = partial(measured, bench, name, METHODS[name], split, 0)
            else:
                run = partial(averaged, bench, name, split, 0)
            bench.cells.once("methods", settings, run)


def directions(bench: Bench) -> None:
    """Measure one shared direction, one direction of each device, and as many shared ones."""
    cases: Mapping[str, Method] = {
        "shared, 1": DIRECTIONS,
        f"own, {COHORT} x 1": replace(DIRECTIONS, own=True),
        f"shared, {COHORT}": replace(DIRECTIONS, queries=COHORT),
    }
    for seed in range(2):
        for name, method in cases.items():
            for split in (Division.SST2_DIRICHLET, Division.TWEETS_PERSON):
                settings: Settings = {"method": name, "split": split.value, "rounds": ROUNDS, "seed": seed}
                run = partial(measured, bench, f"directions {name}", method, split, seed)
                bench.cells.once("directions", settings, run)


def ours(
    bench: Bench,
    split: Division,
    plan: Plan,
    clients: Sequence[Client],
    *,
    local_steps: int = METHODS[OURS].local_steps,
    **rules: object,
) -> Outcome:
    """Run our gradient method at its best rate, with further rules of the definition."""
    rate = tuned(bench, OURS, METHODS[OURS], split)
    method = replace(METHODS[OURS], local_steps=local_steps)
    found = definition_of(bench.world, method, rounds=plan.rounds, rate=rate)
    return federate(bench.world, replace(found, **rules), clients, plan)  # type: ignore[arg-type]


def own_values(
    bench: Bench, client: Client, start_W: NDArray[np.float32], *, steps: int, rate: float = RATE
) -> NDArray[np.float32]:
    """Train on a device's text by the agent's Adam steps, and return the last values."""
    first = learning_rate(bench.world.package) * rate / RATE
    exponent, k = unit_exponent(first), len(start_W)
    moments = Moments.first(k, np.zeros(k, np.int64))
    batches = TrainingBatches(client.train, batch_rows=references.ROWS, seed=0)
    for step in range(steps):
        found = bench.world.gradient(values(start_W, moments.s_K, exponent), batches(step))
        step_rate = first * (1 - step / steps)
        moments = adam_step(moments, *found, rate=step_rate, step_unit_exponent=exponent)
    return values(start_W, moments.s_K, exponent)


def person_states(bench: Bench) -> Result:
    """Return the gain of each person's test part under each state, in nats per token."""
    clients = bench.clients(Division.TWEETS_PERSON, DEVICES)
    base_W = bench.world.package.values()
    plan = Plan(cohort=COHORT, rounds=2 * ROUNDS)
    pooled_W = ours(bench, Division.TWEETS_PERSON, plan, clients).values_W
    everyone = Client(name="all", train=[row for client in clients for row in client.train], test=[])
    # Take as many batches as all devices in all rounds together.
    steps = plan.cohort * plan.rounds * METHODS[OURS].local_steps
    first_order_W = own_values(bench, everyone, base_W, steps=steps, rate=RATE / 3)
    states = {
        "pooled": [pooled_W] * DEVICES,
        "first order, pooled": [first_order_W] * DEVICES,
        "own": [own_values(bench, client, base_W, steps=_OWN_STEPS) for client in clients],
        "pooled, then own": [own_values(bench, client, pooled_W, steps=_OWN_STEPS) for client in clients],
        "first order, pooled, then own": [
            own_values(bench, client, first_order_W, steps=_OWN_STEPS) for client in clients
        ],
    }
    gains = {
        name: [bench.world.gains(found, [client])[0] for found, client in zip(each, clients, strict=True)]
        for name, each in states.items()
    }
    return {"gains": gains, "machine": machine()}


def people(bench: Bench) -> None:
    """Measure the gains of each person with and without pooling."""
    settings: Settings = {"devices": DEVICES, "rounds": 2 * ROUNDS, "own_steps": _OWN_STEPS, "seed": 0}
    bench.cells.once("people", settings, partial(person_states, bench))


def flipped(index: int, c_TQ: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the integers that a device sends. The first fifth of the devices negates them."""
    return -c_TQ if index < DEVICES // 5 else c_TQ


def scaled(index: int, c_TQ: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the integers that a device sends. The first fifth multiplies them by -100, within the format."""
    return np.clip(-100 * c_TQ, -8192, 8192) if index < DEVICES // 5 else c_TQ


def attackers(bench: Bench) -> None:
    """Measure each rule under each attack."""
    attacks: Mapping[str, Attack | None] = {"nobody": None, "flipped": flipped, "scaled": scaled}
    rules: Mapping[str, dict[str, object]] = {
        "mean": {},
        "clipped": {"clip": 20_000},
        "trimmed": {"rule": Rule.TRIMMED, "trim_percent": 25},
        "median": {"rule": Rule.TRIMMED, "trim_percent": 50},
    }
    for attack, sent in attacks.items():
        for rule, changes in rules.items():
            settings: Settings = {"attack": attack, "rule": rule, "cohort": 10, "rounds": 4, "seed": 0}

            def run(changes: dict[str, object] = changes, sent: Attack | None = sent) -> Result:
                clients = bench.clients(Division.TWEETS_PERSON, DEVICES)
                plan = Plan(cohort=10, rounds=4, attack=sent)
                found = ours(bench, Division.TWEETS_PERSON, plan, clients, local_steps=4, **changes)
                # The gains also count on the text of the attackers.
                return {"gains": bench.world.gains(found.values_W, clients)}

            bench.cells.once("attackers", settings, run)


def private(bench: Bench, cohort: int, hundredths: int, rounds: int) -> Result:
    """Run rounds with all devices of a cohort. `hundredths` is the noise multiplier times 100, 0 for none."""
    clients = small_clients(bench.world.package, bench.sources.data, cohort)
    rules = definition_of(bench.world, PRIVATE, rounds=rounds, rate=0.3)
    noise = Privacy(
        mode=PrivacyMode.CENTRAL,
        noise_hundredths=max(1, hundredths),
        participations=rounds,
        delta_exponent=6,
    )
    rules = replace(rules, clip=4_000, privacy=noise if hundredths else None)
    found = federate(bench.world, rules, clients, Plan(cohort=cohort, rounds=rounds))
    judges = small_clients(bench.world.package, bench.sources.data, 980)[-60:]
    return {
        "gains": bench.world.gains(found.values_W, judges),
        "dp_epsilon": noise.dp_epsilon(rounds) if hundredths else None,
    }


def privacy(bench: Bench) -> None:
    """Measure the gain with and without noise."""
    for cohort in (30, 100, 300):
        for hundredths in (0, 220):
            settings: Settings = {
                "cohort": cohort,
                "noise_hundredths": hundredths,
                "rounds": 5,
                "clip": 4000,
            }
            bench.cells.once("privacy", settings, partial(private, bench, cohort, hundredths, 5))


def computation(bench: Bench) -> None:
    """Measure curves of gain over row passes, with the rate of each method tuned."""
    for split in (Division.SST2_DIRICHLET, Division.TWEETS_PERSON):
        for seed in range(3):
            for name, method in computing.CONTENDERS.items():
                kind = _KIND[split]
                settings: Settings = {"method": name, "rounds": computing.ROUNDS}
                other = bench.clients(kind, computing.COHORT, turn=1)
                rate = bench.cells.once(
                    "computation rate",
                    {**settings, "split": kind.value},
                    partial(computing.tuned_rate, bench.world, method, other),
                )["rate"]
                clients = bench.clients(split, DEVICES)
                bench.cells.once(
                    "computation",
                    {**settings, "split": split.value, "seed": seed},
                    partial(computing.curve, bench.world, method, clients, rate, seed),
                )


FIGURES: Mapping[str, Callable[[Bench], None]] = {
    "methods": methods,
    "directions": directions,
    "people": people,
    "attackers": attackers,
    "privacy": privacy,
    "computation": computation,
}


def main() -> None:
    """Measure the missing cells."""
    parser = settings_parser(__doc__, "federation")
    parser.add_argument("figures", nargs="*", choices=[[], *FIGURES], default=[])
    options = parser.parse_args()
    sources = sources_from_environment()
    package = model_package(sources, MODEL, options.folder)
    world = World(package=package, engine=open_engine(package, threads=options.threads))
    bench = Bench(world=world, sources=sources, cells=Cells(options.cells))
    for name in options.figures or FIGURES:
        FIGURES[name](bench)


if __name__ == "__main__":
    main()

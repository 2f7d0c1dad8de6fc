"""Make a federation's definition from an operator's request (FORMAT 13.1).

The definition includes the header of the federation's log. The header is made from the package's manifest, so
neither torch nor the model is needed.
"""

import math
from dataclasses import replace

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from permille.choices import EstimatorKind, Method
from permille.errors import InputError
from permille.package.reader import Package
from permille.training.adam import learning_rate, unit_exponent
from permille.zo.header import BlockSplit, DirectionKind, LogHeader, Schedule
from permille_rounds.definition import FEW_DEVICES, Definition, Rule, encode_key
from permille_rounds.privacy.rules import Keeper, Privacy, PrivacyMode
from permille_rounds.privacy.zcdp import MEAN_NORM, dp_epsilon_of, noise_for, rho_of, signal_to_noise
from permille_rounds.schemas import (
    MAX_DEVICES,
    MAX_DP_EPSILON,
    MAX_INTEGERS,
    FederationCreate,
    PrivacyCreate,
    TrainingCreate,
)

_NO_EPSILON = 1.0  # placeholder in the log header of gradient training, which does not perturb weights
_LOWER_SHARE = 5  # with the split estimator, one query in five perturbs the lower half of the decoder layers
_GUARD_BITS = 2  # the mean of a round is stored with two bits more than the integers of a device


def define(package: Package, body: FederationCreate, round_key: Ed25519PublicKey) -> Definition:
    """Return the definition of a federation on a package.

    Raises:
        InputError: the options contradict each other.
        PackageError: the package is damaged.
    """
    schedule, training, aggregation = body.schedule, body.training, body.aggregation
    integers = training.steps * training.queries
    if integers > MAX_INTEGERS:
        raise InputError(
            f"A device would send {integers} integers (steps times queries) in a round. At most "
            f"{MAX_INTEGERS} are allowed."
        )
    if schedule.minimum > schedule.target:
        raise InputError(
            f"The target of {schedule.target} devices is below the minimum of {schedule.minimum}. Raise the "
            "target or lower the minimum."
        )
    privacy = None if body.privacy is None else _privacy(body, body.privacy)
    definition = Definition(
        log=_header(package, body),
        round_key=encode_key(round_key),
        steps=training.steps,
        guard_bits=_GUARD_BITS,
        rate_shift=0,
        rule=Rule(aggregation.rule),
        clip=aggregation.clip,
        trim_percent=aggregation.trim_percent,
        max_weight=1,
        minimum=schedule.minimum,
        batch_rows=training.batch_rows,
        row_tokens=training.row_tokens,
        local_steps=training.local_steps,
        privacy=privacy,
    )
    if definition.exposes_few and not aggregation.few_devices:
        raise InputError(
            f"A round of {schedule.minimum} devices would publish a sum without noise, which exposes each of "
            f"them. Use a minimum of at least {FEW_DEVICES}, add privacy, or set few_devices (--few-devices)."
        )
    return definition


def _privacy(body: FederationCreate, asked: PrivacyCreate) -> Privacy:
    """Return the privacy part of a definition, with the least noise that gives the requested guarantee.

    Raises:
        InputError: the keeper has no key or no URL, no noise gives the guarantee, or the noise would be
            larger than the signal. In the last case, the message names numbers that would work.
    """
    if (asked.keeper_key is None) != (asked.keeper_url is None):
        raise InputError("keeper_key and keeper_url belong together. Set both or neither.")
    training, target = body.training, body.schedule.target
    delta = 10.0**-asked.delta_exponent
    hundredths = noise_for(asked.dp_epsilon, delta, asked.participations)
    integers = training.steps * training.queries
    noise = hundredths / 100
    kept = dp_epsilon_of(rho_of(noise, asked.participations), delta)
    if kept > asked.dp_epsilon:
        raise InputError(
            f"No noise gives a dp_epsilon of {asked.dp_epsilon} for a device that takes part in "
            f"{asked.participations} rounds. The largest noise ({noise:.0f} times the clip) gives "
            f"{kept:.2g}. Allow a larger dp_epsilon or fewer participations."
        )
    signal = signal_to_noise(target, integers, noise)
    if signal < 1:
        # Each suggestion changes one number and keeps the others. Suggestions beyond the service's limits are
        # left out.
        affordable = max(1, int(100 * target * MEAN_NORM / math.sqrt(integers))) / 100
        dp_epsilon = dp_epsilon_of(rho_of(affordable, asked.participations), delta)
        devices = math.ceil(noise * math.sqrt(integers) / MEAN_NORM)
        fewer = int((target * MEAN_NORM / noise) ** 2)
        ways = {
            f"a target of {devices} devices": devices <= MAX_DEVICES,
            f"dp_epsilon {math.ceil(10 * dp_epsilon) / 10:.1f}": dp_epsilon <= MAX_DP_EPSILON,
            f"{fewer} integers, steps times queries": fewer > 0,
        }
        possible = [way for way, is_possible in ways.items() if is_possible]
        takes = ", or ".join(possible) or "more devices and fewer integers together, or fewer participations"
        raise InputError(
            f"The noise would be larger than the signal (signal/noise {signal:.2f}) with {target} devices "
            f"that send {integers} integers each and noise of {noise:.2f} times the clip. Use {takes}."
        )
    keeper = None
    if asked.keeper_key is not None and asked.keeper_url is not None:
        keeper = Keeper(key=asked.keeper_key, url=asked.keeper_url)
    return Privacy(
        mode=PrivacyMode.CENTRAL if keeper is None else PrivacyMode.KEEPER,
        noise_hundredths=hundredths,
        participations=asked.participations,
        delta_exponent=asked.delta_exponent,
        keeper=keeper,
    )


def _header(package: Package, body: FederationCreate) -> LogHeader:
    training, estimator = body.training, _estimator(body.training)
    perturbs = estimator is not EstimatorKind.GRADIENT
    groups = estimator in (EstimatorKind.GRADIENT, EstimatorKind.ONE_SIDED)
    header = LogHeader(
        package_digest=package.digest,
        mask_digest=package.mask_digest,
        seed=0,
        directions=DirectionKind.GROUPS if groups else DirectionKind.RADEMACHER,
        estimator=estimator,
        queries=training.queries,
        epsilon=training.epsilon or _NO_EPSILON,
        learning_rate=training.learning_rate or (1.0 if perturbs else learning_rate(package)),
        schedule=Schedule.CONSTANT,
        total_steps=training.steps * body.schedule.rounds,
        step_unit_exponent=0,
        counts=package.counts,
        split=_split(package, body),
    )
    if perturbs:
        own = header.with_lengths(package.manifest.lengths.perturbation, package.manifest.lengths.step)
        rate, epsilon = training.learning_rate or own.learning_rate, training.epsilon or own.epsilon
        header = replace(header, learning_rate=rate, epsilon=epsilon)
    # The unit of a round's state is smaller than the unit of a device's integers, by the guard bits.
    exponent = _device_unit(header) - _GUARD_BITS
    return replace(header, step_unit_exponent=exponent)


def _estimator(training: TrainingCreate) -> EstimatorKind:
    """Return the estimator of the requested method."""
    if training.method is Method.ZEROTH_ORDER and training.estimator is not EstimatorKind.GRADIENT:
        return training.estimator or EstimatorKind.ONE_SIDED
    if training.estimator is not None:
        raise InputError(
            f"The method {training.method.value} has no estimator {training.estimator.value}. Leave the "
            "estimator out, or choose spsa, split or forward with the method zeroth-order."
        )
    return EstimatorKind.GRADIENT


def _device_unit(header: LogHeader) -> int:
    """Return the exponent of the unit of a device's integers.

    The unit must be small enough for the device's steps.
    """
    if header.estimator is EstimatorKind.GRADIENT:
        return unit_exponent(header.learning_rate)
    return header.with_step_unit().step_unit_exponent


def _split(package: Package, body: FederationCreate) -> BlockSplit | None:
    if _estimator(body.training) is not EstimatorKind.SPLIT:
        return None
    lower = body.training.queries // _LOWER_SHARE
    decoder_layers = int(package.config["num_hidden_layers"])
    return BlockSplit.halving(package.counts, decoder_layers, lower)

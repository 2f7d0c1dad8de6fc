"""Compare secure sums with plain sums: `python -m tests.rounds.secure_sums`.

A keeper runs as a process. Each round has its own masks, noise and dropouts. The service's sum of masked
integers minus the keeper's answer must be the plain sum plus the keeper's noise. The difference from the
plain sum must look like noise in every round. A wrong sum is uniform below 2**32, so this test detects it.
"""

import argparse
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from permille_rounds.contribution import Contribution
from permille_rounds.definition import Definition
from permille_rounds.keeper.main import init, public_text
from permille_rounds.masked import decode_masked, encode_masked, opening_of
from permille_rounds.privacy.rules import Keeper, PrivacyMode
from permille_rounds.private_rounds import noised_sum, unmasked_sum, vector_of
from permille_rounds.workers.task import ask_keeper
from tests.rounds.keeper.keepers import running
from tests.rounds.private import device_key, make_private

WORST_DEVIATIONS = 12
"""Limit of the difference in standard deviations. Correct noise exceeds it in one of 10**32 draws."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The counts of a number of rounds."""

    rounds: int
    exact: int
    upload_bytes: int
    keeper_ms: float
    noise_over_promise: float

    def line(self, devices: int, dropped: int) -> str:
        """Return the line for the log."""
        return (
            f"secure-sum: rounds={self.rounds} devices={devices} dropped={dropped} exact={self.exact} "
            f"upload_bytes={self.upload_bytes} keeper_ms={self.keeper_ms:.1f} "
            f"noise_over_promise={self.noise_over_promise:.3f}"
        )


def federation(home: Path, port: int, rounds: int) -> Definition:
    """Return a federation with 64 queries, noise of four times the clip, and the keeper's key."""
    key = public_text(X25519PrivateKey.from_private_bytes((home / "keeper.key").read_bytes()))
    keeper = Keeper(key=key, url=f"http://127.0.0.1:{port}")
    return make_private(
        mode=PrivacyMode.KEEPER, privacy={"keeper": keeper}, queries=64, steps=1, total_steps=rounds
    )


def measure(*, rounds: int, devices: int, dropped: int, seed: int = 0) -> Outcome:
    """Run `rounds` rounds with one keeper."""
    rng = np.random.default_rng(seed)
    keys = [device_key(index) for index in range(devices)]
    exact, size, seconds, squares = 0, 0, 0.0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "keeper"
        init(home)
        token = (home / "keeper.token").read_text()
        with running(home) as (port, _):
            rules = federation(home, port, rounds)
            sigma = 4.0 * (rules.clip or 0)
            for number in range(rounds):
                came = rng.choice(devices, devices - dropped, replace=False)
                plain, masked = [], []
                for device in came.tolist():
                    sent = _contribution(rules, number, rng)
                    data = encode_masked(rules, number, sent.start_digest, vector_of(sent), keys[device])
                    size = len(data)
                    plain.append(sent)
                    masked.append(decode_masked(data, rules, keys[device].public_key()))
                begun = time.perf_counter()
                answer_V = ask_keeper(opening_of(rules, number, masked), token)
                seconds += time.perf_counter() - begun
                found_V = unmasked_sum(rules, number, masked, answer_V)
                left_V = found_V - noised_sum(rules, number, plain, np.zeros_like(found_V))
                exact += bool(0 < np.abs(left_V).max() < WORST_DEVIATIONS * sigma)
                squares += float((left_V.astype(float) ** 2).mean()) / sigma**2
    return Outcome(
        rounds=rounds,
        exact=exact,
        upload_bytes=size,
        keeper_ms=1000 * seconds / rounds,
        noise_over_promise=(squares / rounds) ** 0.5,
    )


def _contribution(rules: Definition, number: int, rng: np.random.Generator) -> Contribution:
    blank = Contribution(
        definition=rules,
        round_number=number,
        weight=1,
        start_digest=rules.digest,
        c_TQ=np.zeros((1, rules.log.queries), dtype=np.int64),
    )
    c_TQ = np.rint(rng.normal(0, 300, (1, rules.log.queries))).astype(np.int64)
    return replace(blank, c_TQ=c_TQ, gain=int(rng.integers(-100, 101)))


def main() -> None:
    """Measure and print one line. Exit with an error if a round was not exact."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--devices", type=int, default=100)
    parser.add_argument("--dropped", type=int, default=30)
    asked = parser.parse_args()
    found = measure(rounds=asked.rounds, devices=asked.devices, dropped=asked.dropped)
    print(found.line(asked.devices, asked.dropped))
    if found.exact != found.rounds:
        raise SystemExit(f"expected {found.rounds} exact sums, got {found.exact}")


if __name__ == "__main__":
    main()

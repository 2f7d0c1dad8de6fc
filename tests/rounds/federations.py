"""Small federations, and contributions with random integers."""

from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from permille.choices import EstimatorKind
from permille.zo.header import BlockSplit
from permille_rounds.contribution import Contribution
from permille_rounds.definition import Definition, encode_key
from permille_rounds.rounds import History
from tests.unit.zo.logs import make_header

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))


def make_definition(*, queries: int = 4, total_steps: int = 30, **changes: Any) -> Definition:
    """Return a federation of ten rounds of three steps. `log` contains changes of the history's header."""
    log = {"queries": queries, "total_steps": total_steps, "counts": (40, 0, 7)} | changes.pop("log", {})
    fields: dict[str, Any] = {
        "log": make_header(**log),
        "steps": 3,
        "round_key": encode_key(KEY.public_key()),
    }
    return Definition(**fields | changes)


def split_log() -> dict[str, Any]:
    """Return the header's changes for FedSPZO's estimator: two lower and four upper queries."""
    split = BlockSplit(first_upper_tensor=2, lower_queries=2)
    return {"estimator": EstimatorKind.SPLIT, "queries": 6, "split": split}


def make_contributions(
    history: History, devices: int, *, seed: int = 0, size: int = 300
) -> list[Contribution]:
    """Return contributions to the next round. Every third device stops before its last step."""
    rules = history.definition
    rng = np.random.default_rng(seed)
    made = []
    for device in range(devices):
        steps = rules.steps - (device % 3 == 2)
        c_TQ = np.rint(rng.normal(0, size, (steps, rules.log.queries))).astype(np.int64)
        made.append(
            Contribution(
                definition=rules,
                round_number=history.number,
                weight=1 + device % rules.max_weight,
                start_digest=history.digest,
                c_TQ=c_TQ,
                gain=(device - 1) % 3 - 1,
            )
        )
    return made

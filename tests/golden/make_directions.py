"""Write `directions.json` from `tests/unit/zo/reference.py`, never from the code under test.

python -m tests.golden.make_directions
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from tests.unit.zo.reference import Header, state, state_digest, write_log, z

PATH = Path(__file__).with_name("directions.json")

SEEDS = (1, 0xFEDCBA9876543210)
PLACES = [(0, 0), (1, 0), (0, 1), (19_999, 7), (2**32 - 1, 2**32 - 1)]
COUNTS = [5, 0, 129, 40]
SPLIT = {"first_upper_tensor": 2, "lower_queries": 1}
ROWS = [[1, -2, 3], [1000, -70_000, 5], [0, 0, 0], [12, 13, -14], [2**20, -1, 2]]
FLAGS = {1: 1, 2: 2}


def header(seed: int, *, split: bool = False, groups: bool = False) -> dict[str, Any]:
    """Return a header of FORMAT 8.1 as JSON."""
    return {
        "format": "permille-log",
        "version": 1,
        "generator": "philox4x32-10",
        "generator_version": 1,
        "package_digest": "sha256:" + "a" * 64,
        "mask_digest": "sha256:" + "b" * 64,
        "seed": f"{seed:016x}",
        "directions": "groups" if groups else "rademacher",
        "estimator": "split" if split else "gradient" if groups else "spsa",
        "queries": 3,
        "epsilon": (1e-3).hex(),
        "learning_rate": (0.1).hex(),
        "schedule": "linear",
        "total_steps": 20_000,
        "step_unit_exponent": -20,
        "counts": COUNTS,
        "split": SPLIT if split else None,
        "first_tensor": 0,
        "basis_steps": 0,
    }


def vector(of: Header, step: int, query: int) -> dict[str, Any]:
    """Return a direction: its first elements for a human, and the digest of all elements as int32."""
    elements = z(of, step, query)
    return {
        "seed": of["seed"],
        "split": of["split"] is not None,
        "groups": of["directions"] == "groups",
        "step": step,
        "query": query,
        "first": elements[:12],
        "sum": sum(elements),
        "sha256": hashlib.sha256(
            b"".join(e.to_bytes(4, "little", signed=True) for e in elements)
        ).hexdigest(),
    }


def log(of: Header) -> dict[str, Any]:
    """Return a canonical log and the state after its replay."""
    s = state(of, ROWS)
    return {"log": write_log(of, ROWS, FLAGS).hex(), "first": s[:8], "state_digest": state_digest(of, s)}


def main() -> None:
    """Write plain directions at extreme places, all other kinds of directions, and their logs."""
    kinds = [header(SEEDS[1]), header(SEEDS[1], split=True), header(SEEDS[1], groups=True)]
    plain = [vector(header(seed), step, query) for seed in SEEDS for step, query in PLACES]
    others = [vector(of, step, query) for of in kinds[1:] for step, query in ((0, 0), (2, 2), (19_999, 1))]
    parts: dict[str, list[Any]] = {
        "vectors": plain + others,
        "logs": [log(of) for of in kinds],
    }
    lines = [f"{json.dumps(name)}: [\n" + ",\n".join(map(json.dumps, part)) for name, part in parts.items()]
    PATH.write_text("{\n" + "\n],\n".join(lines) + "\n]\n}\n")


if __name__ == "__main__":
    main()

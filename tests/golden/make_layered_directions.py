"""Write `layered_directions.json` from `tests/unit/zo/reference.py`, never from the code that it pins.

python -m tests.golden.make_layered_directions
"""

import hashlib
import json
from pathlib import Path

from tests.unit.zo.reference import Split, layered_state, layered_z

PATH = Path(__file__).with_name("layered_directions.json")

COUNTS = [5, 0, 129, 40]
K = sum(COUNTS)
RANK = 150
BASIS_STEPS = 3
U = [[(37 * i + 101 * r + 11 * i * r) % 255 - 127 for r in range(RANK)] for i in range(K)]
EXPONENTS = [i * i % 6 for i in range(K)]
SEED = 0xFEDCBA9876543210
SPLIT: Split = (2, 1)
ROWS = [[1, -2, 3], [1000, -70_000, 5], [0, 0, 0], [12, 13, -14], [2**20, -1, 2]]


def main() -> None:
    """Each vector: its first elements as text for a human, and the digest of all, as int32 or int64."""
    vectors = []
    for distribution in ("rademacher", "binomial16"):
        for split in (None, SPLIT):
            for step, query in ((0, 0), (2, 2), (3, 0), (3, 2), (19_999, 1)):
                elements = layered_z(
                    SEED,
                    step,
                    query,
                    COUNTS,
                    distribution,
                    u=U,
                    basis_steps=BASIS_STEPS,
                    exponents=EXPONENTS,
                    split=split,
                )
                vectors.append(
                    {
                        "distribution": distribution,
                        "split": split,
                        "step": step,
                        "query": query,
                        "first": elements[:12],
                        "sum": sum(elements),
                        "sha256": _digest(elements, 4),
                    }
                )
    states = []
    for split in (None, SPLIT):
        s = layered_state(
            SEED,
            ROWS,
            COUNTS,
            "rademacher",
            u=U,
            basis_steps=BASIS_STEPS,
            exponents=EXPONENTS,
            split=split,
        )
        states.append({"split": split, "first": s[:8], "sum": sum(s), "sha256": _digest(s, 8)})
    document = {
        "generator": "philox4x32-10",
        "version": 1,
        "seed": f"{SEED:016x}",
        "counts": COUNTS,
        "rank": RANK,
        "basis_steps": BASIS_STEPS,
        "basis_rows_as_bytes": b"".join(_bytes(row, 1) for row in U).hex(),
        "exponents": EXPONENTS,
        "coefficients": ROWS,
        "vectors": vectors,
        "states": states,
    }
    PATH.write_text(json.dumps(document, indent=1) + "\n")


def _digest(numbers: list[int], size: int) -> str:
    return hashlib.sha256(_bytes(numbers, size)).hexdigest()


def _bytes(numbers: list[int], size: int) -> bytes:
    return b"".join(number.to_bytes(size, "little", signed=True) for number in numbers)


if __name__ == "__main__":
    main()

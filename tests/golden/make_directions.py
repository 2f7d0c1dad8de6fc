"""Write `directions.json` from `tests/unit/zo/reference.py`, never from the code that it pins.

python -m tests.golden.make_directions
"""

import hashlib
import json
from pathlib import Path

from tests.unit.zo.reference import BITS, z

PATH = Path(__file__).with_name("directions.json")

SEEDS = {"small": 1, "wide": 0xFEDCBA9876543210}
PLACES = [(0, 0), (1, 0), (0, 1), (19_999, 7), (2**32 - 1, 2**32 - 1)]
COUNTS = [5, 0, 129, 40]


def main() -> None:
    """Each vector: its first elements as text for a human, and the digest of all of them as int8."""
    vectors = []
    for seed in SEEDS.values():
        for step, query in PLACES:
            for distribution in BITS:
                elements = z(seed, step, query, COUNTS, distribution)
                raw = b"".join(element.to_bytes(1, "little", signed=True) for element in elements)
                vectors.append(
                    {
                        "seed": f"{seed:016x}",
                        "step": step,
                        "query": query,
                        "distribution": distribution,
                        "first": elements[:12],
                        "sum": sum(elements),
                        "sha256": hashlib.sha256(raw).hexdigest(),
                    }
                )
    PATH.write_text(
        json.dumps(
            {"generator": "philox4x32-10", "version": 1, "counts": COUNTS, "vectors": vectors}, indent=1
        )
        + "\n"
    )


if __name__ == "__main__":
    main()

"""Replay a federation from its public bytes with the reference of FORMAT only, in a new process.

python -m tests.rounds.audit DEFINITION SEGMENT    prints chain and state digest
"""

import json
import sys
from pathlib import Path

from tests.unit.zo import reference


def main(arguments: list[str]) -> int:
    """Print the chain and the state digest after the rounds of the segment."""
    definition, segment = (Path(argument).read_bytes() for argument in arguments)
    chain, s = reference.audit(definition, segment)
    print(json.dumps({"chain": chain, "state": reference.state_digest(json.loads(definition)["log"], s)}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Replay a federation from its public bytes by the reference of FORMAT alone, in a process of its own.

python -m tests.federation.audit DEFINITION SEGMENT    prints chain and state digest
"""

import json
import sys
from pathlib import Path

from tests.unit.zo import reference


def main(arguments: list[str]) -> int:
    """Print what the rounds lead to."""
    definition, segment = (Path(argument).read_bytes() for argument in arguments)
    chain, s = reference.audit(definition, segment)
    print(json.dumps({"chain": chain, "state": reference.state_digest(json.loads(definition)["log"], s)}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""FORMAT 12, the code and the attacks have the same codes of refusals."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import permille
import permille_rounds
from permille_agent.link import enrolment, pull, trust
from permille_rollouts.agent import participation
from tests.attacks import (
    test_bases,
    test_logs,
    test_memories,
    test_packages,
    test_programs,
    test_references,
    test_states,
    test_trust_device,
)
from tests.rollouts.agent import test_participation
from tests.rounds.attacks import test_private_rounds, test_rounds

LIBRARY = Path(permille.__file__).parent
ROUNDS = Path(str(permille_rounds.__file__)).parent
# It reads files whose content the format does not define (FORMAT 3.3).
OPAQUE = LIBRARY / "tokenizer_files.py"
TRUST = [Path(str(module.__file__)) for module in (enrolment, participation, pull, trust)]


def documented_codes() -> set[str]:
    section = (LIBRARY / "FORMAT.md").read_text().split("\n## 12 ")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `([a-z0-9-]+)` \|", section, re.MULTILINE))


def raised_codes() -> Iterator[str]:
    """Yield the codes of all `PackageError(...)` calls in the library, rounds and the agent's trust."""
    library = set(LIBRARY.rglob("*.py")) | set(ROUNDS.rglob("*.py"))
    yield from _codes(*sorted(library - {OPAQUE}), *TRUST)


def _codes(*paths: Path) -> Iterator[str]:
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "PackageError":
                code = node.args[0]
                assert isinstance(code, ast.Constant) and isinstance(code.value, str), ast.dump(node)
                yield code.value


def attacked_codes() -> set[str]:
    registered = [
        *test_packages.ATTACKS,
        *test_packages.BYTES_ATTACKS,
        *test_logs.ATTACKS,
        *test_logs.JOURNAL_ATTACKS,
        *test_states.ATTACKS,
        *test_private_rounds.ATTACKS,
        *test_rounds.ATTACKS,
        *test_programs.ATTACKS,
        *test_programs.BINDINGS,
        *test_references.ATTACKS,
        *test_bases.ATTACKS,
        *test_memories.ATTACKS,
    ]
    tried = [
        ast.parse(Path(str(one.__file__)).read_text()) for one in (test_participation, test_trust_device)
    ]
    nodes = (node for tree in tried for node in ast.walk(tree))
    named = {str(node.value) for node in nodes if isinstance(node, ast.Constant)}
    return {code for code, _ in registered} | (named & set(_codes(*TRUST)))


def test_every_code_that_is_raised_is_documented() -> None:
    assert set(raised_codes()) == documented_codes()


def test_every_documented_code_has_an_attack() -> None:
    assert attacked_codes() == documented_codes()


def test_there_are_codes_at_all() -> None:
    assert {"mask-range", "log-corrupt", "journal-corrupt"} <= documented_codes()

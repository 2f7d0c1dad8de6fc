"""The device's part of rounds cannot send a memory."""

from pathlib import Path

from permille_rounds.agent import extension
from tests.attacks.test_memories import check_names_no_memory


def test_rounds_never_name_a_memory() -> None:
    check_names_no_memory(sorted(Path(str(extension.__file__)).parent.rglob("*.py")))

"""The console writes nothing without a note but the ends of its own sessions."""

from pathlib import Path

import permille_console
from tests.integration.test_api_audit import writers_in


def test_no_page_writes_without_a_note() -> None:
    assert writers_in(Path(permille_console.__file__).parent) == {"forget"}

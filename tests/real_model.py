"""The real model that some tests need: SmolLM2-135M-Instruct as a GGUF file."""

import os
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]


def smollm2_file() -> Path:
    """Return the path of the file. Skip the test if the file does not exist."""
    named = os.environ.get("PERMILLE_SMOLLM2")
    found = [Path(named)] if named else sorted((_ROOT / "build/smollm2").glob("*.gguf"))
    if not found:
        pytest.skip("SmolLM2 is not here: set PERMILLE_SMOLLM2 to its GGUF file, or put it in build/smollm2")
    return found[0]

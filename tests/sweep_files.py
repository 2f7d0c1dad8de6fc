"""Files for the sweeps of the tests."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
EXAMPLE_MODEL = ROOT / "examples" / "model"
WORDS = ("fine", "warm", "kind", "clear", "dull", "cold", "rude", "dim")

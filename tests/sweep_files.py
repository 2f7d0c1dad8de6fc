"""Paths and words for the tests of sweeps."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
EXAMPLE_MODEL = ROOT / "examples" / "model"
WORDS = ("fine", "warm", "kind", "clear", "dull", "cold", "rude", "dim")

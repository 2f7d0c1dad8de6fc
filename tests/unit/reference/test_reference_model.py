"""The model that lies in the project is the one that its papers describe: small, trained, with sources."""

import json
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from permille_lab.reference.measure import measure

FOLDER = Path(__file__).parents[3] / "lab/reference-6M"
TEXT = (
    "The members of the committee were asked to vote on the new law before the end of the year. "
    "Most of them had read the report, and the rest said that they would do so in the morning."
)


def test_the_weights_are_small_and_their_papers_agree() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 16_000_000
    recipe = json.loads((FOLDER / "recipe.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(FOLDER)
    assert sum(parameter.numel() for parameter in model.parameters()) == recipe["parameters"]
    assert recipe["tokens_seen"] == recipe["steps"] * recipe["recipe"]["batch"] * recipe["recipe"]["context"]
    manifest = json.loads((FOLDER / "manifest.json").read_text())
    assert set(manifest["forbidden_runs"]) == {"tasks", "users", "held-out"}
    assert all(source["licence"] for source in manifest["sources"])


def test_it_has_learned_english() -> None:
    """Plain prose takes it some 1.2 bits a byte; without training it is more than four."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    found = measure(AutoModelForCausalLM.from_pretrained(FOLDER), tokenizer, [TEXT], 256)
    assert found.bits_per_byte < 1.6
    shuffled = " ".join(sorted(TEXT.split()))
    worse = measure(AutoModelForCausalLM.from_pretrained(FOLDER), tokenizer, [shuffled], 256)
    assert worse.bits_per_byte > found.bits_per_byte + 0.3

"""Write docs/reference/models.md, the page of published models: `make catalogue`.

python -m scripts.catalogue
"""

from pathlib import Path
from typing import Final

from permille.models.catalogue import CATALOGUE, TRAINED_TOKENS
from permille.quantization.types import Scheme

PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "reference" / "models.md"
_SCHEMES: Final = (Scheme.NF4, Scheme.INT4, Scheme.INT8)


def text() -> str:
    """Return the page."""
    head = ("model", "family", "parameters", *(f"{scheme}, MB" for scheme in _SCHEMES), "training, MB", "ran")
    rows = [
        (
            entry.name,
            entry.family,
            f"{entry.parameters:,}",
            *(f"{entry.package_bytes(scheme) / 1e6:,.0f}" for scheme in _SCHEMES),
            f"{entry.training_bytes / 1e6:,.0f}",
            entry.ran.value,
        )
        for entry in CATALOGUE
    ]
    lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
    return f"""# Models

Written by `make catalogue`; `permille models catalogue` prints the columns for nf4. Other sizes of
these families load, too.

- **MB of a scheme**: the package without its tokenizer, embedding and head in 8 bits.
- **training**: an estimate of the memory above the package, for a step along the gradient on one row
  of {TRAINED_TOKENS} tokens.
- **ran**: `config` means that no weights of the model were run here. Of every family, a small model
  with random weights gives the logits and gradients of transformers.

The configs here are copies, not read from the hub. Their numbers of parameters equal the published
numbers, but for OLMo 3 and Ministral 3, whose numbers were not at hand.

{chr(10).join(lines)}
"""


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")

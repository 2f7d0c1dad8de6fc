"""Write docs/reference/models.md, the page of published models: `make catalogue`.

python -m scripts.catalogue
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from permille.models.catalogue import CATALOGUE, TRAINED_TOKENS, Framing
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
    framings = [(entry.name, *_framed(entry.framing)) for entry in CATALOGUE]
    framed_head = ("model", "before a text", "between documents", "template writes BOS")
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

{_table(head, rows)}

## Special tokens around a text

Rows of tokens for masks, training and decisions begin as the model reads a text in use: with BOS,
if the model's own files ask for it. No tokenizer here adds a token after a text. A conversation has
BOS once, whether the template writes it or not.

For a model with BOS, each document is a sequence of its own. Without BOS, several documents can
share a sequence, with nothing between them. The publisher trained with the token of the column
"between documents".

{_table(framed_head, framings)}

The settings of SmolLM2 were read from its file. All others are written from memory, and "?" means
unknown. They are meant to equal the publisher's `tokenizer_config.json`, `tokenizer.json` and chat
template. For a base model, the template is that of its instruct version. permille begins a text as
the model's own files say, never as this table says. Tests make tokenizers with these settings, and
compare them with llama.cpp.
"""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def _framed(framing: Framing | None) -> tuple[str, str, str]:
    if framing is None:
        return "?", "?", "?"
    template = {True: "yes", False: "no", None: "no template"}[framing.template_bos]
    return _code(framing.bos), _code(framing.between), template


def _code(token: str | None) -> str:
    # A bar ends a cell of the table, except after a backslash.
    return "none" if token is None else f"`{token}`".replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")

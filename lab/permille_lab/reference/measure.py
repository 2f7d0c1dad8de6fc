"""Bits per byte of any causal model folder on held-out text: comparable across tokenizers.

Each document is read behind the model's `<s>` (where it has one) in windows of `--context` tokens that
overlap by half: every token is predicted once, from at least half a window of its past where there is so
much. The total loss in bits is divided by the text's bytes in UTF-8.

    python -m permille_lab.reference.measure --model MODEL --data "$PERMILLE_DATA"
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from permille.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Sums over some documents; `bits_per_byte` and `loss_per_token` follow."""

    nats: float
    tokens: int
    size_bytes: int

    @property
    def bits_per_byte(self) -> float:
        """Total loss in bits over the text's bytes."""
        return self.nats / math.log(2) / self.size_bytes

    @property
    def loss_per_token(self) -> float:
        """Mean loss in nats; depends on the tokenizer."""
        return self.nats / self.tokens


def held_out(data: Path) -> dict[str, list[str]]:
    """The held-out texts: WikiText-2's raw test file whole, and the C4 sample's last 100 documents."""
    rows = _rows(data / "text/c4_en/c4_sample.jsonl", 10**9)[-100:]
    return {
        "wikitext-2-test": [(data / "text/wikitext-2/wiki.test.raw").read_text(encoding="utf-8")],
        "c4-last-100": [row["text"] for row in rows],
    }


def never_seen(data: Path) -> dict[str, list[str]]:
    """Texts that neither this model nor the yardstick was trained on: of users and of tasks."""
    sst = (data / "tasks/SST-2_sentences/test.tsv").read_text(encoding="utf-8").splitlines()[1:]
    plays = _rows(data / "users/shakespeare/tinyshakespeare_by_speaker.jsonl", 60)
    return {
        "shakespeare": ["\n".join(row["text"])[:2000] for row in plays],
        "lamp7-tweets": [
            "\n".join(row["profile"]) for row in _rows(data / "users/lamp7_dev/lamp7_dev.jsonl", 150)
        ],
        "boolq-passages": sorted({row["passage"] for row in _rows(data / "tasks/BoolQ/val.jsonl", 300)}),
        "sst-2-sentences": [row.split("\t")[0] for row in sst[:600]],
    }


def _rows(path: Path, count: int) -> list[Any]:
    """The first `count` lines that parse; broken ones are reported."""
    rows: list[Any] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if len(rows) == count:
            break
        try:
            rows.append(json.loads(line))
        except ValueError as exc:
            print(f"{path.name}, line {number} left out: {exc}", file=sys.stderr)
    return rows


def measure(model: Any, tokenizer: Any, texts: Iterable[str], context: int) -> Measured:
    """Sum the losses of all texts' tokens.

    Raises:
        InputError: the window is too short, or no text has a token.
    """
    if context < 4:
        raise InputError(f"expected a context of at least 4 tokens, got {context}")
    nats, tokens, size = 0.0, 0, 0
    start = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
    for text in texts:
        ids = start + list(tokenizer(text, add_special_tokens=False)["input_ids"])
        for window, first in _windows(ids, len(start) or 1, context):
            nats += _loss(model, window, first)
            tokens += len(window) - first
        size += len(text.encode())
    if not tokens or not size:
        raise InputError("expected text to measure, found none")
    return Measured(nats=nats, tokens=tokens, size_bytes=size)


def _windows(ids: list[int], first: int, context: int) -> Iterator[tuple[list[int], int]]:
    """(window, index in it of the first token that counts): each token counts once, the first not at all."""
    done = first
    while done < len(ids):
        begin = max(0, done - context // 2)
        end = min(len(ids), begin + context)
        yield ids[begin:end], done - begin
        done = end


@torch.inference_mode()
def _loss(model: Any, window: list[int], first: int) -> float:
    logits = model(input_ids=torch.tensor([window])).logits[0, first - 1 : -1].float()
    return float(F.cross_entropy(logits, torch.tensor(window[first:]), reduction="sum"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, action="append")
    parser.add_argument("--data", type=Path, required=True, help="the folder that PERMILLE_DATA names")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--bytes", type=int, help="only so many bytes of each text (a quick look)")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for folder in args.model:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for name, texts in {**held_out(args.data), **never_seen(args.data)}.items():
            found = measure(model, tokenizer, _first_bytes(texts, args.bytes), args.context)
            row = {
                "model": folder.name,
                "text": name,
                "bits_per_byte": round(found.bits_per_byte, 4),
                "loss_per_token": round(found.loss_per_token, 4),
                "tokens": found.tokens,
                "bytes": found.size_bytes,
            }
            print(json.dumps(row), flush=True)


def _first_bytes(texts: list[str], limit: int | None) -> Iterator[str]:
    left = math.inf if limit is None else limit
    for text in texts:
        if left <= 0:
            return
        piece = text if left == math.inf else text[: int(left)]
        left -= len(piece.encode())
        yield piece


if __name__ == "__main__":
    main()

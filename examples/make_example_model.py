"""Train the example model of this project from scratch, on text that may be redistributed.

    python examples/make_example_model.py --out examples/model --work /tmp/example-model

The text comes from two Debian packages: the King James Bible (`bible-kjv-text`, public domain) and the
English Debian Administrator's Handbook (`debian-handbook`, CC BY-SA 3.0 or GPL 2+, (C) Raphael Hertzog and
Roland Mas).

The results are:

- in `--out`, a Hugging Face folder with a Llama model of about one million parameters
- in `--out`, `recipe.json` with sizes, seed, versions and the measured loss
- beside `--out`, `corpus.jsonl.gz`, the corpus of the demo, with held-out texts

The script needs Debian with `apt-get` and the extras `torch` and `agent`. It takes about half an hour on two
cores. The results are committed, so users of the project do not need to run it.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html
import json
import math
import platform
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

PACKAGES = ("bible-kjv", "bible-kjv-text", "debian-handbook", "libreadline8", "libtinfo6")
SPECIAL = ("<s>", "</s>", "<pad>")
CONTEXT = 256
VOCABULARY = 2048


def fetch(work: Path) -> Path:
    """Download and unpack the Debian packages without installing them. Return the folder of their files."""
    root = work / "root"
    if not (root / "usr/lib/bible.data").exists():
        work.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", *PACKAGES], cwd=work, check=True)
        for archive in sorted(work.glob("*.deb")):
            subprocess.run(["dpkg", "-x", str(archive), str(root)], check=True)
    return root


def bible_chapters(root: Path) -> Iterator[str]:
    """Yield the chapters of the Bible, without the numbers of verses."""
    program = root / "usr/bin/bible"
    command = [str(program), "-f", "-p", str(root / "usr/lib"), "Gen1:1-Rev22:21"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    chapter: list[str] = []
    for line in text.splitlines():
        found = re.match(r"^(\w+?)(\d+):(\d+) (.*)$", line)
        if not found:
            continue
        if found[3] == "1" and chapter:
            yield " ".join(chapter)
            chapter = []
        chapter.append(found[4].strip())
    yield " ".join(chapter)


def handbook_sections(root: Path) -> Iterator[str]:
    """Yield the sections of the English handbook. Each file is a section."""
    for path in sorted((root / "usr/share/doc/debian-handbook/html/en-US").glob("*.html")):
        page = path.read_text(encoding="utf-8")
        paragraphs = re.findall(r'<div class="para">(.*?)</div>', page, flags=re.S)
        clean = [" ".join(html.unescape(re.sub(r"<[^>]+>", "", p)).split()) for p in paragraphs]
        text = "\n".join(p for p in clean if len(p) > 40)
        if len(text) > 400:
            yield text


def split(texts: list[str], seed: int) -> tuple[list[str], list[str]]:
    """Return training and held-out texts. A hash of text and seed holds out one text in twelve."""
    held = [int(hashlib.sha256(f"{seed}:{t[:200]}".encode()).hexdigest(), 16) % 12 == 0 for t in texts]
    return [t for t, h in zip(texts, held, strict=True) if not h], [
        t for t, h in zip(texts, held, strict=True) if h
    ]


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Train a byte-level BPE tokenizer. It can encode every text, so it has no unknown token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def token_stream(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """Return the token ids of all texts as one stream. Each text starts with `<s>`."""
    ids = [[0, *encoding.ids] for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]
    return np.concatenate([np.asarray(row, dtype=np.int64) for row in ids])


def held_out_loss(model: LlamaForCausalLM, stream: np.ndarray) -> float:
    """Return the mean loss in nats per token over consecutive windows of the stream."""
    windows = torch.from_numpy(stream[: len(stream) // CONTEXT * CONTEXT].reshape(-1, CONTEXT))
    model.eval()
    with torch.inference_mode():
        batches = [windows[i : i + 16] for i in range(0, len(windows), 16)]
        losses = [float(model(input_ids=batch, labels=batch).loss) * len(batch) for batch in batches]
    model.train()
    return sum(losses) / len(windows)


def train(
    args: argparse.Namespace, streams: list[np.ndarray], weights: list[float], held: np.ndarray
) -> LlamaForCausalLM:
    """Train by AdamW on random windows, with warm-up and cosine decay. A killed run continues."""
    torch.manual_seed(args.seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        rms_norm_eps=1e-6,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    rng = np.random.default_rng(args.seed)
    checkpoint, first = args.work / "state.pt", 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    for step in range(args.steps):
        rows = []
        for _ in range(args.batch):
            stream = streams[int(rng.choice(len(streams), p=weights))]
            start = int(rng.integers(0, len(stream) - CONTEXT))
            rows.append(stream[start : start + CONTEXT])
        if step < first:
            continue  # the rows were drawn, so a continued run sees the same batches
        warm = min(1.0, (step + 1) / 100)
        optimizer.param_groups[0]["lr"] = (
            args.lr * warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / args.steps)))
        )
        batch = torch.from_numpy(np.stack(rows))
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 250 == 0 or step + 1 == args.steps:
            print(
                f"step {step + 1} loss {loss.item():.3f} held-out {held_out_loss(model, held[:65536]):.3f}",
                flush=True,
            )
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, checkpoint.with_suffix(".tmp"))
            checkpoint.with_suffix(".tmp").replace(checkpoint)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="downloads and checkpoints")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.work = args.work.resolve()
    root = fetch(args.work)
    sources = {
        "king-james-bible": list(bible_chapters(root)),
        "debian-handbook": list(handbook_sections(root)),
    }
    parts = {name: split(texts, args.seed) for name, texts in sources.items()}
    training = [text for kept, _ in parts.values() for text in kept]
    held_texts = [text for _, held in parts.values() for text in held]
    tokenizer = train_tokenizer(training)
    streams = [token_stream(tokenizer, kept) for kept, _ in parts.values()]
    held = token_stream(tokenizer, held_texts)
    print(
        {name: len(stream) for name, stream in zip(parts, streams, strict=True)},
        "held-out",
        len(held),
        flush=True,
    )
    model = train(args, streams, [0.65, 0.35], held)

    args.out.mkdir(parents=True, exist_ok=True)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.save_pretrained(args.out)
    model.to(torch.float16).save_pretrained(args.out)
    loss_f16 = held_out_loss(LlamaForCausalLM.from_pretrained(args.out, dtype=torch.float32), held)
    corpus = args.out.parent / "corpus.jsonl.gz"
    with corpus.open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, filename="") as file:
        for text in held_texts:
            file.write((json.dumps({"text": text}) + "\n").encode())
    recipe = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "training_tokens_seen": args.steps * args.batch * CONTEXT,
        "training_text_bytes": {n: sum(len(t.encode()) for t in kept) for n, (kept, _) in parts.items()},
        "held_out_tokens": len(held),
        "held_out_loss_nats_per_token": round(loss_f16, 4),
        "steps": args.steps,
        "batch": args.batch,
        "context": CONTEXT,
        "learning_rate": args.lr,
        "seed": args.seed,
        "debian_packages": sorted(p.name for p in args.work.glob("*.deb")),
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }
    (args.out / "recipe.json").write_text(json.dumps(recipe, indent=2) + "\n")
    print(json.dumps(recipe, indent=2))


if __name__ == "__main__":
    main()

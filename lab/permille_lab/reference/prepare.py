"""Texts to clean documents, a tokenizer and token streams; a manifest counts what was dropped and why.

Every document is cut into pieces of at most 6,000 characters at paragraphs. A piece is dropped if it is
short, if more than half of its 13-word runs came before, or if it shares a run with the forbidden text of
`sources.toml` (tasks, users, held-out). One piece in 200 becomes validation text. Streams hold `<s>` before
each piece; attention across pieces is allowed in training.

    python -m permille_lab.reference.prepare --data "$PERMILLE_DATA" --texts build/reference/texts \\
        --out build/reference/corpus

`--tokenizer MODEL` takes a trained model's tokenizer: its streams are those that the model was trained on, as
their manifest, the same one, says (`reference.train --begin-from MODEL`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from permille_lab.reference.grams import LONG, Forbidden, Seen, word_ids
from permille_lab.reference.sources import DEFAULT_SOURCES, Source, SourceList, read_sources
from permille_lab.reference.texts import documents, source_files
from permille_lab.reference.tokenizer import read_tokenizer, save_tokenizer, token_stream, train_tokenizer
from permille_lab.reference.unseen import unseen_texts

PIECE_CHARACTERS = 6000
SHORTEST_CHARACTERS = 200
VALIDATION_ONE_IN = 200
TOKENIZER_BYTES = 20_000_000


@dataclass(slots=True, kw_only=True)
class Kept:
    """What became of one source: counts by reason, the files' digests, and the pieces kept."""

    counts: Counter[str] = field(default_factory=Counter)
    digests: list[str] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    validation: list[str] = field(default_factory=list)


def pieces(document: str) -> Iterator[str]:
    """The document cut at its lines into pieces of at most PIECE_CHARACTERS (longer where one line is)."""
    lines: list[str] = []
    size = 0
    for line in document.strip().splitlines():
        if lines and size + len(line) > PIECE_CHARACTERS:
            yield "\n".join(lines).strip()
            lines, size = [], 0
        lines.append(line)
        size += len(line) + 1
    if lines:
        yield "\n".join(lines).strip()


def clean(source: Source, root: Path, forbidden: dict[str, Forbidden], seen: Seen) -> Kept:
    """Read a source's files, by digest where a cap chooses among them, and sort its pieces."""
    kept = Kept()
    files = [(hashlib.sha256(path.read_bytes()).hexdigest(), path) for path in source_files(source, root)]
    if source.cap_mb is not None:
        files.sort()
    size = 0
    for digest, path in files:
        if source.cap_mb is not None and size > source.cap_mb * 1e6:
            kept.counts["files left out by the cap"] += 1
            continue
        kept.digests.append(f"{digest}  {path.relative_to(root).as_posix()}")
        found = list(documents(source, path))
        for document in found[: len(found) - source.omit_last]:
            for piece in pieces(document):
                size += len(piece)
                _sort(piece, kept, forbidden, seen)
    return kept


def _sort(piece: str, kept: Kept, forbidden: dict[str, Forbidden], seen: Seen) -> None:
    kept.counts["read"] += 1
    if len(piece) < SHORTEST_CHARACTERS:
        kept.counts["too short"] += 1
        return
    ids = word_ids(piece)
    for kind, grams in forbidden.items():
        if grams.touches(ids):
            kept.counts[f"shares 13 words with {kind}"] += 1
            return
    if seen.repeated(ids):
        kept.counts["repeated"] += 1
        return
    drawn = int.from_bytes(hashlib.sha256(piece.encode()).digest()[:4], "little")
    (kept.validation if drawn % VALIDATION_ONE_IN == 0 else kept.pieces).append(piece)
    kept.counts["kept"] += 1


def prepare(
    listed: SourceList, texts: Path, data: Path, out: Path, vocabulary: int, known: Tokenizer | None = None
) -> dict[str, Any]:
    """Write tokenizer, `<group>.npy`, `validation.npy`, `files/*.sha256`, `manifest.json`; return that.

    Args:
        vocabulary: of the tokenizer that is trained, where none is `known`.
    """
    out.mkdir(parents=True, exist_ok=True)
    forbidden = {kind: Forbidden(unseen_texts(data, globs)) for kind, globs in listed.forbidden.items()}
    seen = Seen()
    results = {}
    for source in listed.sources:
        root = data if source.origin is None else texts / source.name
        results[source.name] = clean(source, root, forbidden, seen)
        print(source.name, dict(results[source.name].counts), flush=True)
    tokenizer = known or train_tokenizer(_sample(listed, results), vocabulary)
    save_tokenizer(tokenizer, out / "tokenizer")
    streams = _write_streams(listed, results, tokenizer, out)
    manifest = {
        "rule": f"{LONG} words in a row; forbidden texts of 8 to 12 words whole",
        "forbidden_runs": {kind: len(grams) for kind, grams in forbidden.items()},
        "mixture": listed.mixture,
        "tokens": streams,
        "vocabulary": tokenizer.get_vocab_size(),
        "sources": [_described(source, results[source.name], out) for source in listed.sources],
    }
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return manifest


def _sample(listed: SourceList, results: dict[str, Kept]) -> Iterable[str]:
    """Text for the tokenizer, each group as large as its share of the mixture."""
    for group, share in listed.mixture.items():
        left = share * TOKENIZER_BYTES
        texts = [p for s in listed.sources if s.group == group for p in results[s.name].pieces]
        stride = max(1, int(sum(map(len, texts)) / max(left, 1)))
        yield from texts[::stride]


def _write_streams(
    listed: SourceList, results: dict[str, Kept], tokenizer: Tokenizer, out: Path
) -> dict[str, int]:
    sizes = {}
    for group in listed.mixture:
        names = [source.name for source in listed.sources if source.group == group]
        parts = [token_stream(tokenizer, results[name].pieces) for name in names]
        sizes[group] = _save(out / f"{group}.npy", parts)
    parts = [token_stream(tokenizer, kept.validation) for kept in results.values()]
    sizes["validation"] = _save(out / "validation.npy", parts)
    return sizes


def _save(path: Path, parts: list[NDArray[np.uint16]]) -> int:
    stream = np.concatenate(parts) if parts else np.empty(0, dtype=np.uint16)
    np.save(path, stream)
    return len(stream)


def _described(source: Source, kept: Kept, out: Path) -> dict[str, Any]:
    listing = "\n".join(kept.digests) + "\n"
    (out / "files").mkdir(exist_ok=True)
    (out / "files" / f"{source.name}.sha256").write_text(listing, encoding="utf-8")
    return {
        "name": source.name,
        "group": source.group,
        "origin": source.origin or "data folder",
        "commit": source.commit,
        "licence": source.licence,
        "files": len(kept.digests),
        "sha256_of_file_list": hashlib.sha256(listing.encode()).hexdigest(),
        "bytes_kept": sum(len(piece.encode()) for piece in kept.pieces),
        "pieces": dict(sorted(kept.counts.items())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sources", type=Path, default=DEFAULT_SOURCES)
    parser.add_argument("--texts", type=Path, required=True, help="where `reference.fetch` wrote")
    parser.add_argument("--data", type=Path, required=True, help="the folder that PERMILLE_DATA names")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--tokenizer", type=Path, metavar="MODEL", help="of this model, instead of a new one")
    args = parser.parse_args()
    known = None if args.tokenizer is None else read_tokenizer(args.tokenizer)
    manifest = prepare(read_sources(args.sources), args.texts, args.data, args.out, args.vocabulary, known)
    print(json.dumps(manifest["tokens"]))


if __name__ == "__main__":
    main()

"""Peak memory of Fisher scores on a random Llama: the library's way, with the scores on disk, and the
obvious way.

    python -m permille_lab.benchmarks.fisher_memory
    python -m permille_lab.benchmarks.fisher_memory --hidden 2048 --layers 22 --tokens 512

Each way runs in a process of its own; a thread reads the anonymous resident memory (what cannot be dropped;
mapped files can) every few milliseconds. The obvious way is one backward that keeps all gradients and all
activations. Prints one JSON object with sizes in MB of 10^6 bytes.
"""

import argparse
import json
import multiprocessing
import os
import re
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from permille.models.families import scoped_tensors
from permille.sensitivity.fisher import fisher_scores

WAYS = ("library", "library, scores on disk", "obvious")


class PeakMemory:
    """Largest anonymous resident memory of this process while the block runs, in bytes."""

    def __enter__(self) -> "PeakMemory":
        self.before = self.peak = _anonymous_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.003):
            self.peak = max(self.peak, _anonymous_bytes())


def _anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    if found is None:
        raise SystemExit("expected RssAnon in /proc/self/status: this benchmark needs Linux")
    return int(found[1]) * 1024


def make_model(arguments: argparse.Namespace) -> Any:
    """A Llama with random weights: memory does not depend on their values."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=arguments.vocabulary,
        hidden_size=arguments.hidden,
        intermediate_size=arguments.hidden * 11 // 4,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 64,
        num_key_value_heads=arguments.hidden // 64,
        tie_word_embeddings=True,
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def obvious(model: Any, sequences_NT: np.ndarray[Any, np.dtype[np.int64]]) -> None:
    """Every gradient at once, every activation kept."""
    names = [name for name, _ in scoped_tensors(model.config.to_dict())]
    model.requires_grad_(False)
    parameters = [model.get_parameter(name).requires_grad_(True) for name in names]
    sums = [torch.zeros_like(parameter) for parameter in parameters]
    for tokens_T in sequences_NT:
        ids_BT = torch.from_numpy(tokens_T)[None]
        model(input_ids=ids_BT, labels=ids_BT, use_cache=False).loss.backward()
        for total, parameter in zip(sums, parameters, strict=True):
            total += parameter.grad**2
            parameter.grad = None


def measure(way: str, arguments: argparse.Namespace, results: Connection) -> None:
    """Runs in a child process."""
    model = make_model(arguments)
    weights = sum(parameter.numel() * 4 for parameter in model.parameters())
    scored = sum(rows * columns * 4 for _, (rows, columns) in scoped_tensors(model.config.to_dict()))
    sequences_NT = np.random.default_rng(0).integers(0, arguments.vocabulary, (2, arguments.tokens))
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as spill, PeakMemory() as memory:
        if way == "obvious":
            obvious(model, sequences_NT)
        else:
            on_disk = 0 if way.endswith("disk") else 1 << 62
            fisher_scores(model, sequences_NT, spill_dir=Path(spill), in_memory_bytes=on_disk)
    results.send(
        {
            "weights_mb": round(weights / 1e6),
            "scores_mb": round(scored / 1e6),
            "above_weights_mb": round((memory.peak - memory.before) / 1e6),
            "seconds_a_sequence": round((time.monotonic() - started) / 2, 1),
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=8192)
    arguments = parser.parse_args()
    # For the children: freed blocks go back to the system at once, so the figure is what is in use.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    context = multiprocessing.get_context("spawn")
    report = {}
    for way in WAYS:
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=measure, args=(way, arguments, sender))
        child.start()
        sender.close()
        report[way] = receiver.recv()
        child.join()
    print(json.dumps({"settings": vars(arguments), "peak": report}, indent=2))


if __name__ == "__main__":
    main()

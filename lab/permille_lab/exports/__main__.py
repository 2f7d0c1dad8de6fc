"""Measure the share of a person's gain that remains in llama.cpp, by type of file: `make bench-exports`.

    PERMILLE_MODELS=DIR PERMILLE_DATA=DIR python -m permille_lab.exports

A package of each scheme is trained as the agent trains, on one speaker of Shakespeare's plays. The base and
the personal model are exported in every type. llama.cpp then computes rows of the select split.

    divergence = mean over tokens of KL(ours || theirs)
    share = (loss of our base - loss of their personal) / (loss of our base - loss of our personal)

"Ours" is the float32 export in unmodified transformers. The light engine agrees with it to 1e-5. "Theirs" is
the exported file in llama.cpp.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from permille.engines.export import export_transformers
from permille.engines.factory import LIGHT, open_engine
from permille.engines.gguf.blocks import ENCODED, BlockType
from permille.engines.gguf.export import GGUF_FILE, export_gguf
from permille.engines.sampling import TokenSampling
from permille.package.reader import Package
from permille.quantization.types import Scheme
from permille_agent.embed import Row, personalise
from permille_lab.exports.llama_cpp import LlamaCpp
from permille_lab.learning.compare import SPEAKER, texts
from permille_lab.learning.runs import options_for, text_run
from permille_lab.measuring.cells import Cells, Result, Settings, settings_parser
from permille_lab.measuring.machine import machine
from permille_lab.measuring.model_packages import Sources, model_package, sources_from_environment

FIGURE = "exports"
MODELS = ("stories260K-hf", "reference-7M")
_STEPS, _ROWS = 80, 40
_PROMPT, _TOKENS, _TEXTS = 16, 32, 8

LogProbs = list[NDArray[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Personal:
    """A package, its trained values, and the rows that judge."""

    package: Package
    values_K: NDArray[np.float32]
    rows: Sequence[Row]

    @property
    def variants(self) -> Mapping[str, NDArray[np.float32]]:
        """Sparse values of the base and of the personal model."""
        return {"base": self.package.values(), "personal": self.values_K}


def measure(personal: Personal, folder: Path) -> Result:
    """Measure all file types that the package's scheme allows."""
    package, rows = personal.package, personal.rows
    ours = {name: _ours(package, values_K, rows, folder) for name, values_K in personal.variants.items()}
    base, best = mean_loss(ours["base"], rows), mean_loss(ours["personal"], rows)
    engine = open_engine(package, LIGHT, threads=1)
    prompts = [row.ids_T[:_PROMPT] for row in rows[:_TEXTS]]
    written = [
        list(engine.generate(personal.values_K, prompt, TokenSampling(max_new_tokens=_TOKENS)))
        for prompt in prompts
    ]
    context = max(_PROMPT + _TOKENS, *(len(row.ids_T) for row in rows))
    kinds = {}
    for kind in ENCODED:
        if kind is BlockType.Q4_0 and package.manifest.scheme.name is not Scheme.INT4:
            continue
        theirs, same = {}, 0
        for name, values_K in personal.variants.items():
            path = folder / f"{kind}-{name}"
            exported = export_gguf(package, values_K, path, kind=kind)
            with LlamaCpp(path / GGUF_FILE, context=context) as peer:
                theirs[name] = [peer.log_probs(row.ids_T) for row in rows]
                if name == "personal":
                    found = [peer.greedy(prompt, _TOKENS) for prompt in prompts]
                    same = sum(own == other for own, other in zip(written, found, strict=True))
        kinds[kind.value] = {
            "bytes": exported.size_bytes,
            "kept": exported.kept,
            "divergence": divergence(ours["personal"], theirs["personal"]),
            "base": mean_loss(theirs["base"], rows),
            "personal": mean_loss(theirs["personal"], rows),
            "share": (base - mean_loss(theirs["personal"], rows)) / (base - best),
            "same_texts": f"{same} of {len(prompts)}",
        }
    return {"k": package.k, "base": base, "personal": best, "kinds": kinds, "machine": machine()}


def log_probs(logit_TD: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the log-probabilities of the next token at each position, float64 [T, D]."""
    logit_TD64 = logit_TD.astype(np.float64)
    logit_TD64 -= logit_TD64.max(axis=1, keepdims=True)
    found: NDArray[np.float64] = logit_TD64 - np.log(np.exp(logit_TD64).sum(axis=1, keepdims=True))
    return found


def divergence(ours: LogProbs, theirs: LogProbs) -> float:
    """Return the Kullback-Leibler divergence from ours to theirs, nats per token."""
    parts = [(np.exp(p) * (p - q)).sum(axis=1) for p, q in zip(ours, theirs, strict=True)]
    return float(np.concatenate(parts).mean())


def mean_loss(found: LogProbs, rows: Sequence[Row]) -> float:
    """Return the mean loss of the target tokens."""
    losses = []
    for own, row in zip(found, rows, strict=True):
        place = np.flatnonzero(row.target_T)
        losses.append(-own[place - 1, row.ids_T[place]])
    return float(np.concatenate(losses).mean())


def _ours(package: Package, values_K: NDArray[np.float32], rows: Sequence[Row], folder: Path) -> LogProbs:
    import torch
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory(dir=folder) as name:
        export_transformers(package, values_K, Path(name))
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
        with torch.no_grad():
            return [log_probs(model(torch.from_numpy(row.ids_T)[None]).logits[0].numpy()) for row in rows]


def measured(sources: Sources, folder: Path, settings: Settings) -> Result:
    """Train a package of a model, and measure its exports."""
    package = model_package(sources, settings["model"], folder, scheme=Scheme(settings["scheme"]))
    with tempfile.TemporaryDirectory() as name:
        run = text_run(package, texts(sources, 0)[SPEAKER], Path(name) / "text", seed=0, threads=1)
        options = options_for(package, seed=0, steps=settings["steps"])
        found = personalise(package, run.engine, run.prepared, options, folder=Path(name) / "run")
        personal = Personal(package=package, values_K=found.values_K, rows=run.prepared.select[:_ROWS])
        return measure(personal, Path(name))


def main() -> None:
    """Measure the missing cells."""
    parser = settings_parser(__doc__, FIGURE)
    options = parser.parse_args()
    sources, cells = sources_from_environment(), Cells(options.cells)
    for model in MODELS:
        for scheme in (Scheme.INT4, Scheme.NF4):
            settings: Settings = {"model": model, "scheme": scheme.value, "steps": _STEPS, "rows": _ROWS}
            cells.once(FIGURE, settings, partial(measured, sources, options.folder, settings))


if __name__ == "__main__":
    main()

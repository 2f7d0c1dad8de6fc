"""Base and personal model side by side: losses on held-out text, and what each writes after a prompt."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from permille.errors import InputError
from permille_agent.local.model import LocalModel, Sampling, Variant
from permille_agent.state.home import Home
from permille_agent.text.documents import PlainText
from permille_agent.text.preparation import prepare, tokenize
from permille_agent.text.reading import read_documents, survey
from permille_agent.text.rows import document_rows
from permille_agent.training.decision import Decision
from permille_agent.training.evaluation import document_losses
from permille_agent.training.evidence import Comparison, compare_losses
from permille_agent.training.outcome import TextSource
from permille_agent.training.run import BegunRun, LearnedText, RunFolder, find_run

PROMPT_WORDS = 6
DEFAULT_SAMPLES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedLosses:
    """Losses of both models, nats a token, on the text that `text` describes."""

    text: str
    base: float | None
    personal: float | None
    bits_per_byte_base: float | None
    bits_per_byte_personal: float | None
    improvement: Comparison | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What each model writes after a prompt."""

    prompt: str
    base: str
    personal: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySide:
    """The comparison of the base with the personal model of a run."""

    run: str
    package: str
    losses: ComparedLosses
    samples: tuple[Sample, ...]


def compare(
    home: Home, model: LocalModel, *, data_paths: Sequence[Path], prompts: Sequence[str], sampling: Sampling
) -> SideBySide:
    """Compare both models on the same text and the same prompts.

    Args:
        home: the home folder.
        model: the active model, opened.
        data_paths: text to measure on, all of it; none: the run's own judgement on its test split is shown.
        prompts: what to continue; none: the first words of texts of the run's test split that are still
            there.
        sampling: how.

    Raises:
        InputError: nothing personal is active, or the text cannot be used.
    """
    model.values(Variant.PERSONAL)  # refuses where there is none
    folder = find_run(home, model.active.run or "")
    losses = _measured(model, data_paths) if data_paths else _judged(folder)
    prompts = list(prompts) or test_prompts(folder, model) or ["The"]
    samples = tuple(_sample(model, prompt, sampling) for prompt in prompts)
    return SideBySide(run=folder.name, package=model.active.package, losses=losses, samples=samples)


def _judged(folder: RunFolder) -> ComparedLosses:
    decision = folder.require("decision", Decision)
    by_parts = folder.load("learned", LearnedText) is not None
    return ComparedLosses(
        text="parts of the text, each before it trained" if by_parts else "test split, untouched by training",
        base=decision.loss_base,
        personal=decision.loss_personal,
        bits_per_byte_base=decision.bits_per_byte_base,
        bits_per_byte_personal=decision.bits_per_byte_personal,
        improvement=decision.against_base,
    )


def _measured(model: LocalModel, data_paths: Sequence[Path]) -> ComparedLosses:
    documents, report = read_documents(data_paths)
    row_tokens = min(128, int(model.package.config.get("max_position_embeddings") or 128))
    known, tokenized = tokenize(documents, model.tokenizer, report, row_tokens=row_tokens)
    if len(known) < 2:
        raise InputError(f"expected at least 2 documents to compare on, got {len(known)}")
    rows = document_rows(tokenized, row_tokens)
    base, personal = (
        document_losses(model.engine, model.values(variant), rows, len(known))
        for variant in (Variant.BASE, Variant.PERSONAL)
    )
    improvement = compare_losses((base.nats_D - personal.nats_D) / base.tokens_D, base.tokens_D)
    return ComparedLosses(
        text=f"{len(known)} documents, {int(base.tokens_D.sum())} tokens, maybe trained on",
        base=base.per_token,
        personal=personal.per_token,
        bits_per_byte_base=base.bits_per_byte,
        bits_per_byte_personal=personal.bits_per_byte,
        improvement=improvement if math.isfinite(improvement.improvement) else None,
    )


def _sample(model: LocalModel, prompt: str, sampling: Sampling) -> Sample:
    base, personal = (
        "".join(model.complete(prompt, variant, sampling)[1]) for variant in (Variant.BASE, Variant.PERSONAL)
    )
    return Sample(prompt=prompt, base=base, personal=personal)


def test_prompts(folder: RunFolder, model: LocalModel, count: int = DEFAULT_SAMPLES) -> list[str]:
    """Take first words of texts of the run's test split, where the user's files are still there."""
    options = folder.require("run", BegunRun).definition.options
    paths = (folder.load("data", TextSource) or TextSource()).paths
    if not paths:
        return []
    documents, _ = survey(paths)
    try:
        test = prepare(documents, model.tokenizer, row_tokens=options.row_tokens).test_documents
    except InputError:
        return []  # what is left of the text is too little
    texts = [document.content.text for document in test if isinstance(document.content, PlainText)]
    return [" ".join(text.split()[:PROMPT_WORDS]) for text in texts[:count]]

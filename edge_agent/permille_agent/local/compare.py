"""Comparison of the base and the personal model: losses on held-out text, and samples."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from permille.errors import InputError
from permille_agent.local.model import LocalModel, Sampling, Variant
from permille_agent.state.home import Home, path_of
from permille_agent.text.documents import Content, Conversation, PlainText
from permille_agent.text.preparation import prepare, tokenize
from permille_agent.text.reading import read_documents, survey
from permille_agent.text.rows import document_rows
from permille_agent.training.answers import Sample
from permille_agent.training.decision import Decision
from permille_agent.training.evaluation import GeneralLoss, document_losses
from permille_agent.training.evidence import Comparison, compare_losses
from permille_agent.training.outcome import TextSource
from permille_agent.training.parts import Parts
from permille_agent.training.run import BegunRun, LearnedText, RunFolder, find_run

PROMPT_WORDS = 6
QUESTION_CHARACTERS = 200
PROMPTS = 2  # made from the test split


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedLosses:
    """Losses in nats per token, on the text that `text` describes.

    Attributes:
        text: description of the text.
        general: losses on general text at the end of the run, or None.
        parts: choice among state and memory, or None if the run made no memory.
        improvement: reduction of the loss from the base to the personal model.
    """

    text: str
    base: float | None
    personal: float | None
    bits_per_byte_base: float | None
    bits_per_byte_personal: float | None
    improvement: Comparison | None
    general: GeneralLoss | None = None
    parts: Parts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySide:
    """The comparison of the base with the personal model of a run. See `first_token_seconds`."""

    run: str
    package: str
    losses: ComparedLosses
    samples: tuple[Sample, ...]
    first_token_s: Mapping[Variant, float]


def compare(
    home: Home, model: LocalModel, *, data_paths: Sequence[Path], prompts: Sequence[str], sampling: Sampling
) -> SideBySide:
    """Compare the base and the personal model on the same text and the same prompts.

    Args:
        home: the home folder.
        model: the active model.
        data_paths: text to measure on. If empty, the run's own judgement on its test split is returned.
        prompts: texts to continue. If empty, `test_prompts` makes prompts from the test split.
        sampling: settings of text generation.

    Raises:
        InputError: no personal model is active, or the text cannot be used.
    """
    model.values(Variant.PERSONAL)  # raises if there is no personal model
    folder = find_run(home, model.active.run or "")
    losses = measured_losses(model, data_paths) if data_paths else judged_losses(folder)
    decision = folder.require("decision", Decision)
    losses = replace(losses, general=decision.general, parts=decision.parts)
    prompts = list(prompts) or test_prompts(folder, model) or ["The"]
    seconds = first_token_seconds(model, prompts[0])
    samples = tuple(continue_prompt(model, prompt, sampling) for prompt in prompts)
    return SideBySide(
        run=folder.name,
        package=model.active.package,
        losses=losses,
        samples=samples,
        first_token_s=seconds,
    )


def judged_losses(folder: RunFolder) -> ComparedLosses:
    """Return the losses that a run measured on its test split and on general text."""
    decision = folder.require("decision", Decision)
    by_parts = folder.load("learned", LearnedText) is not None
    return ComparedLosses(
        text="nothing, because the text is too short for a test"
        if not decision.number
        else "parts of the text, each measured before the run trained on it"
        if by_parts
        else "test split, not used in training",
        base=decision.loss_base,
        personal=decision.loss_personal,
        bits_per_byte_base=decision.bits_per_byte_base,
        bits_per_byte_personal=decision.bits_per_byte_personal,
        improvement=decision.against_base,
        general=decision.general,
        parts=decision.parts,
    )


def measured_losses(model: LocalModel, data_paths: Sequence[Path]) -> ComparedLosses:
    """Measure the losses of all variants of the active model on a text.

    Raises:
        InputError: the text cannot be used.
    """
    documents, report = read_documents(data_paths)
    # Use the default length of training rows, or what the model's context leaves beside the memory.
    row_tokens = min(128, model.room(Variant.PERSONAL))
    known, tokenized = tokenize(documents, model.tokenizer, report, row_tokens=row_tokens)
    if len(known) < 2:
        raise InputError(f"Comparing needs at least 2 documents, got {len(known)}. Name more with --data.")
    rows = document_rows(tokenized, row_tokens)
    found = {
        variant: document_losses(model.engine_of(variant), model.values(variant), rows, len(known))
        for variant in compared(model)
    }
    base, personal = found[Variant.BASE], found[Variant.PERSONAL]
    improvement = compare_losses((base.nats_D - personal.nats_D) / base.tokens_D, base.tokens_D)
    return ComparedLosses(
        text=f"{len(known)} documents, {int(base.tokens_D.sum())} tokens, which training may have used",
        base=base.per_token,
        personal=personal.per_token,
        bits_per_byte_base=base.bits_per_byte,
        bits_per_byte_personal=personal.bits_per_byte,
        improvement=improvement if math.isfinite(improvement.improvement) else None,
    )


def compared(model: LocalModel) -> list[Variant]:
    """Return the variants that are compared: all, but the personal model only with its memory."""
    return [variant for variant in model.variants if variant is not Variant.PERSONAL_WITHOUT_MEMORY]


def first_token_seconds(model: LocalModel, prompt: str) -> Mapping[Variant, float]:
    """Return the seconds up to the first token after a prompt, without and with the memory.

    Call this before the prompt is used, because a model reads only what is new. Without a memory, the result
    is empty.
    """
    one = Sampling(max_new_tokens=1)

    def seconds(variant: Variant) -> float:
        begun = time.perf_counter()
        model.write(prompt, variant, one)
        return round(time.perf_counter() - begun, 3)

    if model.memory is None:
        return {}
    seconds(Variant.BASE)  # reads the package from the disk
    return {each: seconds(each) for each in (Variant.PERSONAL_WITHOUT_MEMORY, Variant.PERSONAL)}


def first_token_words(seconds: Mapping[Variant, float]) -> str:
    """Describe the result of `first_token_seconds`, or return an empty string without one."""
    if not seconds:
        return ""
    without, with_memory = seconds[Variant.PERSONAL_WITHOUT_MEMORY], seconds[Variant.PERSONAL]
    return f"{with_memory:.2f} s with the memory, {without:.2f} s without"


def continue_prompt(model: LocalModel, prompt: str, sampling: Sampling) -> Sample:
    """Return each model's continuation of a prompt. If the prompt is a question, a chat model answers it."""
    written = {variant.value: model.write(prompt, variant, sampling) for variant in compared(model)}
    return Sample(prompt=prompt, **written)


def test_prompts(folder: RunFolder, model: LocalModel) -> list[str]:
    """Return prompts from the run's test split, if the user's files still exist.

    The prompt of a text is its first words. The prompt of a conversation is the user's first short question,
    if the model can chat.
    """
    options = folder.require("run", BegunRun).definition.options
    paths = [path_of(path) for path in (folder.load("data", TextSource) or TextSource()).paths]
    if not paths:
        return []
    documents, _ = survey(paths)
    try:
        test = prepare(documents, model.tokenizer, row_tokens=options.row_tokens).test_documents
    except InputError:
        return []  # the remaining text is too short to be divided
    return list(islice(filter(None, (_prompt(one.content, model) for one in test)), PROMPTS))


def _prompt(content: Content, model: LocalModel) -> str:
    """Return a prompt made from a document, or an empty string if the document gives none."""
    match content:
        case PlainText(text):
            return " ".join(text.split()[:PROMPT_WORDS])
        case Conversation(messages) if model.tokenizer.can_chat:
            asked = (said.strip() for role, said in messages if role == "user")
            short = (said for said in asked if said.endswith("?") and len(said) <= QUESTION_CHARACTERS)
            return next(short, "")
    return ""

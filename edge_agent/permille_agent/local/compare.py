"""Base and personal model side by side: losses on held-out text, and what each writes after a prompt."""

from collections.abc import Sequence
from pathlib import Path

from permille.errors import InputError
from permille_agent.local.model import LocalModel, Sampling, Variant
from permille_agent.state.home import Home
from permille_agent.text.documents import PlainText
from permille_agent.text.preparation import tokenize
from permille_agent.text.reading import DataReport, read_documents
from permille_agent.text.rows import document_rows
from permille_agent.text.splits import Split, assign
from permille_agent.training.evaluation import document_losses, paired_bootstrap
from permille_agent.training.run import Json, find_run
from permille_agent.training.step_size import search_seed

PROMPT_WORDS = 6
DEFAULT_SAMPLES = 2


def compare(
    home: Home,
    model: LocalModel,
    *,
    data_paths: Sequence[Path],
    prompts: Sequence[str],
    sampling: Sampling,
) -> Json:
    """Both models on the same text and the same prompts.

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
    if model.active.run is None:
        raise InputError("expected an active personalisation, there is none: run `permille-agent train`")
    losses = _measured(model, data_paths) if data_paths else _judged(home, model.active.run)
    prompts = list(prompts) or _test_prompts(home, model) or ["The"]
    return {
        "run": model.active.run,
        "package": model.active.package,
        "losses": losses,
        "samples": [_sample(model, prompt, sampling) for prompt in prompts],
    }


def _judged(home: Home, run_name: str) -> Json:
    decision = find_run(home, run_name).require("decision")
    return {
        "text": "test split of the run, untouched by training",
        "base": decision["loss_base"],
        "personal": decision["loss_personal"],
        "bits_per_byte_base": decision["bits_per_byte_base"],
        "bits_per_byte_personal": decision["bits_per_byte_personal"],
        "improvement": decision["against_base"],
    }


def _measured(model: LocalModel, data_paths: Sequence[Path]) -> Json:
    documents, report = read_documents(data_paths)
    row_tokens = min(128, int(model.package.config.get("max_position_embeddings") or 128))
    known, tokenized = tokenize(documents, model.tokenizer, report, row_tokens=row_tokens)
    if len(known) < 2:
        raise InputError(f"expected at least 2 documents to compare on, got {len(known)}")
    rows = document_rows(tokenized, row_tokens)
    base = document_losses(model.engine, model.values(Variant.BASE), rows, len(known))
    personal = document_losses(model.engine, model.values(Variant.PERSONAL), rows, len(known))
    improvement = paired_bootstrap(
        base.nats_D, personal.nats_D, base.tokens_D, seed=search_seed(0, "compare")
    )
    return {
        "text": f"{len(known)} documents, {int(base.tokens_D.sum())} tokens, maybe trained on",
        "base": base.per_token,
        "personal": personal.per_token,
        "bits_per_byte_base": base.bits_per_byte,
        "bits_per_byte_personal": personal.bits_per_byte,
        "improvement": {
            "improvement": improvement.improvement,
            "low": improvement.low,
            "high": improvement.high,
            "standard_error": improvement.standard_error,
        },
    }


def _sample(model: LocalModel, prompt: str, sampling: Sampling) -> Json:
    texts = {}
    for variant in (Variant.BASE, Variant.PERSONAL):
        _, pieces = model.complete(prompt, variant, sampling)
        texts[variant.value] = "".join(pieces)
    return {"prompt": prompt, **texts}


def _test_prompts(home: Home, model: LocalModel) -> list[str]:
    """First words of plain texts of the run's test split, where the user's files are still as they were."""
    if model.active.run is None:
        return []
    run = find_run(home, model.active.run)
    options = run.require("run")["definition"]["options"]
    paths = [Path(name) for name in run.require("data")["paths"]]
    if not paths or not all(path.exists() for path in paths):
        return []
    documents, _ = read_documents(paths)
    known, tokenized = tokenize(documents, model.tokenizer, DataReport(), row_tokens=options["row_tokens"])
    splits = assign([d.group for d in known], [t.targets for t in tokenized], options["seed"])
    test = [d.content for d, split in zip(known, splits, strict=True) if split is Split.TEST]
    texts = [content.text for content in test if isinstance(content, PlainText)]
    return [" ".join(text.split()[:PROMPT_WORDS]) for text in texts[:DEFAULT_SAMPLES]]

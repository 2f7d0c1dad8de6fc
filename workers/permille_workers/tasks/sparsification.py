"""The sparsification job: a copy of a model with weights set to zero, registered as a model.

The copy is made in the job's work folder, a decoder layer at a time. Whole, it is put below the model root,
in a folder named by its digest: the same request makes the same files, and they are kept once. The model's
row and the result's are written in the transaction that ends the job.
"""

import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from sqlalchemy.orm import Session

from permille.corpora.sequences import POOL
from permille.digests import JSON
from permille.files import fsync_folder
from permille.models.checkpoint import Checkpoint
from permille.models.families import layer_of
from permille.package.manifest import decimal_text
from permille.pruning.streaming import LinearReport, PruningReport, PruningText, prune_model
from permille.schemas.inputs import SparsifiedModel
from permille.schemas.sparsifications import SparsificationCreate
from permille.sensitivity.plots import error_picture
from permille.store import artifacts, inputs
from permille.store.artifacts import Made
from permille_workers.runtime.context import Publish, TaskContext
from permille_workers.tasks.layers import evidence
from permille_workers.tasks.quantization import evaluation_sequences
from permille_workers.tasks.sources import (
    Sampling,
    SourceModel,
    model_facts,
    open_corpus,
    open_model,
    sparsified_path,
    versions,
)

_READ, _PRUNED = 0.03, 0.95  # of the time


def run(context: TaskContext, request: SparsificationCreate) -> Publish:
    """Make a model sparse.

    Raises:
        InputError: a model that is as sparse already, a pattern that does not divide its rows, too little
            text, a name that was taken meanwhile.
        RetryableError: a hub or data set that cannot be reached.
    """
    context.progress(0.0, "opening the model")
    model = open_model(context, request.model_id)
    tenant_id = context.claim.tenant_id
    provenance, content, errors = _pruned(context, model, request)
    made = Checkpoint(context.work_folder / "model")
    digest = made.digest()
    with context.db.read() as session:
        root = inputs.roots_of(session, context.settings, tenant_id=tenant_id).models
    _install(made.folder, root / sparsified_path(digest), mark=context.claim.job_id)
    blobs = evidence(context.blobs, content, error_picture(errors))

    def publish(session: Session) -> str:
        result = Made(model_id=model.id, digest=digest, provenance=provenance, blobs=blobs)
        row = artifacts.add(session, job=context.claim, made=result)
        added = inputs.add_model(
            session,
            tenant_id=tenant_id,
            name=request.name,
            source=SparsifiedModel(kind="sparsified", sparsification_id=row.id),
            facts=model_facts(made, digest),
        )
        row.made_model_id, row.size_bytes = added.id, made.size_bytes
        return artifacts.key_of(row)

    return publish


def _pruned(
    context: TaskContext, model: SourceModel, request: SparsificationCreate
) -> tuple[dict[str, JSON], dict[str, object], dict[str, float]]:
    """Prune into the work folder; provenance, the report, and errors for its picture."""
    from permille.models.loading import FileTokenizer
    from permille_workers.tasks.compute import torch_device

    corpus = open_corpus(context, request.corpus_id)
    context.progress(0.01, "reading the corpus")
    tokenizer = FileTokenizer(model.checkpoint.folder)
    length = min(
        request.length, int(model.checkpoint.config.get("max_position_embeddings") or request.length)
    )
    sampling = Sampling(number=request.sequences, length=length, seed=request.seed)
    calibration = corpus.sequences(tokenizer, sampling)
    evaluation, held_out = None, None
    if request.evaluation_sequences:
        wanted = Sampling(
            number=request.evaluation_sequences,
            length=length,
            seed=request.seed,
            skip=POOL * request.sequences,
        )
        evaluation, held_out = evaluation_sequences(tokenizer, corpus, wanted)
    text = PruningText(
        calibration_NT=calibration.tokens_NT,
        evaluation_ET=None if evaluation is None else evaluation.tokens_NT,
    )

    def progress(done: int, total: int) -> None:
        fraction = _READ + (_PRUNED - _READ) * done / total
        context.progress(fraction, f"prune {min(done + 1, total)}/{total}")

    plan = replace(request.plan(), device=str(torch_device(context.settings.device)))
    report = prune_model(
        model.checkpoint,
        context.work_folder / "model",
        text,
        plan,
        resume=context.work_folder / "pruning",
        progress=progress,
    )
    provenance: dict[str, JSON] = {
        "model": model.provenance,
        "corpus": corpus.provenance,
        "method": plan.method.value,
        "rate": decimal_text(plan.rate(0)),
        "pattern": request.pattern,
        "sequences": request.sequences,
        "length": length,
        "seed": request.seed,
        "versions": versions("torch", "transformers", "tokenizers"),
    }
    tensors = [_row(row.name, [row]) for row in report.linears]
    content: dict[str, object] = {
        "method": plan.method.value,
        "pattern": request.pattern,
        "zeros": report.rate,
        "perplexity": _perplexity(report, text, held_out=held_out),
        "corpus": {"calibration": calibration.read, "evaluation": evaluation and evaluation.read},
        "layers": [
            _row(f"layer {layer}", list(rows))
            for layer, rows in groupby(report.linears, key=lambda row: layer_of(row.name))
        ],
        "tensors": tensors,
        "provenance": provenance,
    }
    errors = {row.name: math.sqrt(row.error / row.norm) if row.norm else 0.0 for row in report.linears}
    return provenance, content, errors


def _row(name: str, rows: Sequence[LinearReport]) -> dict[str, object]:
    """The share of zeros, and the error `|(W - W') X| / |W X|`, of linears together."""
    error, norm = math.fsum(row.error for row in rows), math.fsum(row.norm for row in rows)
    return {
        "name": name,
        "zeros": sum(row.zeros for row in rows) / sum(row.weights for row in rows),
        "relative_error": math.sqrt(error / norm) if norm else 0.0,
    }


def _perplexity(
    report: PruningReport, text: PruningText, *, held_out: bool | None
) -> dict[str, object] | None:
    if report.loss_before is None or report.loss_after is None or text.evaluation_ET is None:
        return None
    rows, length = text.evaluation_ET.shape
    return {
        "tokens": rows * (length - 1),
        "before": math.exp(report.loss_before),
        "after": math.exp(report.loss_after),
        "loss_before": report.loss_before,
        "loss_after": report.loss_after,
        "held_out": held_out,
    }


def _install(made: Path, final: Path, *, mark: str) -> None:
    """Put a folder in its place at once; the same one may be there. `mark` tells apart those on their way."""
    final.parent.mkdir(parents=True, exist_ok=True)
    incoming = final.parent / f".{mark}"
    shutil.rmtree(incoming, ignore_errors=True)
    if final.exists():
        return
    shutil.copytree(made, incoming, copy_function=_link)
    fsync_folder(incoming)
    try:
        incoming.replace(final)
    except OSError:
        shutil.rmtree(incoming)
        if not final.is_dir():  # else another job was faster
            raise
    fsync_folder(final.parent)


def _link(source: str, target: str) -> None:
    """The same file under another name, or a durable copy where that is another file system."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        with Path(target).open("rb") as file:
            os.fsync(file.fileno())

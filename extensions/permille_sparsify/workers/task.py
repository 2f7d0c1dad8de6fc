"""The sparsification job: copy a model, set some weights of the copy to zero, and register it as a model.

The job makes the copy in its work folder, one decoder layer at a time. It then links the complete copy below
the model root, in a folder that is named after the copy's digest. Equal requests make equal files, which are
stored once. The rows of the model and of the result are written in the transaction that ends the job.
"""

import math
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sqlalchemy.orm import Session

from permille.corpora.sequences import POOL
from permille.digests import JSON
from permille.files import fsync_folder
from permille.models.checkpoint import Checkpoint
from permille.models.families import layer_of
from permille.models.settings import within_positions
from permille.package.manifest import decimal_text
from permille.pipeline.draw import Sampling
from permille.pipeline.inputs import SourceModel, versions
from permille.schemas.inputs import SparsifiedModel
from permille.store import artifacts, inputs
from permille.store.artifacts import TaskResult
from permille.store.retention.collection import hold
from permille_sparsify.schemas import Recovery, SparsificationCreate
from permille_sparsify.streaming import LinearReport, PruningReport, PruningText, prune_model
from permille_workers.runtime.context import Publish, TaskContext
from permille_workers.tasks.artifacts import report_blob
from permille_workers.tasks.sources import model_facts, open_corpus, open_model, reach_corpus

_READ, _BEFORE_STEPS, _PRUNED = 0.03, 0.3, 0.95  # the job's progress at the end of each phase


def run(context: TaskContext, request: SparsificationCreate) -> Publish:
    """Make a model sparse.

    Raises:
        InputError: the model is already as sparse as requested, the length of its rows is not a multiple of
            the pattern's group (4 in 2:4), the text is too short, or another model has taken the name in the
            meantime.
        RetryableError: the hub or the data set cannot be reached.
    """
    context.progress(0.0, "reaching the corpus")
    reach_corpus(context, request.corpus_id)  # opening a model may take minutes
    context.progress(0.0, "opening the model")
    model = open_model(context, request.model_id, converted=True)
    tenant_id = context.claim.tenant_id
    found = _made(context, model, request)
    made, provenance = Checkpoint(found.folder), found.provenance
    digest = made.digest()
    with context.db.read() as session:
        root = inputs.roots_of(session, context.settings, tenant_id=tenant_id).models
    final = root / inputs.sparsified_path(digest)
    _install(made.folder, final, mark=context.claim.job_id)
    blob = report_blob(context.blobs, found.content)

    def publish(session: Session) -> str:
        hold(session, context.blobs, [blob.digest], final)
        result = TaskResult(model_id=request.model_id, digest=digest, provenance=provenance, blobs=(blob,))
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sparse:
    """A sparse model, its provenance, and the content of its report."""

    folder: Path
    provenance: dict[str, JSON]
    content: dict[str, object]


def _made(context: TaskContext, model: SourceModel, request: SparsificationCreate) -> _Sparse:
    """Draw sequences from the corpus, make the sparse model in the work folder, and report its errors."""
    from permille.models.loading import FileTokenizer

    corpus = open_corpus(context, request.corpus_id)
    context.progress(0.01, "reading the corpus")
    tokenizer = FileTokenizer(model.checkpoint.folder)
    length = within_positions(model.checkpoint.config, request.length)

    def sampling(number: int, skip: int) -> Sampling:
        # To choose n sequences, a draw reads up to POOL * n sequences of the corpus. `skip` is the number of
        # sequences that earlier draws chose. Skip all that they may have read, so that no two draws overlap.
        return Sampling(number=number, length=length, seed=request.seed, skip=POOL * skip)

    calibration = corpus.draw(tokenizer, sampling(request.sequences, 0))
    trained = None
    if request.recovery is not None:
        trained = corpus.draw(tokenizer, sampling(request.recovery.sequences, request.sequences))
    evaluation, held_out = None, None
    if request.evaluation_sequences:
        before = request.sequences + (0 if request.recovery is None else request.recovery.sequences)
        wanted = sampling(request.evaluation_sequences, before)
        evaluation, held_out = corpus.draw_held_out(tokenizer, wanted)
    text = PruningText(
        calibration_NT=calibration.tokens_NT,
        evaluation_ET=None if evaluation is None else evaluation.tokens_NT,
    )
    folder, report, loss_after = _pruned(
        context, model, request, text, None if trained is None else trained.tokens_NT
    )
    plan = request.plan()
    provenance: dict[str, JSON] = {
        "model": model.provenance,
        "corpus": corpus.provenance,
        "method": plan.method.value,
        "rate": decimal_text(plan.rate(0)),
        "pattern": request.pattern,
        "sequences": request.sequences,
        "length": length,
        "seed": request.seed,
        "recovery": None if request.recovery is None else _recovery_fields(request.recovery),
        "versions": versions("torch", "transformers", "tokenizers"),
    }
    content: dict[str, object] = {
        "method": plan.method.value,
        "pattern": request.pattern,
        "zeros": report.rate,
        "perplexity": _perplexity(report, text, loss_after, held_out=held_out),
        "corpus": {
            "calibration": calibration.read,
            "recovery": trained and trained.read,
            "evaluation": evaluation and evaluation.read,
        },
        "layers": [
            _row(f"layer {layer}", list(rows))
            for layer, rows in groupby(report.linears, key=lambda row: layer_of(row.name))
        ],
        "tensors": [_row(row.name, [row]) for row in report.linears],
        "provenance": provenance,
    }
    return _Sparse(folder=folder, provenance=provenance, content=content)


def _pruned(
    context: TaskContext,
    model: SourceModel,
    request: SparsificationCreate,
    text: PruningText,
    trained_MT: NDArray[np.int64] | None,
) -> tuple[Path, PruningReport, float | None]:
    """Prune the model, and fine-tune it if requested.

    Return its folder, the report of the pruning, and the final loss (None: not measured).
    """
    from permille.models.loading import load_model
    from permille.quantization.perplexity import perplexity
    from permille_sparsify.recovery import recover_model

    device, end = str(context.compute.torch_device), _PRUNED if trained_MT is None else _BEFORE_STEPS

    def progress(begin: float, end: float, what: str) -> Callable[[int, int], None]:
        return lambda done, total: context.progress(
            begin + (end - begin) * done / total, f"{what} {min(done + 1, total)}/{total}"
        )

    folder = context.work_folder / "model"
    report = prune_model(
        model.checkpoint,
        folder,
        text,
        replace(request.plan(), device=device),
        resume=context.work_folder / "pruning",
        progress=progress(_READ, end, "prune"),
    )
    if request.recovery is None or trained_MT is None:
        return folder, report, report.loss_after
    recovered = context.work_folder / "recovered"
    recover_model(
        Checkpoint(folder),
        recovered,
        trained_MT,
        request.recovery.plan(request.seed),
        device=device,
        checkpoint=context.work_folder / "steps.npz",
        progress=progress(end, _PRUNED, "step"),
    )
    if text.evaluation_ET is None:
        return recovered, report, None
    return recovered, report, perplexity(load_model(recovered).to(device), text.evaluation_ET)["loss"]


def _recovery_fields(recovery: Recovery) -> dict[str, JSON]:
    """Return a recovery in the form of the provenance.

    Floats become texts, because provenance has no floats.
    """
    told = recovery.model_dump(mode="json")
    return {name: decimal_text(value) if isinstance(value, float) else value for name, value in told.items()}


def _row(name: str, rows: Sequence[LinearReport]) -> dict[str, object]:
    """Return a row of the report for one or several linear layers: their share of zeros and relative error.

    The relative error is `|(W - W') X| / |W X|`, where W' are the pruned weights and X the layers' inputs.
    """
    error, norm = math.fsum(row.error for row in rows), math.fsum(row.norm for row in rows)
    return {
        "name": name,
        "zeros": sum(row.zeros for row in rows) / sum(row.weights for row in rows),
        "relative_error": math.sqrt(error / norm) if norm else 0.0,
    }


def _perplexity(
    report: PruningReport, text: PruningText, loss_after: float | None, *, held_out: bool | None
) -> dict[str, object] | None:
    if None in (report.loss_before, report.loss_after, loss_after) or text.evaluation_ET is None:
        return None
    rows, length = text.evaluation_ET.shape
    losses = {"before": report.loss_before, "pruned": report.loss_after, "after": loss_after}
    return {
        "tokens": rows * (length - 1),
        **{name: loss and math.exp(loss) for name, loss in losses.items()},
        **{f"loss_{name}": loss for name, loss in losses.items()},
        "held_out": held_out,
    }


def _install(made: Path, final: Path, *, mark: str) -> None:
    """Copy a folder to its final place atomically, unless it exists already.

    Args:
        mark: a part of the temporary folder's name that is unique to the job.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    incoming = final.parent / f".{mark}"
    shutil.rmtree(incoming, ignore_errors=True)
    # The folder must look new, so that no collection removes it before a row names it.
    with suppress(FileNotFoundError):
        os.utime(final)
        return
    shutil.copytree(made, incoming, copy_function=_link)
    os.utime(incoming)  # `copytree` has copied the time of `made`, which an earlier attempt may have written
    fsync_folder(incoming)
    try:
        incoming.replace(final)
    except OSError:
        shutil.rmtree(incoming)
        if not final.is_dir():  # otherwise another job has installed the same folder meanwhile
            raise
    fsync_folder(final.parent)


def _link(source: str, target: str) -> None:
    """Make a hard link to a file, or a durable copy if the target is on another file system."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        with Path(target).open("rb") as file:
            os.fsync(file.fileno())

"""The evaluation job: a sweep over models, bases, tasks, methods and seeds, cell by cell.

Its results file is in the job's work folder: an attempt goes on after the last cell, or trial of a search,
that an earlier one finished, also when the job was cancelled and is queued again. Once all are done the file
becomes a blob, as it stands.
"""

import importlib.util
from collections.abc import Sequence
from math import prod
from pathlib import Path

from sqlalchemy.orm import Session

from permille.corpora.sources import FileCorpus
from permille.digests import JSON, digest_of_file
from permille.errors import InputError, OperatorError
from permille.models.sources import resolve_inside
from permille.store import evaluations, models
from permille.store.evaluations import Findings
from permille_lab.evaluate.specification import Sweep, sweep_of
from permille_workers.context import Publish, Result, TaskContext
from permille_workers.payloads import EvaluationPayload, parse_payload
from permille_workers.tasks.sources import SourceCorpus, SourceModel, open_corpus, open_model, versions

_MEASURED = 0.99  # of the time


def run(context: TaskContext) -> Publish:
    """Compare what the payload names.

    Raises:
        InputError: no such model or corpus, a corpus that is no file, a task file outside of the corpus root
            or with too many bad rows, options that the sweep refuses, a model that cannot be trained.
        RetryableError: a hub that cannot be reached.
        OperatorError: this worker was installed without what evaluations need.
    """
    if importlib.util.find_spec("scipy") is None:
        raise OperatorError(
            'expected scipy, which is not installed: pip install "permille[workers,evaluate]"'
        )
    payload = parse_payload(EvaluationPayload, context.claim.payload)
    begun = _begun(context, payload)
    context.progress(begun, "opening the models")
    opened = [open_model(context, model_id) for model_id in payload.model_ids]
    corpus = open_corpus(context, payload.corpus_id)
    sweep = _sweep(context, payload, opened, corpus)
    context.progress(begun, "reading the tasks")
    findings = _findings(context, sweep, begun)
    provenance = _provenance(opened, corpus, sweep)

    def publish(session: Session) -> Result:
        row = evaluations.add(
            session,
            tenant_id=context.claim.tenant_id,
            job_id=context.claim.job_id,
            model_ids=payload.model_ids,
            corpus_id=payload.corpus_id,
            options=payload.options(),
            provenance=provenance,
            findings=findings,
        )
        return Result(kind="evaluation", id=row.id)

    return publish


def _findings(context: TaskContext, sweep: Sweep, begun: float) -> Findings:
    """Run what the results lack, then keep them and their tables; cells whose input is wrong take nothing
    from the others.

    Raises:
        InputError: as `run_sweep`; no cell at all could be measured.
    """
    from permille_lab.evaluate.report import markdown
    from permille_lab.evaluate.sweep import CellsFailedError, run_sweep
    from permille_lab.evaluate.sweep_digest import sweep_digest
    from permille_lab.evaluate.sweep_results import bad_rows

    # By what is compared: where a task file or our version has changed since, all cells are run anew.
    file = context.work_folder / f"results-{sweep_digest(sweep)[-16:]}.jsonl"

    def progress(done: int, total: int, following: str) -> None:
        message = f"cell {done + 1}/{total} {following}" if following else "reporting"
        context.progress(max(begun, _MEASURED * done / total), message)

    failed: dict[str, list[str]] = {}
    try:
        records = run_sweep(sweep, file, progress)
    except CellsFailedError as exc:
        if not exc.records:
            raise
        records, failed = exc.records, exc.reasons
    left_out = bad_rows(file)
    return Findings(
        cells=len(records),
        bad_rows=len(left_out),
        failed_cells=sum(map(len, failed.values())),
        results_digest=context.blobs.put_file(file),
        report_digest=context.blobs.put_bytes(markdown(records, left_out, failed).encode()),
        size_bytes=file.stat().st_size,
    )


def _begun(context: TaskContext, payload: EvaluationPayload) -> float:
    """The share that earlier attempts have measured: the pace of this one tells the time that is left."""
    whole = [file.read_bytes().rpartition(b"\n")[0] for file in _files(context)]
    done = sum(lines.count(b'\n{"kind":"cell",') for lines in whole)
    parts = (payload.model_ids, payload.bases, payload.tasks, payload.methods, payload.seeds)
    cells = prod(len(part) for part in parts if part)
    return min(_MEASURED, _MEASURED * done / cells)


def _files(context: TaskContext) -> list[Path]:
    """The newest results, if any."""
    found = context.work_folder.glob("results-*.jsonl")
    return sorted(found, key=lambda file: file.stat().st_mtime)[-1:]


def _sweep(
    context: TaskContext, payload: EvaluationPayload, opened: Sequence[SourceModel], corpus: SourceCorpus
) -> Sweep:
    """The sweep of the payload, its paths inside of the roots.

    Raises:
        InputError: see `run`.
    """
    root = context.settings.corpus_root
    if not isinstance(corpus.ref, FileCorpus):
        raise InputError(f"expected a corpus that is a file, got {payload.corpus_id}, which is streamed")
    return sweep_of(
        {
            **payload.options(),
            "models": [str(path) for path in _named(context, opened)],
            "corpus": str(resolve_inside(root, corpus.ref.path, what="file")),
            "tasks": {
                task: {
                    part: str(resolve_inside(root, path, what="file"))
                    for part, path in files.model_dump(exclude_none=True).items()
                }
                for task, files in payload.tasks.items()
            },
        },
        context.work_folder,
    )


def _named(context: TaskContext, opened: Sequence[SourceModel]) -> list[Path]:
    """Links by the models' registered names, which then stand in results and tables; by their ids where two
    have the same name."""
    with context.db.read() as session:
        names = [models.get(session, tenant_id=context.claim.tenant_id, model_id=m.id).name for m in opened]
    folder = context.work_folder / "models"
    folder.mkdir(exist_ok=True)
    links = []
    for model, name in zip(opened, names, strict=True):
        link = folder / (name if names.count(name) == 1 else model.id)
        link.unlink(missing_ok=True)
        link.symlink_to(model.checkpoint.folder, target_is_directory=True)
        links.append(link)
    return links


def _provenance(opened: Sequence[SourceModel], corpus: SourceCorpus, sweep: Sweep) -> dict[str, JSON]:
    """Where it comes from: no clock, no row ids."""
    files = {
        f"{task.value}.{part}": digest_of_file(path)
        for task, files in sweep.tasks.items()
        for part, path in (("train", files.train), ("test", files.test))
        if path is not None
    }
    return {
        "models": [model.provenance for model in opened],
        "corpus": corpus.provenance,
        "tasks": dict(files),
        "versions": versions("torch", "transformers", "tokenizers"),
    }

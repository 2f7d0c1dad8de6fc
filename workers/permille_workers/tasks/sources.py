"""Inputs of jobs: the folder of a registered model, and the texts of a registered corpus.

The first job that reads a model stores the digest of its files. If the files have changed since, a later job
refuses them. So the mask, the quantization and the values of a package come from the same weights.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, cast

from pydantic import Field, TypeAdapter

from permille.corpora.sources import ReadReport, file_texts
from permille.corpora.streams import streamed_texts
from permille.digests import JSON, digest_of_file
from permille.errors import InputError
from permille.models.checkpoint import Checkpoint
from permille.models.conversion import modern_folder
from permille.models.families import scoped_tensors
from permille.models.sources import download_model, resolve_inside
from permille.pipeline.basis import MOST_ROWS, draw_basis_text
from permille.pipeline.draw import Corpus, Drawn, evaluation_text
from permille.pipeline.inputs import SourceModel
from permille.pipeline.pack import reference_sampling
from permille.schemas.inputs import (
    CorpusSource,
    FileCorpus,
    FolderModel,
    GgufModel,
    HubModel,
    SparsifiedModel,
    StreamedCorpus,
)
from permille.schemas.jobs import JobKind
from permille.schemas.kinds import parse_request
from permille.schemas.packages import BuildCreate, public_text
from permille.store import inputs, rows, tables
from permille.store.inputs import ModelFacts
from permille.store.tables import Model
from permille.training.basis import LEAST_ROWS
from permille.training.reference import TEXT_ROWS
from permille_workers.runtime.context import TaskContext

AnyModel = FolderModel | HubModel | GgufModel | SparsifiedModel
_MODEL_SOURCE: TypeAdapter[AnyModel] = TypeAdapter(Annotated[AnyModel, Field(discriminator="kind")])
_CORPUS_SOURCE: TypeAdapter[FileCorpus | StreamedCorpus] = TypeAdapter(CorpusSource)


def open_model(context: TaskContext, model_id: str, *, converted: bool = False) -> SourceModel:
    """Find or download the model, and check it. The first job of a model also stores facts about it.

    Args:
        converted: whether the job needs a GGUF file as a folder. Other jobs read the file in place.

    Raises:
        InputError: the folder is unusable, or its files have changed since the first job.
        NotFoundError: there is no such model.
        RetryableError: the hub cannot be reached.
    """
    tenant_id = context.claim.tenant_id
    with context.db.read() as session:
        row = rows.get(session, Model, tenant_id=tenant_id, row_id=model_id)
        root = inputs.roots_of(session, context.settings, tenant_id=tenant_id).models
    source = _MODEL_SOURCE.validate_python(row.source)
    gguf = resolve_inside(root, source.path, what="file") if isinstance(source, GgufModel) else None
    checkpoint, provenance = _open(context, source, root, None if converted else gguf)
    digest = checkpoint.digest()
    if row.digest is not None and row.digest != digest:
        raise InputError(
            f"The files of {model_id} have changed: their digest was {row.digest} and is now {digest}. "
            "Restore the files, or register the folder as another model."
        )
    if row.digest is None:
        facts = model_facts(checkpoint, digest, size_bytes=gguf.stat().st_size if gguf else None)
        with context.db.write() as session:
            inputs.record_facts(session, tenant_id=tenant_id, model_id=model_id, facts=facts)
    return SourceModel(checkpoint=checkpoint, provenance={**provenance, "digest": digest}, gguf=gguf)


def open_corpus(context: TaskContext, corpus_id: str) -> Corpus:
    """Open a corpus.

    Raises:
        NotFoundError: there is no such corpus.
        InputError: its file is missing.
    """
    tenant_id = context.claim.tenant_id
    with context.db.read() as session:
        row = rows.get(session, tables.Corpus, tenant_id=tenant_id, row_id=corpus_id)
        root = inputs.roots_of(session, context.settings, tenant_id=tenant_id).corpora
    source = _CORPUS_SOURCE.validate_python(row.source)
    if isinstance(source, FileCorpus):

        def path() -> Path:
            return resolve_inside(root, source.path, what="file", of="corpus")

        digest = digest_of_file(path())
        return Corpus(
            # Resolve the path again before each read. It may have become a link out of the root.
            texts=lambda report: file_texts(path(), report),
            provenance={"kind": "file", "location": source.path, "digest": digest},
        )
    return Corpus(
        texts=partial(streamed_texts, source.dataset, source.split),
        provenance={"kind": "streamed", "location": source.dataset.value, "split": source.split},
    )


def reach_corpus(context: TaskContext, corpus_id: str) -> None:
    """Read the first text of a streamed corpus, so that a job without a network fails before long work.

    Raises:
        NotFoundError: there is no such corpus.
        RetryableError: the data set cannot be reached.
    """
    with context.db.read() as session:
        row = rows.get(session, tables.Corpus, tenant_id=context.claim.tenant_id, row_id=corpus_id)
    source = _CORPUS_SOURCE.validate_python(row.source)
    if isinstance(source, StreamedCorpus):
        next(streamed_texts(source.dataset, source.split, ReadReport()), None)


def check_text_of_build(context: TaskContext, model: SourceModel) -> None:
    """If the job is a step of a build, check that the build has enough text for its other steps.

    These are the evaluation, the reference and the basis. Otherwise only a later step would fail, after long
    work.

    Raises:
        InputError: there is too little text.
        RetryableError: the data set cannot be reached.
    """
    if context.claim.parent_id is None:
        return
    with context.db.read() as session:
        parent = rows.get(
            session, tables.Job, tenant_id=context.claim.tenant_id, row_id=context.claim.parent_id
        )
    build: BuildCreate = parse_request(JobKind.BUILD, parent.payload)
    public, measured = public_text(build.mask, build.evaluation_corpus_id), build.evaluation_corpus_id
    used = dict.fromkeys(one for one in (public, measured) if one is not None)
    if used:
        context.progress(0.0, "reading text for later steps")
    corpora = {corpus_id: open_corpus(context, corpus_id) for corpus_id in used}
    # Each step takes fewer rows if there is less text, down to the number that is checked here.
    if measured is not None:
        evaluation_text(model.checkpoint, corpora[measured], 1, 0)
    if public is not None:
        draw_for_reference(corpora[public], model.checkpoint, most=1)
    if public is not None and build.basis:
        draw_for_basis(corpora[public], model.checkpoint, most=LEAST_ROWS)


def draw_for_reference(corpus: Corpus, checkpoint: Checkpoint, *, most: int = TEXT_ROWS) -> Drawn:
    """Draw at most this many rows of a corpus for a reference.

    Raises:
        InputError: the corpus is shorter than a row, or is damaged.
        RetryableError: the data set cannot be reached.
    """
    from permille.models.loading import FileTokenizer

    wanted = replace(reference_sampling(checkpoint.config), number=most)
    return corpus.draw_held_out(FileTokenizer(checkpoint.folder), wanted)[0]


def draw_for_basis(corpus: Corpus, checkpoint: Checkpoint, *, most: int = MOST_ROWS) -> Drawn:
    """Draw rows of a corpus for a basis. Raises the errors of `draw_basis_text`."""
    from permille.models.loading import FileTokenizer

    return draw_basis_text(corpus, FileTokenizer(checkpoint.folder), checkpoint.config, most=most)


def _open(
    context: TaskContext, source: AnyModel, root: Path, gguf: Path | None
) -> tuple[Checkpoint, dict[str, JSON]]:
    """Return a model and its entry in the provenance. A file `gguf` is read in place."""
    entry: dict[str, JSON]
    match source:
        case SparsifiedModel():
            made = context.artifact(JobKind.SPARSIFICATION, source.sparsification_id)
            folder = resolve_inside(root, inputs.sparsified_path(made.digest), what="folder")
            entry = {"kind": "sparsified", "made_of": cast("dict[str, JSON]", made.provenance)}
            return Checkpoint(folder), entry
        case FolderModel():
            folder = resolve_inside(root, source.path, what="folder")
            return Checkpoint(modern_folder(folder, root)), {"kind": "folder", "location": source.path}
        case GgufModel():
            from permille.models.gguf.checkpoint import GgufCheckpoint
            from permille.models.gguf.folder import model_folder

            if gguf is None:
                folder = model_folder(resolve_inside(root, source.path, what="file"), root)
                checkpoint = Checkpoint(folder)
            else:
                checkpoint = GgufCheckpoint(gguf, context.work_folder / "gguf")
            return checkpoint, {"kind": "gguf", "location": source.path}
        case HubModel():
            folder = download_model(source.repository, source.commit, root)
            entry = {"kind": "hub", "location": source.repository, "commit": source.commit}
            return Checkpoint(modern_folder(folder, root)), entry


def model_facts(checkpoint: Checkpoint, digest: str, *, size_bytes: int | None = None) -> ModelFacts:
    """Return the facts about a model that the database stores.

    Args:
        checkpoint: the model.
        digest: digest of its weights.
        size_bytes: size of the file that the checkpoint was decoded from. None if it is the model itself.
    """
    return ModelFacts(
        family=checkpoint.family.value,
        config=dict(checkpoint.config),
        size_bytes=checkpoint.size_bytes if size_bytes is None else size_bytes,
        parameter_count=checkpoint.parameters,
        scoped_parameter_count=sum(
            rows * columns for _, (rows, columns) in scoped_tensors(checkpoint.config)
        ),
        digest=digest,
    )

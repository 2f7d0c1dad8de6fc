"""The package job: combine a quantization of a model with a mask or an adapter.

The package holds the codes, the values of the selected weights, the model's files, and a reference. The
reference has rows of public text and answers of the base model. With its rows, a device keeps a trained model
close to the base model, and measures what the training costs on general text. Before the package is recorded
in the database, it is read and verified in the same way as on a device.
"""

from typing import cast

import numpy as np

from permille.digests import JSON
from permille.errors import InputError
from permille.models.settings import within_positions
from permille.package.build import ChosenAdapter, ChosenMask, write_layers, write_manifest
from permille.package.limits import Role
from permille.package.manifest import Manifest
from permille.package.reader import Package, verify_package
from permille.schemas.jobs import JobKind
from permille.schemas.kinds import parse_request
from permille.schemas.masks import FisherMaskCreate, WeightMaskCreate
from permille.schemas.packages import PackageCreate
from permille.schemas.quantizations import QuantizationCreate
from permille.store.tables import Artifact
from permille.training.reference import REFERENCE_SEED, TEXT_ROWS, TEXT_TOKENS, make_reference
from permille_workers.runtime.context import Publish, TaskContext
from permille_workers.tasks.layers import layer_of, publishes_package, quantization_of, read_mask
from permille_workers.tasks.sources import (
    Sampling,
    SourceModel,
    evaluation_sequences,
    open_corpus,
    open_model,
    versions,
)


def run(context: TaskContext, request: PackageCreate) -> Publish:
    """Make a package, and verify it as a device does.

    Raises:
        InputError: the parts come from different models or weights.
        PackageError: a stored part is damaged, or one of the model's files is not allowed in a package.
    """
    quantization = context.artifact(JobKind.QUANTIZATION, request.quantization_id)
    mask_row = None if request.mask_id is None else context.artifact(JobKind.MASK, request.mask_id)
    parts = [quantization] if mask_row is None else [mask_row, quantization]
    context.progress(0.0, "opening the model")
    model = open_model(context, quantization.model_id)
    for part in parts:
        if part.provenance["model"] != model.provenance:
            raise InputError(
                f"The parts belong to different models: {part.id} was made from {part.provenance['model']}, "
                f"not from {model.provenance}."
            )
    chosen = _adapter(request) if mask_row is None else _mask(context, mask_row)
    context.progress(0.2, "writing the layers")
    coded: QuantizationCreate = parse_request(JobKind.QUANTIZATION, quantization.request)
    manifest = write_layers(
        context.blobs,
        model.checkpoint,
        chosen,
        (layer_of(quantization, Role.DENSE), layer_of(quantization, Role.PLAIN)),
        quantization_of(coded.options),
        provenance=cast(
            "dict[str, JSON]",
            {
                **({} if mask_row is None else {"mask": mask_row.provenance}),
                **({} if request.adapter is None else {"adapter": request.adapter.model_dump(mode="json")}),
                "quantization": quantization.provenance,
            },
        ),
    )
    context.progress(0.4, "asking the model for the reference")
    manifest = _with_reference(context, model, manifest, _corpus_of(mask_row, coded))
    write_manifest(context.blobs, manifest)
    context.progress(0.8, "verifying")
    verify_package(context.blobs, manifest.digest)
    return publishes_package(context, quantization.model_id, manifest)


def _corpus_of(mask_row: Artifact | None, coded: QuantizationCreate) -> str | None:
    """Return the id of the mask's corpus, or else of the corpus on which the quantization was measured."""
    if mask_row is not None:
        asked: FisherMaskCreate | WeightMaskCreate = parse_request(JobKind.MASK, mask_row.request)
        if isinstance(asked, FisherMaskCreate):
            return asked.corpus_id
    return coded.evaluation_corpus_id


def _with_reference(
    context: TaskContext, model: SourceModel, manifest: Manifest, corpus_id: str | None
) -> Manifest:
    """Add a reference with rows of the corpus and chat answers. If there can be neither, add no reference."""
    from permille.models.loading import FileChat, FileTokenizer

    folder, made = model.checkpoint.folder, dict[str, JSON](versions("tokenizers"))
    chat = FileChat.find(folder)
    text_NT = np.empty((0, TEXT_TOKENS), np.int64)
    if corpus_id is not None:
        corpus = open_corpus(context, corpus_id)
        length = within_positions(model.checkpoint.config, TEXT_TOKENS)
        wanted = Sampling(number=TEXT_ROWS, length=length, seed=REFERENCE_SEED)
        sequences, _ = evaluation_sequences(FileTokenizer(folder), corpus, wanted)
        text_NT, made = sequences.tokens_NT, {**made, "corpus": corpus.provenance}
    if chat is None and len(text_NT) < 2:
        return manifest
    package = Package(context.blobs, manifest)
    return make_reference(package, text_NT=text_NT, chat=chat, made=made, threads=context.settings.threads)


def _mask(context: TaskContext, mask_row: Artifact) -> ChosenMask:
    """Return the mask in the form that a package needs."""
    mask = read_mask(context.blobs, mask_row.digest)
    asked: FisherMaskCreate | WeightMaskCreate = parse_request(JobKind.MASK, mask_row.request)
    return ChosenMask(
        indices=mask,
        method=asked.method.value,
        density=str(asked.density),
        scope=asked.scope,
    )


def _adapter(request: PackageCreate) -> ChosenAdapter:
    adapter = request.adapter
    if adapter is None:
        raise InputError("A package needs a mask or an adapter. Give one of them.")
    return ChosenAdapter(
        kind=adapter.kind,
        rank=adapter.rank,
        alpha=adapter.alpha,
        scope=adapter.scope,
        seed=adapter.seed,
    )

"""The package job: combine a quantization of a model with a mask or an adapter."""

from typing import cast

from permille.digests import JSON
from permille.errors import InputError
from permille.models.checkpoint import Checkpoint
from permille.package.build import ChosenAdapter, ChosenMask
from permille.package.limits import Role
from permille.pipeline.basis import with_basis
from permille.pipeline.draw import Corpus, Drawn
from permille.pipeline.inputs import versions
from permille.pipeline.pack import pack
from permille.pipeline.select import read_mask
from permille.schemas.jobs import JobKind
from permille.schemas.kinds import parse_request
from permille.schemas.masks import FisherMaskCreate, WeightMaskCreate
from permille.schemas.packages import PackageCreate, public_text
from permille.schemas.quantizations import QuantizationCreate
from permille.store.tables import Artifact
from permille_workers.runtime.context import Publish, TaskContext
from permille_workers.tasks.artifacts import layer_of, publishes_package, quantization_of
from permille_workers.tasks.sources import draw_for_basis, draw_for_reference, open_corpus, open_model

_BEFORE_BASIS = 0.5
"""Progress of a job when it begins to learn a basis."""


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
    coded: QuantizationCreate = parse_request(JobKind.QUANTIZATION, quantization.request)
    origins = {"mask": mask_row and mask_row.provenance, "quantization": quantization.provenance}
    if request.adapter is not None:
        origins["adapter"] = request.adapter.model_dump(mode="json")
    # Draw all text now, because too little text must fail before the rest of the work.
    corpus_id = _corpus_of(mask_row, coded)
    corpus = None if corpus_id is None else open_corpus(context, corpus_id)
    basis_text = _basis_text(corpus, model.checkpoint) if request.basis else None
    text = None if corpus is None else draw_for_reference(corpus, model.checkpoint)
    # Learning a basis takes about as long as everything else.
    packed = _BEFORE_BASIS if request.basis else 1.0
    package = pack(
        context.blobs,
        model.checkpoint,
        _adapter(request) if mask_row is None else _mask(context, mask_row),
        (layer_of(quantization, Role.DENSE), layer_of(quantization, Role.PLAIN)),
        quantization_of(coded.options),
        text=text,
        provenance=cast("dict[str, JSON]", {name: origin for name, origin in origins.items() if origin}),
        made=versions("tokenizers"),
        work=context.work_folder,
        threads=context.settings.threads,
        progress=lambda fraction, what: context.progress(packed * fraction, what),
    )
    if basis_text is not None:
        package = with_basis(
            package,
            basis_text,
            threads=context.settings.threads,
            work=context.work_folder,
            progress=lambda fraction, what: context.progress(packed + (1 - packed) * fraction, what),
        )
    return publishes_package(context, quantization.model_id, package.manifest)


def _corpus_of(mask_row: Artifact | None, coded: QuantizationCreate) -> str | None:
    """Return the id of the corpus of public text, or None."""
    asked: FisherMaskCreate | WeightMaskCreate | None = (
        None if mask_row is None else parse_request(JobKind.MASK, mask_row.request)
    )
    return public_text(asked, coded.evaluation_corpus_id)


def _basis_text(corpus: Corpus | None, checkpoint: Checkpoint) -> Drawn:
    """Draw rows of the corpus for the basis."""
    if corpus is None:
        raise InputError(
            "A basis needs public text. Choose a mask with a corpus, or measure the quantization on one."
        )
    return draw_for_basis(corpus, checkpoint)


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

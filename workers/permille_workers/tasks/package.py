"""The package job: a mask and a quantization of one model, the masked values, the files, and if asked for
powers of two.

The reader verifies the package, as a stranger would, before its row is written.
"""

import numpy as np
from numpy.typing import NDArray
from sqlalchemy.orm import Session

from permille.digests import JSON
from permille.errors import InputError
from permille.models.families import scoped_tensors
from permille.package.build import ChosenMask, write_package
from permille.package.manifest import Quantization
from permille.package.reader import verify_package
from permille.quantization import Scheme
from permille.sensitivity.scores import fisher_exponents, load_scores
from permille.store import results
from permille.store.results import LayerRecord
from permille.store.tables import Mask, QuantizationRow
from permille_workers.context import Publish, Result, TaskContext
from permille_workers.payloads import PackagePayload, parse_payload
from permille_workers.tasks.layers import layer_of, read_mask
from permille_workers.tasks.sources import SourceModel, open_model


def run(context: TaskContext) -> Publish:
    """Make the package of the payload and verify it as a stranger would.

    Raises:
        InputError: parts of different models or weights.
        PackageError: a stored part is damaged, or a file of the model may not be in a package.
    """
    payload = parse_payload(PackagePayload, context.claim.payload)
    mask_row, quantization = _parts(context, payload)
    context.progress(0.0, "opening the model")
    model = open_model(context, mask_row.model_id)
    _check_same_weights(model.provenance, mask_row, quantization)
    mask = read_mask(context.blobs, mask_row.mask_digest)
    exponents_K = None
    if payload.fisher_exponents:
        context.progress(0.1, "scaling")
        exponents_K = _exponents(context, model, mask_row, mask)
    context.progress(0.2, "writing the values")
    stored = (quantization.dense_layer, quantization.plain_layer, mask_row.layer)
    dense, plain, mask_layer = (layer_of(record) for record in stored)
    manifest = write_package(
        context.blobs,
        model.checkpoint,
        ChosenMask(
            indices=mask,
            method=str(mask_row.options["method"]),
            density=str(mask_row.options["density"]),
            scope=str(mask_row.options["scope"]),
            exponents_K=exponents_K,
        ),
        (dense, plain, mask_layer),
        _scheme(quantization),
        provenance={"mask": mask_row.provenance, "quantization": quantization.provenance},
    )
    digest = manifest.digest
    context.progress(0.6, "verifying")
    verify_package(context.blobs, digest)

    def publish(session: Session) -> Result:
        row = results.add_package(
            session,
            tenant_id=context.claim.tenant_id,
            job_id=context.claim.job_id,
            model_id=mask_row.model_id,
            mask_id=mask_row.id,
            quantization_id=quantization.id,
            digest=digest,
            manifest=manifest.to_bytes(),
            k=manifest.mask.k,
            layers=[
                LayerRecord(
                    role=layer.role.value,
                    media_type=layer.media_type,
                    digest=layer.digest,
                    size_bytes=layer.size_bytes,
                )
                for layer in manifest.layers
            ],
        )
        return Result(kind="package", id=row.id)

    return publish


def _parts(context: TaskContext, payload: PackagePayload) -> tuple[Mask, QuantizationRow]:
    tenant_id = context.claim.tenant_id
    with context.db.read() as session:
        mask = results.get_mask(session, tenant_id=tenant_id, mask_id=payload.mask_id)
        quantization = results.get_quantization(
            session, tenant_id=tenant_id, quantization_id=payload.quantization_id
        )
    if mask.model_id != quantization.model_id:
        raise InputError(f"expected parts of one model, got {mask.model_id} and {quantization.model_id}")
    return mask, quantization


def _exponents(
    context: TaskContext, model: SourceModel, mask_row: Mask, mask: dict[str, NDArray[np.uint32]]
) -> NDArray[np.int8]:
    """Powers of two from the scores that chose the mask."""
    if mask_row.scores_digest is None:
        raise InputError(f"expected a mask with scores, got {mask_row.id}, which has none")
    scores = load_scores(context.blobs.path(mask_row.scores_digest))
    names = [name for name, _ in scoped_tensors(model.checkpoint.config) if name in mask]
    return fisher_exponents(np.concatenate([scores[name].reshape(-1)[mask[name]] for name in names]))


def _check_same_weights(model: dict[str, JSON], mask: Mask, quantization: QuantizationRow) -> None:
    for part in (mask, quantization):
        made_of = part.provenance["model"]["digest"]
        if made_of != model["digest"]:
            raise InputError(f"expected {part.id} to be made of {model['digest']}, got {made_of}")


def _scheme(quantization: QuantizationRow) -> Quantization:
    return Quantization(
        name=Scheme(quantization.options["scheme"]),
        group_size=int(quantization.options["group_size"]),
    )

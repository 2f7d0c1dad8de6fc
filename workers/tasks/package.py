"""The package job: a mask and a quantization of one model, the masked values, the files.

The reader verifies the package, as a stranger would, before its row is written.
"""

from collections.abc import Iterator

from sqlalchemy.orm import Session

from permille.errors import InputError
from permille.models.checkpoint import Checkpoint, inside
from permille.models.families import scoped_tensors
from permille.package.blobs import BlobFolder
from permille.package.canonical import JSON
from permille.package.config_files import clean_config, config_bytes
from permille.package.layers import masked_values, write_file, write_values
from permille.package.limits import FILE_NAMES, MAX_FILE_BYTES
from permille.package.manifest import (
    Layer,
    Manifest,
    MaskInfo,
    ModelInfo,
    Quantization,
    TensorInfo,
    decimal_text,
    sort_layers,
)
from permille.package.reader import verify_package
from permille.package.writer import write_manifest
from permille.quantization import Scheme
from permille.store import results
from permille.store.results import LayerRecord
from permille.store.tables import Mask, QuantizationRow
from workers.context import Publish, Result, TaskContext
from workers.payloads import PackagePayload, parse_payload
from workers.tasks.layers import layer_of, read_mask
from workers.tasks.sources import open_model


def run(context: TaskContext) -> Publish:
    """Make the package of the payload and verify it as a stranger would.

    Raises:
        InputError: parts of different models or weights, a quantization that was made for another mask.
        PackageError: a stored part is damaged, or a file of the model may not be in a package.
    """
    payload = parse_payload(PackagePayload, context.claim.payload)
    mask_row, quantization = _parts(context, payload)
    context.progress(0.0, "opening the model")
    model = open_model(context, mask_row.model_id)
    _check_same_weights(model.provenance, mask_row, quantization)
    checkpoint = model.checkpoint
    mask = read_mask(context.blobs, mask_row.mask_digest)
    scoped = scoped_tensors(checkpoint.config)
    order = [name for name, _ in scoped]
    context.progress(0.2, "writing the values")
    values = write_values(
        context.blobs, (masked_values(checkpoint.raw(name), mask[name]) for name in order), order
    )
    files = list(_files(context.blobs, checkpoint))
    config = next(layer for layer in files if layer.path == "config.json")
    stored = [
        layer_of(record) for record in (quantization.dense_layer, quantization.plain_layer, mask_row.layer)
    ]
    manifest = Manifest(
        model=ModelInfo(family=checkpoint.family.value, config=config.digest),
        scheme=_scheme(quantization),
        mask=MaskInfo(
            method=str(mask_row.options["method"]),
            density=decimal_text(float(mask_row.options["density"])),
            scope=str(mask_row.options["scope"]),
            k=mask_row.k,
        ),
        tensors=tuple(TensorInfo(name=name, shape=shape, count=mask[name].size) for name, shape in scoped),
        layers=sort_layers([*stored, values, *files]),
        provenance=_provenance(mask_row, quantization),
    )
    digest = write_manifest(context.blobs, manifest)
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
    if quantization.mask_id not in (None, mask.id):
        raise InputError(
            f"expected a quantization for {mask.id} or for any mask, got {quantization.mask_id}'s"
        )
    return mask, quantization


def _check_same_weights(model: dict[str, JSON], mask: Mask, quantization: QuantizationRow) -> None:
    for part in (mask, quantization):
        made_of = part.provenance["model"]["digest"]
        if made_of != model["digest"]:
            raise InputError(f"expected {part.id} to be made of {model['digest']}, got {made_of}")


def _scheme(quantization: QuantizationRow) -> Quantization:
    return Quantization(
        name=Scheme(quantization.options["scheme"]),
        group_size=int(quantization.options["group_size"]),
        mask_aware=quantization.mask_id is not None,
    )


def _provenance(mask: Mask, quantization: QuantizationRow) -> dict[str, JSON]:
    """Where it comes from: no clock, no row ids, so that the same inputs give the same package."""
    return {"mask": mask.provenance, "quantization": quantization.provenance}


def _files(blobs: BlobFolder, checkpoint: Checkpoint) -> Iterator[Layer]:
    yield write_file(blobs, "config.json", config_bytes(clean_config(checkpoint.config)))
    for name in sorted(FILE_NAMES - {"config.json"}):
        if (checkpoint.folder / name).exists():
            yield write_file(blobs, name, _read(checkpoint, name))


def _read(checkpoint: Checkpoint, name: str) -> bytes:
    path = inside(checkpoint.folder, name)
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise InputError(f"expected {name} of at most {MAX_FILE_BYTES} bytes, got {size}")
    return path.read_bytes()

"""Reading of artifacts that earlier jobs have stored, and publication of new artifacts."""

import json
from collections.abc import Mapping

from sqlalchemy.orm import Session

from permille.package.blobs import BlobFolder
from permille.package.limits import Role
from permille.package.manifest import Layer, Manifest, Quantization
from permille.pipeline.inputs import Made
from permille.quantization.types import Scheme
from permille.schemas.packages import MANIFEST_MEDIA_TYPE
from permille.schemas.quantizations import AnyOptions, AutoRound
from permille.store import artifacts
from permille.store.artifacts import MANIFEST, REPORT, Blob, TaskResult
from permille.store.retention.collection import hold
from permille.store.tables import Artifact
from permille_workers.runtime.context import Publish, TaskContext


def publishes(context: TaskContext, made: TaskResult) -> Publish:
    """Return a function that adds an artifact. It runs in the transaction that ends the job."""

    def publish(session: Session) -> str:
        hold(session, context.blobs, [blob.digest for blob in made.blobs])
        return artifacts.key_of(artifacts.add(session, job=context.claim, made=made))

    return publish


def publishes_made(context: TaskContext, model_id: str, made: Made) -> Publish:
    """Store the report of a step, and return a function that adds its layers as an artifact.

    The function runs in the transaction that ends the job.
    """
    k = made.report.get("k")
    result = TaskResult(
        model_id=model_id,
        digest=made.layers[0].digest,
        k=k if isinstance(k, int) else None,
        provenance=made.provenance,
        blobs=(*map(blob_of_layer, made.layers), report_blob(context.blobs, made.report)),
    )
    return publishes(context, result)


def publishes_package(context: TaskContext, model_id: str, manifest: Manifest) -> Publish:
    """Return a function that adds a package, whose manifest is stored already.

    The function runs in the transaction that ends the job.
    """
    whole = Blob(
        role=MANIFEST,
        media_type=MANIFEST_MEDIA_TYPE,
        digest=manifest.digest,
        size_bytes=len(manifest.to_bytes()),
    )
    return publishes(
        context,
        TaskResult(
            model_id=model_id,
            digest=manifest.digest,
            k=manifest.k,
            provenance={},  # the manifest contains the provenance
            blobs=(whole, *(blob_of_layer(layer) for layer in manifest.layers)),
        ),
    )


def blob_of_layer(layer: Layer) -> Blob:
    """Return the database's record of a layer."""
    return Blob(
        role=layer.role.value,
        media_type=layer.media_type,
        digest=layer.digest,
        size_bytes=layer.size_bytes,
        path=layer.path,
    )


def layer_of(artifact: Artifact, role: Role) -> Layer:
    """Return a layer of an artifact. Raises LookupError if the artifact lacks it."""
    blob = artifacts.blob_of(artifact, role.value)
    if blob is None:
        raise LookupError(f"{artifact.id} has no {role} layer")
    return Layer(role=role, digest=blob.digest, size_bytes=blob.size_bytes)


def quantization_of(options: AnyOptions) -> Quantization:
    """Return the scheme and the group size in the form of the manifest. The codes of AutoRound are int4."""
    scheme = Scheme.INT4 if isinstance(options, AutoRound) else Scheme(options.scheme)
    return Quantization(name=scheme, group_size=options.group_size)


def report_blob(blobs: BlobFolder, report: Mapping[str, object]) -> Blob:
    """Store a report as JSON."""
    data = json.dumps(report, allow_nan=False, sort_keys=True).encode()
    digest = blobs.put_bytes(data)
    return Blob(role=REPORT, media_type="application/json", digest=digest, size_bytes=len(data))

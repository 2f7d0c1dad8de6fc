"""The export job: a package's forward pass as a program for ExecuTorch, and a package that carries it."""

from permille.errors import InputError
from permille.package.build import write_manifest
from permille.package.limits import MAX_MANIFEST_BYTES
from permille.package.manifest import Manifest
from permille.package.reader import Package
from permille.schemas.jobs import JobKind
from permille.schemas.packages import ExportCreate
from permille.store import artifacts
from permille_workers.runtime.context import Publish, TaskContext
from permille_workers.tasks.layers import publishes_package
from permille_workers.tasks.sources import versions


def run(context: TaskContext, request: ExportCreate) -> Publish:
    """Export and publish a package with the program.

    Raises:
        InputError: the exporter is not installed here, or it cannot export such a package.
        PackageError: the package is damaged.
    """
    from permille.engines.executorch.exporting import export_program
    from permille.engines.executorch.program import ProgramShape

    tenant_id, digest = context.claim.tenant_id, request.package_digest
    with context.db.read() as session:
        row = artifacts.get(session, tenant_id=tenant_id, kind=JobKind.PACKAGE, key=digest)
    manifest = Manifest.from_bytes(context.blobs.read(digest, limit=MAX_MANIFEST_BYTES))
    package = Package(context.blobs, manifest.parent())
    context.progress(0.0, "exporting")
    shape = ProgramShape(variants=request.variants, rows=request.rows, tokens=request.tokens)
    positions = int(package.config.get("max_position_embeddings") or request.tokens)
    if request.tokens > positions:
        raise InputError(f"expected at most the model's {positions} tokens, got {request.tokens}")
    layer = export_program(package, shape, weights=request.weights)
    context.progress(0.95, f"publishing: a program of {layer.size_bytes} bytes")
    made = manifest.with_addition(
        layer,
        {
            "parent": package.digest,
            "weights": request.weights.value,
            "variants": request.variants,
            "rows": request.rows,
            "tokens": request.tokens,
            "versions": versions("executorch", "torch"),
        },
    )
    write_manifest(context.blobs, made)
    return publishes_package(context, row.model_id, made)

"""The export job: export a package's forward pass as an ExecuTorch program, and add it to a new package."""

from permille.errors import InputError
from permille.models.settings import within_positions
from permille.package.build import write_manifest
from permille.package.limits import MAX_MANIFEST_BYTES
from permille.package.manifest import Manifest
from permille.package.reader import Package
from permille.pipeline.inputs import versions
from permille.schemas.jobs import JobKind
from permille.schemas.packages import ExportCreate
from permille_workers.runtime.context import Publish, TaskContext
from permille_workers.tasks.artifacts import publishes_package


def run(context: TaskContext, request: ExportCreate) -> Publish:
    """Export the program, and publish a package that contains it.

    Raises:
        InputError: the exporter is not installed on this worker, or it cannot export the package.
        PackageError: the package is damaged.
    """
    from permille.engines.executorch.exporting import export_program
    from permille.engines.executorch.program import ProgramShape

    row = context.artifact(JobKind.PACKAGE, request.package_digest)
    data = context.blobs.read(request.package_digest, limit=MAX_MANIFEST_BYTES)
    package = Package(context.blobs, Manifest.from_bytes(data).parent())
    context.progress(0.0, "exporting")
    shape = ProgramShape(variants=request.variants, rows=request.rows, tokens=request.tokens)
    positions = within_positions(package.config, request.tokens)
    if request.tokens > positions:
        raise InputError(
            f"The model has {positions} positions, too few for {request.tokens} tokens. Request fewer tokens."
        )
    layer = export_program(package, shape, weights=request.weights)
    context.progress(0.95, f"publishing: a program of {layer.size_bytes} bytes")
    made = package.manifest.with_program(
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

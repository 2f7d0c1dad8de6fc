"""The export job: export a package's forward pass as an ExecuTorch program, and add it to a new package."""

from permille.errors import InputError
from permille.models.settings import within_positions
from permille.package.build import write_manifest
from permille.pipeline.inputs import versions
from permille.schemas.packages import ExportCreate
from permille_workers.runtime.context import Publish, TaskContext
from permille_workers.tasks.artifacts import open_parent, publishes_package


def run(context: TaskContext, request: ExportCreate) -> Publish:
    """Export the program, and publish a package that contains it.

    Raises:
        InputError: the exporter is not installed on this worker, or it cannot export the package.
        PackageError: the package is damaged.
    """
    from permille.engines.executorch.exporting import export_program
    from permille.engines.executorch.program import ProgramShape

    row, manifest, package = open_parent(context, request.package_digest)
    context.progress(0.0, "exporting")
    shape = ProgramShape(variants=request.variants, rows=request.rows, tokens=request.tokens)
    positions = within_positions(package.config, request.tokens)
    if request.tokens > positions:
        raise InputError(
            f"The model has {positions} positions, too few for {request.tokens} tokens. Request fewer tokens."
        )
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

"""What a package's own `measurements.json` says, as the API shows it."""

from dataclasses import asdict

from permille.errors import PackageError
from permille.package.config_files import parse_measurements
from permille.package.limits import MAX_FILE_BYTES, MEASUREMENTS
from permille.package.manifest import Manifest
from permille.package.measurements import best_epsilon, precision_rows
from permille.schemas.packages import MeasuredPrecision, PackageReport
from permille.schemas.problems import ProblemType
from permille_service.context import Service
from permille_service.problems import ApiError


def package_report(service: Service, manifest: Manifest) -> PackageReport:
    """The rows that are of the form that FORMAT 3.3 gives.

    Raises:
        ApiError: `unavailable`: the file is gone or damaged.
    """
    layer = manifest.files().get(MEASUREMENTS)
    try:
        found = (
            None
            if layer is None
            else parse_measurements(service.blobs.read(layer.digest, limit=MAX_FILE_BYTES))
        )
    except PackageError as exc:
        raise ApiError(
            ProblemType.UNAVAILABLE, f"the measurements of {manifest.digest} are not in the blob store"
        ) from exc
    rows = precision_rows(found)
    return PackageReport(
        digest=manifest.digest,
        precision=[MeasuredPrecision.model_validate(asdict(row)) for row in rows],
        best_epsilon=best_epsilon(rows),
    )

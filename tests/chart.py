"""Kubernetes' objects that the chart in `deploy/helm` makes."""

import subprocess
from pathlib import Path
from typing import Any, Final

import yaml

CHART: Final = Path(__file__).parents[1] / "deploy/helm"
REQUIRED: Final[dict[str, Any]] = {
    "images": {"registry": "registry.example.org/permille"},
    "hosts": ["models.example.org"],
}
"""The smallest values with which the chart can be installed."""


class ChartError(Exception):
    """Helm's message."""


def render(values: dict[str, Any], release: str = "permille") -> dict[tuple[str, str], Any]:
    """Return all objects that Helm would make, hooks included, by their kind and name.

    Args:
        values: values that differ from the chart's.
        release: the name of the release.

    Raises:
        ChartError: Helm refuses the values.
    """
    done = subprocess.run(
        ["helm", "template", release, str(CHART), "--values", "-"],
        input=yaml.safe_dump(values), capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    if done.returncode:
        raise ChartError(done.stderr)
    documents = list(yaml.safe_load_all(done.stdout))
    objects = {(one["kind"], one["metadata"]["name"]): one for one in documents}
    assert len(objects) == len(documents)
    return objects

"""The fixtures of the workers' tests."""

from tests.unit.workers.conftest import bench, make_bench, package, template

__all__ = ["bench", "make_bench", "package", "template"]

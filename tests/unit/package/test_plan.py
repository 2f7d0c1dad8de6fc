"""Tests of download plans: the costs are known before the start."""

from pathlib import Path

import pytest

from permille.errors import OperatorError
from permille.package.blobs import BlobFolder
from permille.package.limits import Role
from permille_agent.link.pull import RESERVE_BYTES, plan_download
from tests.unit.package.tiny import Tiny, write_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return write_tiny(BlobFolder(tmp_path_factory.mktemp("b")))


def test_everything_is_fetched_smallest_first(tiny: Tiny) -> None:
    plan = plan_download(tiny.manifest, 1 << 40)
    assert {layer.digest for layer in plan.layers} == {layer.digest for layer in tiny.manifest.layers}
    sizes = [layer.size_bytes for layer in plan.layers]
    assert sizes == sorted(sizes) and plan.download_bytes == sum(sizes)
    assert plan.manifest.size_bytes == sum(sizes) + len(tiny.manifest.to_bytes())


def test_after_another_mask_only_mask_and_values_are_fetched(tiny: Tiny, tmp_path: Path) -> None:
    other = write_tiny(BlobFolder(tmp_path), mask_seed=1)
    plan = plan_download(other.manifest, 1 << 40, present={blob.digest for blob in tiny.blobs.entries()})
    assert {layer.role for layer in plan.layers} == {Role.MASK, Role.VALUES}
    assert plan.download_bytes < plan.manifest.size_bytes / 5


def test_a_disk_that_is_one_byte_too_small_is_refused(tiny: Tiny) -> None:
    need = plan_download(tiny.manifest, 1 << 40).download_bytes + RESERVE_BYTES
    assert plan_download(tiny.manifest, need).layers
    with pytest.raises(OperatorError, match=f"{need} bytes needed, {need - 1} free"):
        plan_download(tiny.manifest, need - 1)


def test_nothing_to_fetch_needs_no_disk(tiny: Tiny) -> None:
    plan = plan_download(tiny.manifest, 0, present={blob.digest for blob in tiny.blobs.entries()})
    assert (plan.layers, plan.download_bytes) == ((), 0)

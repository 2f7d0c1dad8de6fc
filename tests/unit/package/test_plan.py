"""Tests of download plans: the costs are known before the start."""

from pathlib import Path

import pytest

from permille.errors import OperatorError, PackageError
from permille.package.blobs import BlobFolder
from permille.package.limits import Role
from permille_agent.link.pull import RESERVE_BYTES, check_plan
from tests.unit.package.tiny import Tiny, write_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return write_tiny(BlobFolder(tmp_path_factory.mktemp("b")))


def test_everything_is_fetched_smallest_first(tiny: Tiny) -> None:
    plan = check_plan(tiny.manifest.to_bytes(), tiny.digest, 1 << 40)
    assert {layer.digest for layer in plan.layers} == {layer.digest for layer in tiny.manifest.layers}
    sizes = [layer.size_bytes for layer in plan.layers]
    assert sizes == sorted(sizes) and plan.download_bytes == sum(sizes)
    assert plan.package_bytes == sum(sizes) + len(tiny.manifest.to_bytes())


def test_after_another_mask_only_mask_and_values_are_fetched(tiny: Tiny, tmp_path: Path) -> None:
    other = write_tiny(BlobFolder(tmp_path), mask_seed=1)
    plan = check_plan(
        other.manifest.to_bytes(),
        other.digest,
        1 << 40,
        present={blob.digest for blob in tiny.blobs.entries()},
    )
    assert {layer.role for layer in plan.layers} == {Role.MASK, Role.VALUES}
    assert plan.download_bytes < plan.package_bytes / 5


def test_a_disk_that_is_one_byte_too_small_is_refused(tiny: Tiny) -> None:
    data = tiny.manifest.to_bytes()
    need = check_plan(data, tiny.digest, 1 << 40).download_bytes + RESERVE_BYTES
    assert check_plan(data, tiny.digest, need).layers
    with pytest.raises(OperatorError, match=f"{need} bytes needed, {need - 1} free"):
        check_plan(data, tiny.digest, need - 1)


def test_nothing_to_fetch_needs_no_disk(tiny: Tiny) -> None:
    plan = check_plan(
        tiny.manifest.to_bytes(), tiny.digest, 0, present={blob.digest for blob in tiny.blobs.entries()}
    )
    assert (plan.layers, plan.download_bytes) == ((), 0)


def test_another_manifest_than_the_one_signed_is_refused_before_it_is_parsed(tiny: Tiny) -> None:
    with pytest.raises(PackageError, match="blob-digest"):
        check_plan(b"no json at all", tiny.digest, 1 << 40)

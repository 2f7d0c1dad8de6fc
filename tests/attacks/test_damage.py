"""Damaged and unusable packages on a device are detected before use, repaired, and never replace a good one.

The tests use the device's own functions on a real home folder. The trial of an installation is a real
process.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from permille.errors import PackageError, RetryableError
from permille.package.blobs import BlobFolder
from permille.package.blocks import package_blocks
from permille.package.limits import BLOCK_BYTES, Role
from permille.package.reader import Package
from permille_agent.link.enrolment import enroll, open_api
from permille_agent.link.install import install
from permille_agent.link.pull import collect_garbage, pull
from permille_agent.link.verify import Verified, verify
from permille_agent.local.model import LocalModel, Sampling, Variant
from permille_agent.state.home import Home, open_home
from permille_agent.state.models import InstalledRelease, installed_release, require_active
from permille_agent.training.engines import ANY_ENGINE
from tests.attacks.forge import Forge
from tests.device_service import Fault, serving
from tests.packages import tiny_package
from tests.unit.edge_agent.conftest import fast_connection
from tests.unit.package.tiny import Tiny

Change = Callable[[Forge], object]


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return open_home(tmp_path / "home")


@pytest.fixture
def good(home: Home) -> Package:
    """Install a package on the device and return it."""
    package = tiny_package(home.blobs)
    install(home, release(package.digest, 1), size_bytes=package.size_bytes)
    return package


def release(digest: str, version: int) -> InstalledRelease:
    return InstalledRelease(name="tiny", version=version, manifest_digest=digest)


def forged(home: Home, package: Package, change: Change) -> str:
    """Store the package with one change and correct digests among the device's blobs. Return its digest."""
    blobs = BlobFolder(home.blobs)
    tiny = Tiny(blobs=blobs, digest=package.digest, manifest=package.manifest, weights={}, mask={})
    forge = Forge(tiny, blobs)
    change(forge)
    return forge.seal()


def numbers(role: str, name: str, number: float) -> Change:
    def change(forge: Forge) -> None:
        container = forge.container(role)
        container.view(name, "<f4")[:] = number
        forge.replace(role, container.data())

    return change


def config(old: bytes, new: bytes) -> Change:
    def change(forge: Forge) -> None:
        data = forge.layers["config.json"]
        assert old in data
        forge.replace("config.json", data.replace(old, new))

    return change


def flip(home: Home, package: Package, role: Role) -> None:
    """Flip one bit in the middle of a layer, as a failing disk does."""
    layer = package.manifest.layer(role)
    flip_at(BlobFolder(home.blobs).path(layer.digest), layer.size_bytes // 2)


def flip_at(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.chmod(0o644)
    path.write_bytes(data)


def speak(home: Home) -> str:
    with LocalModel(home, ANY_ENGINE) as model:
        _, pieces = model.complete("On day 4", Variant.BASE, Sampling(max_new_tokens=4))
        return "".join(pieces)


FIRST = "model.layers.0.self_attn.q_proj.weight"
UNUSABLE: list[tuple[str, str, Change]] = [
    ("values_of_nan", "values-not-finite", numbers("values", FIRST, np.nan)),
    ("scales_of_infinity", "dense-scales", numbers("dense", f"{FIRST}.absmax", np.inf)),
    ("scales_so_large_that_losses_are_nan", "package-trial", numbers("dense", f"{FIRST}.absmax", 3e38)),
    ("values_so_large_that_losses_are_nan", "package-trial", numbers("values", FIRST, 3e38)),
    (
        "one_position",
        "package-trial",
        config(b'"max_position_embeddings": 128', b'"max_position_embeddings": 1'),
    ),
    ("another_family_of_the_same_shapes", "config-model", config(b'"llama"', b'"qwen3"')),
    ("no_tokenizer", "tokenizer", lambda forge: forge.replace("tokenizer.json", b"{}")),
]


@pytest.mark.attack(7, "a package that cannot be used is installed over a working one")
@pytest.mark.parametrize(
    ("code", "change"), [case[1:] for case in UNUSABLE], ids=[case[0] for case in UNUSABLE]
)
def test_an_unusable_package_is_refused_and_the_one_before_stays(
    home: Home, good: Package, code: str, change: Change
) -> None:
    digest = forged(home, good, change)
    with pytest.raises(PackageError) as refused:
        install(home, release(digest, 2), size_bytes=good.size_bytes)
    assert refused.value.code == code
    assert installed_release(home) == release(good.digest, 1)
    collect_garbage(home, now_s=0.0)
    assert speak(home)


@pytest.mark.attack(7, "one bit of a big layer flips on the disk between two runs")
@pytest.mark.parametrize("role", [Role.DENSE, Role.PLAIN])
def test_a_flipped_bit_is_found_before_a_word_is_said(home: Home, role: Role) -> None:
    package = tiny_package(home.blobs, config={"vocab_size": 72_000, "intermediate_size": 20_000})
    install(home, release(package.digest, 1), size_bytes=package.size_bytes)
    said = speak(home)
    layer = package.manifest.layer(role)
    path = BlobFolder(home.blobs).path(layer.digest)
    places = (layer.size_bytes // 2, layer.size_bytes - 1)
    assert min(places) > BLOCK_BYTES  # Opening a package checks only the first block.
    for place in places:
        flip_at(path, place)
        with pytest.raises(PackageError) as found:
            speak(home)
        assert found.value.code == "block-digest"
        flip_at(path, place)
    assert speak(home) == said


@pytest.mark.attack(7, "the new package goes bad before its first use and the old one is gone")
def test_the_package_before_is_taken_again_where_the_new_one_does_not_open(home: Home, good: Package) -> None:
    new = tiny_package(home.blobs, seed=1)
    install(home, release(new.digest, 2), size_bytes=new.size_bytes)
    collect_garbage(home, now_s=0.0)
    flip(home, new, Role.DENSE)
    with pytest.raises(RetryableError, match="version 1 is installed again"):
        speak(home)
    assert installed_release(home) == release(good.digest, 1)
    assert speak(home)


@pytest.mark.attack(7, "bits flip in every blob of a package, a layer is cut, another is gone")
def test_verify_names_what_is_damaged_and_mends_it_with_the_damaged_bytes_alone(tmp_path: Path) -> None:
    published = tiny_package(tmp_path / "published", config={"vocab_size": 40_000, "hidden_size": 64})
    with serving(published.blobs.root) as service:
        service.publish(published.digest, 1)
        home = open_home(tmp_path / "home")
        enrolment = enroll(home, service.url, service.invitation, connection=fast_connection)
        with open_api(home, connection=fast_connection) as api:
            pull(home, api, enrolment, now_s=1_800_000_000)
            assert verify(home) == Verified(packages=1)
            stored = {
                path: path.read_bytes() for path in (home.blobs / "sha256").rglob("*") if path.is_file()
            }
            blocks = [
                b for b in package_blocks(published.blobs, published.manifest) if b.end - b.begin == 1 << 20
            ]
            assert len(blocks) == 2
            damaged = blocks[1]
            flip_at(BlobFolder(home.blobs).path(damaged.layer.digest), damaged.begin + 5)
            before = service.blob_bytes_sent
            found = verify(home)
            assert found.damaged == found.left == [str(damaged)]
            assert verify(home, api) == Verified(
                packages=1, damaged=[str(damaged)], fetched_bytes=damaged.end - damaged.begin
            )
            assert service.blob_bytes_sent - before == damaged.end - damaged.begin
            for path in stored:
                flip_at(path, 7)
            dense = BlobFolder(home.blobs).path(published.manifest.layer(Role.DENSE).digest)
            dense.write_bytes(dense.read_bytes()[:-9])
            BlobFolder(home.blobs).delete(published.manifest.layer(Role.MASK).digest)
            service.faults.append(
                Fault(path=published.manifest.layer(Role.VALUES).digest, flip_byte=3, times=2)
            )
            found = verify(home, api)
            assert [what.split()[0] for what in found.left] == ["values"]
            assert verify(home, api).left == []
            assert verify(home) == Verified(packages=1)
            assert {path: path.read_bytes() for path in stored} == stored


def test_the_package_before_goes_once_the_new_one_was_used(home: Home, good: Package) -> None:
    new = tiny_package(home.blobs, seed=1)
    install(home, release(new.digest, 2), size_bytes=new.size_bytes)
    collect_garbage(home, now_s=0.0)
    assert BlobFolder(home.blobs).has(good.digest)
    assert require_active(home).package == new.digest
    speak(home)
    collect_garbage(home, now_s=0.0)
    assert not BlobFolder(home.blobs).has(good.digest)
    assert speak(home)


def test_a_package_that_was_taken_back_is_not_installed_again(home: Home, good: Package) -> None:
    new = tiny_package(home.blobs, seed=1)
    install(home, release(new.digest, 2), size_bytes=new.size_bytes)

    def refuse(_package: Package) -> None:
        raise PackageError("tensor-shape", "no engine takes it")

    with pytest.raises(RetryableError, match="no engine takes it"):
        LocalModel(home, refuse)  # type: ignore[arg-type]
    with pytest.raises(PackageError, match="no engine takes it"):
        install(home, release(new.digest, 2), size_bytes=new.size_bytes)
    third = tiny_package(home.blobs, seed=2)
    install(home, release(third.digest, 3), size_bytes=third.size_bytes)
    assert installed_release(home) == release(third.digest, 3)

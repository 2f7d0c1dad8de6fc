"""Tests of the files that `make release` builds, and of the workflow that publishes them."""

import base64
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

from permille.native.build import LIBRARY_NAME
from permille.version import __version__
from scripts import release
from tests.chart import CHART, REQUIRED, render
from tests.registry.site import LOGIN, registry

ROOT = release.ROOT
KERNELS = f"permille/native/{LIBRARY_NAME}"


def test_notes_are_the_newest_section_of_the_changelog() -> None:
    assert release.notes("# Changelog\n\n## 0.2 (day)\n\n### Added\n\n- A.\n\n## 0.1\n\n- B.\n") == (
        "### Added\n\n- A.\n"
    )
    assert release.notes((ROOT / "CHANGELOG.md").read_text()).startswith("There is no release yet.")


@pytest.mark.parametrize(
    "changelog", ["", "# Changelog\n\nText.\n", "# Changelog\n\n## 0.2\n\n## 0.1\n\n- B.\n"]
)
def test_a_release_without_notes_is_refused(changelog: str) -> None:
    with pytest.raises(SystemExit, match=r"CHANGELOG.md has no section"):
        release.notes(changelog)


def test_only_a_new_folder_or_an_earlier_release_is_replaced(tmp_path: Path) -> None:
    release.check_folder(tmp_path / "new")
    release.check_folder(tmp_path)
    (tmp_path / "SHA256SUMS").write_text("00  NOTES.md\n")
    (tmp_path / "NOTES.md").touch()
    (tmp_path / "SHA256SUMS.sig").touch()
    release.check_folder(tmp_path)
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(SystemExit, match=r"has files of no release, such as thesis.txt"):
        release.check_folder(tmp_path)
    (tmp_path / "SHA256SUMS").unlink()
    (tmp_path / "thesis.txt").unlink()
    with pytest.raises(SystemExit, match=r"such as NOTES.md"):
        release.check_folder(tmp_path)


def test_a_release_is_not_built_from_changed_files(tmp_path: Path) -> None:
    def git(*command: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run(["git", *identity, *command], cwd=tmp_path, check=True)

    (tmp_path / "lock.txt").write_text("a==1\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "a")
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "new.whl").touch()  # untracked files are not in the archive
    release.check_clean(tmp_path)
    (tmp_path / "lock.txt").write_text("a==2\n")
    with pytest.raises(SystemExit, match=r"Commit or undo these changes:\n M lock.txt"):
        release.check_clean(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_release_is_the_same_twice_and_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # `make release` builds, and tests, the wheel for Arm with a compiler that `make test` does not need.
    machine = platform.machine()
    monkeypatch.setattr(release, "COMPILERS", {"any": "", machine: "gcc"})
    for name in release.SBOMS:
        (tmp_path / f"{name}.cdx.json").write_text("{}")
    for folder in (first := tmp_path / "first", second := tmp_path / "second"):
        folder.mkdir()
        release.release(folder, tmp_path)
    sums = (first / "SHA256SUMS").read_text()
    assert sums == (second / "SHA256SUMS").read_text()
    listed = {name: digest for digest, name in (line.split() for line in sums.splitlines())}
    assert listed == {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in first.iterdir()
        if file.name != "SHA256SUMS"
    }
    start = f"permille-{__version__}"
    native, pure = f"{start}-py3-none-manylinux_2_17_{machine}.whl", f"{start}-py3-none-any.whl"
    lists = {f"{name}.cdx.json" for name in release.SBOMS}
    assert listed.keys() == {f"{start}.tar.gz", f"{start}.tgz", native, pure, "NOTES.md", *lists}
    assert KERNELS in zipfile.ZipFile(first / native).namelist()
    assert KERNELS not in zipfile.ZipFile(first / pure).namelist()
    with tarfile.open(first / f"{start}.tar.gz") as archive:
        assert {f"{start}/{name}" for name in ("hatch_build.py", "permille/FORMAT.md")} <= {
            *archive.getnames()
        }

    with tarfile.open(first / f"{start}.tgz") as archive:
        files = {path.relative_to(CHART) for path in CHART.rglob("*") if path.is_file()}
        assert {*archive.getnames()} == {f"permille/{path}" for path in files}

    # The kernels need glibc 2.17, so they do not run on a system that promises less.
    older = tmp_path / native.replace("2_17", "2_12")
    shutil.copyfile(first / native, older)
    with pytest.raises(SystemExit, match=f"needs the platform manylinux_2_17_{machine}"):
        release.check_platform(older)


@pytest.mark.slow
def test_a_wheel_of_a_release_needs_its_compiler(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        release.build("wheel", ROOT, tmp_path, PERMILLE_WHEEL="aarch64", CC="no-such-compiler")
    assert not list(tmp_path.iterdir())


def test_the_workflow_publishes_without_a_password_and_builds_every_image() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    jobs = workflow["jobs"]
    assert workflow["permissions"] == {}
    assert jobs["index"]["permissions"] == {"id-token": "write"}
    (publish,) = (step for step in jobs["index"]["steps"] if "pypi-publish" in step.get("uses", ""))
    assert publish["with"].keys() == {"packages-dir"}
    targets = re.findall(r"^FROM base AS (\w+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert sorted(jobs["images"]["strategy"]["matrix"]["target"]) == sorted(targets)
    assert "make release" in [step.get("run") for step in jobs["build"]["steps"]]


def test_the_workflow_publishes_the_chart_after_the_images_that_it_names() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    assert {"attest", "images"} == {*jobs["chart"]["needs"]}
    assert "helm push dist/permille-*.tgz" in str(jobs["chart"]["steps"])
    tags = str(jobs["images"]["steps"][-1]["with"]["tags"])
    ref = tags.replace("${{ vars.REGISTRY }}", "r.org").replace("${{ github.ref_name }}", f"v{__version__}")
    images = {"registry": "r.org"}
    for (kind, name), found in render({**REQUIRED, "images": images}).items():
        if kind == "Deployment":
            [container] = found["spec"]["template"]["spec"]["containers"]
            assert container["image"] == ref.replace("${{ matrix.target }}", name.removeprefix("permille-"))


@pytest.mark.slow
def test_a_chart_can_be_installed_from_the_registry_to_which_the_workflow_pushes_it(tmp_path: Path) -> None:
    steps = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]["chart"]["steps"]
    subprocess.run(["helm", "package", CHART, "-d", tmp_path / "dist"], check=True)
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(REQUIRED))
    user, _, password = base64.b64decode(LOGIN).decode().partition(":")
    with registry(tmp_path / "registry", login=True) as host:
        settings = {
            **os.environ,
            "HELM_REGISTRY_CONFIG": str(tmp_path / "logins.json"),
            "REGISTRY": f"{host}/permille",
            "REGISTRY_USER": user,
            "REGISTRY_TOKEN": password,
        }
        for step in steps[1:]:
            command = re.sub("^helm (push|registry login)", r"\g<0> --plain-http", step["run"])
            subprocess.run(["bash", "-euc", command], cwd=tmp_path, env=settings, check=True)
        chart = f"oci://{host}/permille/permille"  # as deploy/README.md says
        options = ["--version", __version__, "--plain-http", "--values", str(tmp_path / "values.yaml")]
        pull = ["helm", "template", "permille", chart, *options]
        made = subprocess.run(pull, env=settings, stdout=subprocess.PIPE, check=True, text=True).stdout
    found = {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(made)}
    assert found == render(REQUIRED)

"""Tests of model sources: folders below a root, and hub repositories at a full commit."""

from pathlib import Path

import pytest

from permille.errors import InputError
from permille.models.sources import download_model, resolve_inside

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_a_folder_below_the_root_is_found_and_a_root_that_is_a_link_followed(tmp_path: Path) -> None:
    (tmp_path / "real" / "a" / "b").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for root in ("real", "link"):
        found = resolve_inside(tmp_path / root, "a/b", what="folder")
        assert found == (tmp_path / "real" / "a" / "b").resolve()


@pytest.mark.parametrize(
    "path", ["..", "a/../..", "../outside", "link", "link/sub", "/etc", "a\0", "missing", "file"]
)
def test_a_path_that_leads_out_or_is_no_folder_is_refused(tmp_path: Path, path: str) -> None:
    root = tmp_path / "root"
    (root / "a").mkdir(parents=True)
    (root / "file").write_text("x")
    (tmp_path / "outside" / "sub").mkdir(parents=True)
    (root / "link").symlink_to(tmp_path / "outside")
    with pytest.raises(InputError, match="There is no") as refused:
        resolve_inside(root, path, what="folder")
    assert ("it is a file" in str(refused.value)) == (path == "file")


@pytest.mark.parametrize("commit", ["main", "", "a" * 39, "A" * 40, "g" * 40, "a" * 41, "a" * 40 + "\n"])
def test_anything_but_a_full_commit_is_refused(tmp_path: Path, commit: str) -> None:
    with pytest.raises(InputError, match="40 hexadecimal digits"):
        download_model("a/b", commit, tmp_path)


@pytest.mark.parametrize("repository", ["b", "a/b/c", "../b", "a/..", "https://x/y", "a/b\n", "-a/b"])
def test_anything_but_owner_and_name_is_refused(tmp_path: Path, repository: str) -> None:
    with pytest.raises(InputError, match="owner/name"):
        download_model(repository, COMMIT, tmp_path)

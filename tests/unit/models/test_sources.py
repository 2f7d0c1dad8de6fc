"""Models come from below a root, or from a hub repository at a full commit."""

from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

from permille.errors import InputError, RetryableError
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
    with pytest.raises(InputError, match="There is no"):
        resolve_inside(root, path, what="folder")


@pytest.mark.parametrize("commit", ["main", "", "a" * 39, "A" * 40, "g" * 40, "a" * 41, "a" * 40 + "\n"])
def test_anything_but_a_full_commit_is_refused(tmp_path: Path, commit: str) -> None:
    with pytest.raises(InputError, match="40 hexadecimal digits"):
        download_model("a/b", commit, tmp_path)


@pytest.mark.parametrize("repository", ["b", "a/b/c", "../b", "a/..", "https://x/y", "a/b\n", "-a/b"])
def test_anything_but_owner_and_name_is_refused(tmp_path: Path, repository: str) -> None:
    with pytest.raises(InputError, match="owner/name"):
        download_model(repository, COMMIT, tmp_path)


def test_the_hub_is_asked_for_the_commit_and_listed_files_only_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []

    def snapshot_download(repository: str, **options: Any) -> str:
        calls.append({"repository": repository, **options})
        options["local_dir"].mkdir(parents=True, exist_ok=True)
        return str(options["local_dir"])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    first, second = (download_model("owner/name", COMMIT, tmp_path) for _ in range(2))
    assert first == second == tmp_path.resolve() / "hub" / "owner--name" / COMMIT
    assert len(calls) == 2, "once for safetensors, which there are not, and once for pickles"
    assert {call["revision"] for call in calls} == {COMMIT}
    patterns = [pattern for call in calls for pattern in call["allow_patterns"]]
    assert "*.safetensors" in calls[0]["allow_patterns"]
    assert "pytorch_model.bin" in calls[1]["allow_patterns"]
    assert not any(pattern.endswith((".py", ".pt", "*")) for pattern in patterns)


def error(kind: type[HfHubHTTPError], status: int) -> HfHubHTTPError:
    response: Any = httpx.Response(status, request=httpx.Request("GET", "http://hub.invalid"))
    return kind("from the hub", response=response)


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (error(RepositoryNotFoundError, 404), InputError),
        (error(HfHubHTTPError, 403), InputError),
        (error(HfHubHTTPError, 503), RetryableError),
        (LocalEntryNotFoundError("no connection"), RetryableError),
    ],
)
def test_what_the_hub_answers_says_what_to_do_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: Exception, expected: type[Exception]
) -> None:
    def snapshot_download(repository: str, **options: Any) -> str:
        raise raised

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(expected, match=r"a/b|hub"):
        download_model("a/b", COMMIT, tmp_path)
    assert not (tmp_path / "hub" / "a--b" / COMMIT / ".complete").exists()

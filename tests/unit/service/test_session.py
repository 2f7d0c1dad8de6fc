"""Tests of the address and the token of a command: odd ones are one line, and no token is printed."""

from pathlib import Path

import pytest

from tests.running_service import permille

AWAY = "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("token", "words"),
    [
        ("pmo_s3cret\n", "No service answers at http://127.0.0.1:1"),
        (" pmo_s3cret\r\n", "No service answers at http://127.0.0.1:1"),
        ("pmo_s3cr\u00e9t", "has a space or a letter that no token has"),
        ("pmo_\u201cs3cret\u201d", "has a space or a letter that no token has"),
        ("pmo_s3cret\nHost: other", "has a space or a letter that no token has"),
        ("pmo_s3cret\x00", "has a space or a letter that no token has"),
        ("\n", "has a space or a letter that no token has"),
    ],
)
def test_a_token_is_stripped_or_refused_and_never_printed(token: str, words: str) -> None:
    done = permille("--url", AWAY, "--token", token, "models", "list")
    assert done.returncode != 0
    assert words in done.stderr.replace("\n", " ")
    assert "s3cr" not in done.stdout + done.stderr


@pytest.mark.parametrize("content", [b"pmo_s3cret\n", b"pmo_s3cr\xe9t"])
def test_a_token_of_the_data_folder_is_treated_the_same(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "operator.token").write_bytes(content)
    done = permille("--url", AWAY, "--data-dir", str(tmp_path), "models", "list")
    assert done.returncode != 0
    assert len(done.stderr.strip().splitlines()) <= 3
    assert "s3cr" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1:1\n", "No service answers at http://127.0.0.1:1:"),
        ("http://[::1", "is no address of a service"),
        ("http://127.0.0.1:port", "is no address of a service"),
        ("http://127.0.0.1\n:1", "is no address of a service"),
        ("ftp://127.0.0.1", "must begin with http:// or https://"),
        ("http://me:s3cret@127.0.0.1:1", "Give the address without a user"),
    ],
)
def test_an_odd_address_is_one_line(url: str, words: str) -> None:
    done = permille("--url", url, "--token", "pmo_x", "models", "list")
    assert done.returncode != 0
    assert words in done.stderr.replace("\n", " ")
    assert "s3cr" not in done.stdout + done.stderr

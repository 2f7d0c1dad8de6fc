"""Logins, and the hosts to which they may go."""

import json
from pathlib import Path

import pytest

from permille.errors import OperatorError
from permille_registry.access import Access, stored_login
from permille_registry.address import Address


@pytest.mark.parametrize(
    ("registry", "realm"),
    [
        ("registry.example.org", "https://registry.example.org/token"),
        ("registry-1.docker.io", "https://auth.docker.io/token"),
        ("registry.gitlab.com", "https://gitlab.com/jwt/auth"),
        ("example.org", "https://auth.example.org/token"),
        ("127.0.0.1:5000", "http://127.0.0.1:5001/token"),
    ],
)
def test_a_token_service_of_the_same_domain_is_asked(registry: str, realm: str) -> None:
    asked = []

    def fetch(url: str, headers: object) -> bytes:
        asked.append((url, headers))
        return b'{"access_token": "abc"}'

    access = Access(Address.parse(f"oci://{registry}/a/b"), "pull", fetch)
    access.take_up(f'Bearer realm="{realm}",service="s"')
    assert access.headers == {"authorization": "Bearer abc"}
    assert asked == [(f"{realm}?service=s&scope=repository%3Aa%2Fb%3Apull", {})]


@pytest.mark.attack(31, "a token service in a foreign domain, on this machine, or at an address")
@pytest.mark.parametrize(
    ("registry", "realm"),
    [
        ("registry.example.org", "https://evil.org/token"),
        ("registry.example.org", "https://registry.example.org.evil.org/token"),
        ("registry.example.org", "https://example.com/token"),
        ("registry.example.org", "https://org/token"),
        ("example.org", "https://evil.org/token"),
        ("registry.example.org", "http://registry.example.org/token"),
        ("registry.example.org", "https://127.0.0.1/token"),
        ("registry.example.org", "http://127.0.0.1/token"),
        ("registry.example.org", "https://anna@registry.example.org/token"),
        ("10.0.0.5", "https://10.0.0.6/token"),
    ],
)
def test_a_foreign_token_service_is_not_asked(registry: str, realm: str) -> None:
    def fetch(url: str, headers: object) -> bytes:
        raise AssertionError(url)

    access = Access(Address.parse(f"oci://{registry}/a"), "pull", fetch)
    with pytest.raises(OperatorError, match="foreign or without TLS"):
        access.take_up(f'Bearer realm="{realm}",service="s"')
    assert access.headers == {}


def test_logins_of_skopeo_and_docker_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, place in (("XDG_RUNTIME_DIR", "containers/auth.json"), ("DOCKER_CONFIG", "config.json")):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_text(json.dumps({"auths": {variable: {"auth": "YTpi"}}}))
        monkeypatch.setenv(variable, str(tmp_path))
        assert stored_login(variable) == "YTpi"


def test_no_file_is_no_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stored_login("registry.example.org") == ""
    (tmp_path / "config.json").write_text('{"auths": {"registry.example.org": {"auth": "YTpi"}}}')
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    assert stored_login("registry.example.org") == "YTpi"
    assert stored_login("other.example.org") == ""


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{", '{"auths": []}', '{"auths": {"a": {"auth": 5}}}', '{"auths": {"a": {"auth": "\\n"}}}'],
)
def test_a_damaged_file_of_logins_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    (tmp_path / "logins.json").write_text(content)
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "logins.json"))
    with pytest.raises(OperatorError, match=r"logins\.json cannot be read as a file of logins"):
        stored_login("a")

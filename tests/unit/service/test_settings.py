"""Tests of settings: defaults are safe, and unsafe settings are refused."""

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from permille.addresses import is_loopback
from permille.store.settings import explain
from permille_service.settings import client_url, load, local_url
from tests.running_service import environment


def test_everything_is_below_the_data_folder_unless_named(tmp_path: Path) -> None:
    settings = load(data_dir=tmp_path, corpus_root=tmp_path / "texts")
    assert settings.blob_root == tmp_path / "blobs"
    assert settings.corpus_root == tmp_path / "texts"
    assert settings.database_url.get_secret_value() == f"sqlite:///{tmp_path}/permille.db"
    assert (settings.host, settings.broker_url) == ("127.0.0.1", None)


def test_environment_names_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERMILLE_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("PERMILLE_PORT", "9")
    monkeypatch.setenv("PERMILLE_ALLOWED_HOSTS", '["a.example"]')
    settings = load()
    assert (settings.data_dir, settings.port, settings.allowed_hosts) == (tmp_path, 9, ("a.example",))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "models.example"])
def test_open_bind_needs_tls(tmp_path: Path, host: str) -> None:
    with pytest.raises(ValidationError, match="--tls-certificate"):
        load(data_dir=tmp_path, host=host)
    files = {"tls_certificate": tmp_path / "c.pem", "tls_key": tmp_path / "k.pem"}
    assert load(data_dir=tmp_path, host=host, **files).host == host


def test_half_of_tls_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="together"):
        load(data_dir=tmp_path, tls_key=tmp_path / "k.pem")


def test_loopback_is_told_from_the_rest() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "10.0.0.1", "localhost.evil.example", "")))


def test_database_password_is_not_shown(tmp_path: Path) -> None:
    settings = load(data_dir=tmp_path, database_url="postgresql+psycopg://u:hunter2@db/x")
    assert "hunter2" not in repr(settings)


def test_a_model_root_around_the_data_folder_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(ValidationError) as around:
        load(data_dir=tmp_path / "data", model_root=tmp_path)
    line = explain(around.value)
    assert line.startswith(f"The model root {tmp_path} contains {tmp_path / 'data' / 'tenants'}")
    assert "Choose a --model-root that holds the model files only" in line
    with pytest.raises(ValidationError) as inside:
        load(data_dir=tmp_path / "data", corpus_root=tmp_path / "data" / "tenants" / "one")
    assert "Choose another --corpus-root" in explain(inside.value)


def test_errors_are_explained_in_one_line_without_values(tmp_path: Path) -> None:
    with pytest.raises(ValidationError) as missing:
        load()
    assert explain(missing.value).startswith("set PERMILLE_DATA_DIR, ")
    with pytest.raises(ValidationError) as wrong:
        load(data_dir=tmp_path, database_url=["hunter2"], port=70_000, blob_bucket="s3://u:hunter2@b")
    line = explain(wrong.value)
    assert "PERMILLE_BLOB_BUCKET: expected s3://" in line
    assert "PERMILLE_PORT: " in line
    assert "PERMILLE_DATABASE_URL: " in line
    assert "hunter2" not in line
    assert "\n" not in line


def test_a_list_that_is_none_is_named_with_its_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERMILLE_ALLOWED_HOSTS", "models.example.org")
    with pytest.raises(ValueError, match="allowed_hosts") as wrong:
        load(data_dir=tmp_path)
    assert explain(wrong.value) == 'PERMILLE_ALLOWED_HOSTS: Write a JSON list, such as ["one", "two"].'


@pytest.mark.parametrize("host", ["https://a.example", "a.example:443", "*", "*.example", "a.example/", ""])
def test_a_host_that_matches_no_request_is_refused(tmp_path: Path, host: str) -> None:
    with pytest.raises(ValidationError) as wrong:
        load(data_dir=tmp_path, allowed_hosts=("b.example", host))
    assert f"PERMILLE_ALLOWED_HOSTS: {host!r} is no name of a host" in explain(wrong.value)


@pytest.mark.parametrize("proxy", ["10.0.0.1/8", "proxy.example.org"])
def test_a_proxy_that_is_no_network_is_named(tmp_path: Path, proxy: str) -> None:
    with pytest.raises(ValidationError) as wrong:
        load(data_dir=tmp_path, trusted_proxies=(proxy,))
    assert explain(wrong.value).startswith("PERMILLE_TRUSTED_PROXIES: ")
    assert proxy in explain(wrong.value)


@pytest.mark.parametrize("name", ["queued_jobs_per_tenant", "memory_bytes", "upload_bytes_per_device"])
def test_a_number_that_no_query_can_hold_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValidationError, match=name):
        load(data_dir=tmp_path, **{name: 2**63})


@pytest.mark.parametrize(
    ("host", "names", "local", "public"),
    [
        ("0.0.0.0", (), "https://127.0.0.1:9", "https://127.0.0.1:9"),
        ("::", (), "https://[::1]:9", "https://[::1]:9"),
        ("0.0.0.0", ("a.example", "b.example"), "https://127.0.0.1:9", "https://a.example:9"),
        ("192.0.2.7", ("a.example",), "https://192.0.2.7:9", "https://a.example:9"),
        ("192.0.2.7", (), "https://192.0.2.7:9", "https://192.0.2.7:9"),
        ("127.0.0.1", ("a.example",), "https://127.0.0.1:9", "https://127.0.0.1:9"),
    ],
)
def test_url_for_clients_is_one_that_they_can_use(
    tmp_path: Path, host: str, names: tuple[str, ...], local: str, public: str
) -> None:
    files = {"tls_certificate": tmp_path / "c.pem", "tls_key": tmp_path / "k.pem"}
    settings = load(data_dir=tmp_path, host=host, allowed_hosts=names, **files)
    assert (local_url(settings, 9), client_url(settings, 9)) == (local, public)


def test_url_without_tls_is_loopback(tmp_path: Path) -> None:
    settings = load(data_dir=tmp_path, host="::1", allowed_hosts=("a.example",))
    assert client_url(settings, 9) == "http://[::1]:9"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"DATABASE_URL": "postgres://me:s3cret@127.0.0.1/x"}, "PERMILLE_DATABASE_URL: A URL of 'postgres'"),
        ({"METRICS_TOKEN": "s3cret word"}, "PERMILLE_METRICS_TOKEN: A token consists of letters"),
        (
            {"HOST": "127.0.0.1", "TLS_CERTIFICATE": "/no/c.pem", "TLS_KEY": "/no/k.pem"},
            "The certificate /no/c.pem",
        ),
        ({"HOST": "::1%none"}, "Cannot listen on port 0 of ::1%none"),
    ],
)
def test_a_service_that_cannot_start_says_so_in_one_line(
    tmp_path: Path, settings: dict[str, str], words: str
) -> None:
    given = {"DATA_DIR": str(tmp_path), "PORT": "0", **settings}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "permille_service"],
        env=environment(**{f"PERMILLE_{name}": value for name, value in given.items()}),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"permille: {words}")
    assert len(done.stderr.splitlines()) == 1
    assert "s3cret" not in done.stderr
    assert not (tmp_path / "service.url").exists()

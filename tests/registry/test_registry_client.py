"""Uploads and downloads of the operator's client: they survive kills and faults, and give no login away."""

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from permille.digests import digest_of
from permille.errors import OperatorError, PackageError, RetryableError
from permille.package.blobs import BlobFolder
from permille_registry import client
from tests.registry.conftest import open_registry
from tests.registry.site import LOGIN, Fault, Gate, gate, registry

DATA = random.Random(5).randbytes(100_000)
DIGEST = digest_of(DATA)
CHUNK = 10_000


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "CHUNK_BYTES", CHUNK)


def read(begin: int, end: int) -> bytes:
    return DATA[begin:end]


def sent(site: Gate) -> int:
    """Return the number of bytes of all chunks that went to the registry."""
    return sum(size for line, _, size in site.requests if line.startswith("PATCH"))


def fetched(site: Gate) -> bytes:
    with open_registry(site) as opened:
        return opened.read(DIGEST, limit_bytes=len(DATA))


def test_a_blob_is_sent_in_chunks_and_only_once(site: Gate) -> None:
    with open_registry(site) as opened:
        assert not opened.has(DIGEST)
        assert opened.upload(DIGEST, len(DATA), read) == len(DATA)
        assert opened.upload(DIGEST, len(DATA), read) == 0
    assert len(site.lines("^PATCH")) == 10 and fetched(site) == DATA


@pytest.mark.parametrize("data", [b"", b"a"])
def test_small_blobs_are_blobs(site: Gate, data: bytes) -> None:
    with open_registry(site) as opened:
        opened.upload(digest_of(data), len(data), lambda begin, end: data[begin:end])
        assert opened.read(digest_of(data), limit_bytes=1) == data


def test_an_upload_continues_between_chunks(site: Gate) -> None:
    site.faults = [Fault("^PATCH", after=3, status=503), Fault("^PATCH", after=6, status=429)]
    with open_registry(site) as opened:
        assert opened.upload(DIGEST, len(DATA), read) == len(DATA)
    assert sent(site) == len(DATA) + 2 * CHUNK and fetched(site) == DATA


def test_an_upload_starts_again_if_the_registry_does_not_continue_a_cut_chunk(site: Gate) -> None:
    site.faults = [Fault("^PATCH", after=3, cut_request=CHUNK // 2)]
    with open_registry(site) as opened:
        assert opened.upload(DIGEST, len(DATA), read) == len(DATA) + 3 * CHUNK
    assert fetched(site) == DATA


def test_an_upload_that_gets_nowhere_ends(site: Gate) -> None:
    site.faults = [Fault("^PATCH", after=3, times=99, status=503)]
    with open_registry(site) as opened, pytest.raises(RetryableError, match="answered 503 to PATCH"):
        opened.upload(DIGEST, len(DATA), read)
    site.faults = []
    with open_registry(site) as opened:  # a later process
        assert opened.upload(DIGEST, len(DATA), read) == len(DATA) - 3 * CHUNK
    assert fetched(site) == DATA


def test_an_upload_of_wrong_bytes_ends(site: Gate) -> None:
    with open_registry(site) as opened, pytest.raises(OperatorError, match=r"answered 400.*DIGEST_INVALID"):
        opened.upload(DIGEST, len(DATA), lambda begin, end: bytes(end - begin))
    with open_registry(site) as opened:
        assert not opened.has(DIGEST)


@pytest.mark.attack(31, "an artifact's manifest that the registry stores with other bytes")
def test_a_manifest_that_is_not_stored_as_sent_is_an_error(site: Gate) -> None:
    site.faults = [Fault("^PUT", status=201, headers={"docker-content-digest": "sha256:" + "0" * 64})]
    with open_registry(site) as opened, pytest.raises(OperatorError, match="stored sha256:0000"):
        opened.put_manifest("1", "application/json", b"{}")


@pytest.mark.slow
def test_a_push_that_is_killed_twice_continues_and_gives_the_same_digest(site: Gate, tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(DATA)
    command = [sys.executable, "-m", "tests.registry.pushing", str(site.address())]
    for _ in range(2):
        site.faults = [Fault("^PATCH", after=3, stall=True)]
        site.stalled.clear()
        pushing = subprocess.Popen([*command, str(tmp_path / "blob"), str(CHUNK)])
        assert site.stalled.wait(60)
        pushing.kill()
        pushing.wait()
    site.faults = []
    ended = subprocess.run(
        [*command, str(tmp_path / "blob"), str(CHUNK)], check=True, capture_output=True, text=True
    )
    assert int(ended.stdout) == len(DATA) - 6 * CHUNK and fetched(site) == DATA


def test_a_download_continues_and_is_checked(site: Gate, tmp_path: Path) -> None:
    with open_registry(site) as opened:
        opened.upload(DIGEST, len(DATA), read)
        blobs = BlobFolder(tmp_path / "blobs")
        site.faults = [Fault("^GET", times=2, cut_after=20_000), Fault("^GET", times=9, status=503)]
        with pytest.raises(RetryableError):
            opened.download(DIGEST, len(DATA), blobs)
        site.faults = []
        before = site.sent_bytes
        opened.download(DIGEST, len(DATA), blobs)
        assert site.sent_bytes - before == len(DATA) - 40_000
        opened.download(DIGEST, len(DATA), blobs)
    assert blobs.path(DIGEST).read_bytes() == DATA and list(blobs.incoming().iterdir()) == []


@pytest.mark.attack(31, "wrong, too many, or endless bytes for an operator's pull")
@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (Fault("^GET", flip_byte=7), "blob-digest"),
        (Fault("^GET", status=200, body=DATA + b"more"), "blob-size"),
        (Fault("^GET", endless=True), "blob-size"),
        (Fault("^GET", status=206, headers={"content-range": "bytes 9-99/100"}, body=bytes(91)), "blob-size"),
    ],
)
def test_a_download_of_other_bytes_is_discarded(site: Gate, tmp_path: Path, fault: Fault, code: str) -> None:
    blobs = BlobFolder(tmp_path / "blobs")
    with open_registry(site) as opened:
        opened.upload(DIGEST, len(DATA), read)
        site.faults = [fault]
        with pytest.raises(PackageError) as refused:
            opened.download(DIGEST, len(DATA), blobs)
        assert refused.value.code == code and not blobs.has(DIGEST)
        assert site.endless_bytes < 64 << 20
        opened.download(DIGEST, len(DATA), blobs)


@pytest.mark.attack(31, "an enormous or endless manifest of a package, or of an error")
@pytest.mark.parametrize("fault", [Fault("^GET", endless=True), Fault("^GET", flip_byte=3)])
def test_a_small_blob_is_read_up_to_its_limit(site: Gate, fault: Fault) -> None:
    with open_registry(site) as opened:
        opened.upload(DIGEST, len(DATA), read)
        site.faults = [fault]
        with pytest.raises(PackageError, match="blob-"):
            opened.read(DIGEST, limit_bytes=len(DATA))
    assert site.endless_bytes < 64 << 20


@pytest.fixture
def closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Yield the gate of a registry that wants a login, which is stored."""
    logins = tmp_path / "logins.json"
    with registry(tmp_path / "closed", login=True) as host, gate(host) as opened:
        monkeypatch.setenv("REGISTRY_AUTH_FILE", str(logins))
        login = ["skopeo", "login", "--tls-verify=false", "-u", "anna", "-p", "secret", opened.host]
        subprocess.run(login, check=True, capture_output=True)
        opened.requests.clear()
        yield opened


def test_a_login_is_read_from_the_users_file_and_sent_after_a_challenge(
    closed: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_registry(closed) as opened:
        opened.upload(DIGEST, len(DATA), read)
    assert fetched(closed) == DATA
    assert "authorization" not in closed.requests[0][1]
    monkeypatch.delenv("REGISTRY_AUTH_FILE")
    with open_registry(closed) as opened, pytest.raises(OperatorError, match="Log in with `skopeo login"):
        opened.has(DIGEST)


@pytest.mark.attack(
    31, "a registry that redirects a download or an upload to a foreign host, to get the login"
)
@pytest.mark.parametrize("status", [302, 303, 307])
def test_the_login_does_not_follow_a_redirect(closed: Gate, tmp_path: Path, status: int) -> None:
    with registry(tmp_path / "foreign") as host, gate(host) as foreign:
        elsewhere = {"location": f"http://{foreign.host}/v2/models/assistant/blobs/{DIGEST}"}
        with open_registry(closed) as opened, open_registry(foreign) as other:
            opened.upload(DIGEST, len(DATA), read)
            other.upload(DIGEST, len(DATA), read)
            foreign.requests.clear()
            closed.faults = [Fault("^GET", times=9, status=status, headers=elsewhere)]
            assert opened.read(DIGEST, limit_bytes=len(DATA)) == DATA  # the digest decides, not the host
            assert len(foreign.requests) == 1
            # An upload does not leave the registry at all.
            closed.faults = [Fault("^POST", status=202, headers={"location": f"http://{foreign.host}/v2/x"})]
            with pytest.raises(OperatorError, match="Neither the login nor the package was sent there"):
                opened.upload(digest_of(b"b"), 1, lambda _begin, _end: b"b")
            closed.faults = [Fault("^GET", status=307, headers={"location": "http://192.0.2.1/secrets"})]
            with pytest.raises(OperatorError, match="Only https to another machine is allowed"):
                opened.read(DIGEST, limit_bytes=len(DATA))
        assert not any(headers.get("authorization") for _, headers, _ in foreign.requests)


@pytest.mark.attack(31, "a registry that names a foreign token service, to get the login")
@pytest.mark.parametrize(
    ("challenge", "error"),
    [
        ('Bearer realm="https://evil.example.com/token",service="a"', "foreign"),
        ('Bearer realm="http://192.0.2.1/token"', "foreign or without TLS"),
        ('Bearer realm="https://anna@127.0.0.1/token"', "foreign"),
        ('Bearer realm="file:///etc/passwd"', "foreign"),
        ("Bearer realm", "malformed challenge"),
        ("Negotiate", "refuses access"),
        ("", "refuses access"),
    ],
)
def test_the_login_goes_to_no_foreign_token_service(closed: Gate, challenge: str, error: str) -> None:
    closed.faults = [Fault("", status=401, headers={"www-authenticate": challenge})]
    with open_registry(closed) as opened, pytest.raises(OperatorError, match=error):
        opened.has(DIGEST)
    assert not any("authorization" in headers for _, headers, _ in closed.requests)


def test_a_token_is_asked_for_this_repository_alone(closed: Gate) -> None:
    realm = f"http://{closed.host}/token"
    greedy = f'Bearer realm="{realm}",service="tests",scope="repository:other:pull,push,delete"'
    closed.faults = [
        Fault("^HEAD", status=401, headers={"www-authenticate": greedy}),
        Fault("/token", status=200, body=b'{"token": "abc"}'),
        Fault("^HEAD", status=200),
    ]
    with open_registry(closed) as opened:
        assert opened.has(DIGEST)
    (line,) = closed.lines("/token")
    assert "scope=repository%3Amodels%2Fassistant%3Apull%2Cpush" in line and "other" not in line
    found = [headers.get("authorization") for _, headers, _ in closed.requests]
    assert found == [None, f"Basic {LOGIN}", "Bearer abc"]


@pytest.mark.parametrize(
    "answer", [b"", b"[]", b"{}", b'{"token": 5}', b'{"token": "a\\r\\nb: c"}', b"[" * 9999]
)
def test_a_malformed_token_is_an_error(closed: Gate, answer: bytes) -> None:
    challenge = {"www-authenticate": f'Bearer realm="http://{closed.host}/token"'}
    closed.faults = [Fault("^HEAD", status=401, headers=challenge), Fault("/token", status=200, body=answer)]
    with open_registry(closed) as opened, pytest.raises(OperatorError, match="malformed answer"):
        opened.has(DIGEST)

"""Tests of blobs in a bucket: complete, hashed and bounded, with a faulty bucket and concurrent readers."""

import base64
import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from permille.digests import digest_of
from permille.errors import OperatorError, PackageError
from permille.store.blobs.bucket import Bucket
from permille.store.blobs.folder import BlobCache, BucketFolder
from permille.store.errors import BlobStoreError
from permille.store.settings import BucketAddress
from tests.bucket_site import CREDENTIALS, Fault, Gate, bucket_server, gate, settle

HELLO = digest_of(b"hello")
ONES, TWOS = bytes([1]) * 1000, bytes([2]) * 1000
MIB = 1 << 20
UNNAMED = b"<CommonPrefixes><Name>k/</Name></CommonPrefixes></R>"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with bucket_server() as found:
        yield found


@pytest.fixture
def site(server: str) -> Iterator[Gate]:
    with gate(server) as found:
        yield found


def folder(site: Gate, root: Path, *, most_bytes: int = 1 << 30) -> BucketFolder:
    """Return the folder of one machine."""
    return BucketFolder(site.open(), BlobCache(root, most_bytes))


def base64_of(body: bytes) -> str:
    return base64.b64encode(hashlib.sha256(body).digest()).decode()


def copies(root: Path) -> list[str]:
    return [entry.digest for entry in BlobCache(root, 0).entries()]


def test_what_one_machine_puts_another_one_has(site: Gate, tmp_path: Path) -> None:
    here, there = folder(site, tmp_path / "here"), folder(site, tmp_path / "there")
    assert here.put_bytes(b"hello") == HELLO
    (entry,) = there.entries()
    assert (entry.digest, entry.size_bytes, there.entry(HELLO), there.size(HELLO)) == (HELLO, 5, entry, 5)
    assert 0 < entry.written_at_s < settle()
    path = there.path(HELLO)
    assert path.is_relative_to(tmp_path / "there") and path.read_bytes() == b"hello"
    assert path.stat().st_mode & 0o777 == 0o444
    (put,) = site.sent("^PUT .*/sha256/")
    assert put.line.startswith(f"PUT /{site.bucket}/permille/sha256/{HELLO[7:9]}/{HELLO[7:]}")
    assert put.headers["x-amz-checksum-sha256"] == base64_of(put.body)
    fetched = len(site.sent("^GET"))
    assert there.path(HELLO) == path and there.read(HELLO, limit=5) == b"hello"
    assert len(site.sent("^GET")) == fetched, "a copy that is here is not fetched again"
    here.delete(HELLO)
    here.delete(HELLO)
    assert (there.has(HELLO), list(there.entries()), copies(tmp_path / "here")) == (False, [], [])
    for read in (lambda: here.size(HELLO), lambda: here.open(HELLO).close(), lambda: here.path(HELLO)):
        with pytest.raises(PackageError, match="blob-missing"):
            read()


def test_stores_below_are_apart_and_private_ones_leave_no_copy(site: Gate, tmp_path: Path) -> None:
    here, there = folder(site, tmp_path / "here"), folder(site, tmp_path / "there")
    sent = here.below("uploads", "ten_1", "upl_1", private=True)
    sent.put_bytes(b"hello")
    there.below("uploads", "ten_1", "upl_2", private=True).put_bytes(b"other")
    received = there.below("uploads", "ten_1", "upl_1", private=True)
    assert received.read(HELLO, limit=5) == b"hello"
    received.check(HELLO)
    with pytest.raises(ValueError, match="private"):
        received.path(HELLO)
    assert (list(here.entries()), copies(tmp_path / "here"), copies(tmp_path / "there")) == ([], [], [])
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size]
    assert here.below("uploads", "ten_1").names() == ["upl_1", "upl_2"]
    there.below("uploads", "ten_1", "upl_1").erase()
    assert here.below("uploads", "ten_1").names() == ["upl_2"]
    with pytest.raises(ValueError, match="all blobs"):
        here.erase()


def test_a_body_that_breaks_off_is_continued_and_an_altered_one_gets_no_path(
    site: Gate, tmp_path: Path
) -> None:
    here = folder(site, tmp_path / "here")
    digest = here.put_bytes(os.urandom(3 * MIB))
    site.faults = [Fault("^GET", cut_after=MIB + 7), Fault("^GET", cut_after=MIB)]
    assert folder(site, tmp_path / "there").path(digest).read_bytes() == here.path(digest).read_bytes()
    assert [request.headers.get("range") for request in site.sent("^GET")] == [
        None,
        f"bytes={MIB + 7}-{3 * MIB - 1}",
        f"bytes={2 * MIB + 7}-{3 * MIB - 1}",
    ]
    third = folder(site, tmp_path / "third")
    for fault, error, words in (
        (Fault("^GET", flip_byte=MIB), PackageError, "blob-digest"),
        (Fault("^GET", times=9, cut_after=0), BlobStoreError, f"byte 0 of {3 * MIB}"),
    ):
        site.faults = [fault]
        with pytest.raises(error, match=words):
            third.path(digest)
        assert copies(tmp_path / "third") == []
    site.faults = []
    assert third.path(digest).stat().st_size == 3 * MIB


def test_an_error_of_the_bucket_is_tried_again_and_then_told_without_what_was_signed(
    site: Gate, tmp_path: Path
) -> None:
    here = folder(site, tmp_path)
    site.faults = [Fault("^PUT", status=500), Fault("^HEAD", status=503), Fault("^GET", status=500)]
    assert here.has(here.put_bytes(b"hello"))
    here._cache.delete(HELLO)
    assert here.read(HELLO, limit=5) == b"hello"
    for code, status, error in (
        ("SlowDown", 503, BlobStoreError),
        ("AccessDenied", 403, OperatorError),
        ("NoSuchBucket", 404, OperatorError),
    ):
        site.faults = [Fault("^PUT", times=9, status=status, code=code)]
        with pytest.raises(error, match=f"{site.bucket}.*{code}"):
            here.put_bytes(b"other")
    site.faults = []
    assert [entry.digest for entry in here.entries()] == [HELLO]
    here.check_writable(100)
    unknown = Bucket(
        BucketAddress.parse(site.address.replace(site.bucket, "unknown")), attempts=1, reach_s=60.0
    )
    with pytest.raises(OperatorError, match=r"'unknown'\. Make it first"):
        unknown.reach()
    away = Bucket(BucketAddress.parse("s3://blobs?endpoint=http://127.0.0.1:1&region=r"), attempts=1)
    with pytest.raises(BlobStoreError, match="EndpointConnectionError") as told:
        BucketFolder(away, BlobCache(tmp_path, 0)).check_writable(100)
    assert "secret" not in str(told.value)


def test_without_credentials_a_person_must_act(site: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    with pytest.raises(OperatorError, match="NoCredentialsError"):
        site.open().head("key")


def test_copies_are_bounded_and_what_is_in_use_stays(site: Gate, tmp_path: Path) -> None:
    writer = folder(site, tmp_path / "writer")
    threes, fours = bytes([3]) * 1000, bytes([4]) * 1000
    ones, twos, third, fourth = [writer.put_bytes(data) for data in (ONES, TWOS, threes, fours)]
    root = tmp_path / "worker"
    worker, other = folder(site, root, most_bytes=2500), folder(site, root, most_bytes=2500)
    held = worker.path(ones)
    other.read(twos, limit=1000)
    other.read(third, limit=1000)
    assert set(copies(root)) == {ones, third}, "the oldest is in use, the second goes"
    assert held.read_bytes() == ONES
    with other.open(third) as file:
        other.read(fourth, limit=1000)
        assert set(copies(root)) == {ones, third, fourth} and file.read() == threes, "all in use"
    other.put_bytes(TWOS)
    assert set(copies(root)) == {ones, twos}
    full = SimpleNamespace(free=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("permille.store.blobs.folder.shutil.disk_usage", lambda _: full)
        folder(site, root).read(third, limit=1000)
    assert set(copies(root)) == {ones, third}, "a full disk bounds them too"
    held.chmod(0o644)
    held.write_bytes(b"gone bad")
    assert other.read(ones, limit=1000) == ONES, "a copy that has gone bad is fetched again"
    worker.check(ones)


def test_a_large_file_goes_in_parts_and_every_file_is_compared_as_a_whole(site: Gate, tmp_path: Path) -> None:
    bucket = site.open(part_bytes=5 * MIB)
    here = BucketFolder(bucket, BlobCache(tmp_path / "here", 1 << 30))
    data = os.urandom(12 * MIB)
    digest = here.put_bytes(data)
    parts = site.sent("^PUT .*partNumber")
    assert sorted(len(part.body) for part in parts) == [2 * MIB, 5 * MIB, 5 * MIB]
    for part in parts:
        assert part.headers["x-amz-checksum-sha256"] == base64_of(part.body)
    assert folder(site, tmp_path / "there").read(digest, limit=len(data)) == data
    changed = tmp_path / "changed"
    for size in (12 * MIB, MIB):
        changed.write_bytes(data[: size - 1] + bytes([data[size - 1] ^ 1]))
        with pytest.raises(PackageError, match="blob-digest"):
            bucket.put("other", changed, digest_of(data[:size]))
    assert bucket.head("other") is None
    assert bucket.abort_uploads("", lambda _: True) == 0, "what failed was given up at once"


def test_a_killed_upload_shows_nowhere_and_is_swept(site: Gate, tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from types import SimpleNamespace
from permille.store.blobs.bucket import Bucket
from permille.store.settings import BucketAddress
from permille.store.blobs.folder import BlobCache, BucketFolder
bucket = Bucket(BucketAddress.parse(sys.argv[1]), attempts=1, part_bytes=5 << 20)
BucketFolder(bucket, BlobCache(Path(sys.argv[2]), 1 << 30)).put_bytes(bytes(11 << 20))
"""
    site.faults = [Fault("partNumber=3", stall=True)]
    command = [sys.executable, "-c", script, site.address, str(tmp_path)]
    with subprocess.Popen(command) as child:
        assert site.stalled.wait(240)
        child.send_signal(signal.SIGKILL)
    here = folder(site, tmp_path)
    assert (list(here.entries()), copies(tmp_path)) == ([], [])
    others = {"Bucket": site.bucket, "Key": f"permille/backup/sha256/{HELLO[7:]}"}
    here._bucket._client.create_multipart_upload(**others)
    assert here.sweep(before_s=0.0) == 0
    assert here.sweep(before_s=settle()) == 2, "a temporary file here, the parts there"
    assert here.sweep(before_s=settle()) == 0
    (left,) = here._bucket._client.list_multipart_uploads(Bucket=site.bucket)["Uploads"]
    assert left["Key"] == others["Key"], "not ours"


def test_the_rights_that_the_guide_lists_are_enough_and_needed(
    site: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guide = Path("docs/howto/store-blobs-in-a-bucket.md").read_text()
    (policy,) = re.findall(r"```json\n(\{\n  \"Version\".*?)```", guide, re.DOTALL)
    rights = policy.replace("my-blobs", site.bucket)
    # For HeadBucket, Amazon checks the right s3:ListBucket. moto checks a right with the operation's name.
    rights = rights.replace('"s3:ListBucket",', '"s3:ListBucket", "s3:HeadBucket",')
    known, other = _user(rights), _user(rights.replace("/permille/*", "/elsewhere/*"))
    monkeypatch.setattr("moto.settings.INITIAL_NO_AUTH_ACTION_COUNT", 0)  # from here on, moto checks rights

    def store(key_id: str, secret: str, **options: Any) -> BucketFolder:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key_id)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
        return BucketFolder(site.open(**options), BlobCache(tmp_path, 1 << 30))

    here = store(*known, part_bytes=5 << 20)
    here.check_writable(100)
    large = here.put_bytes(bytes(6 * MIB))
    below = here.below("uploads", "ten_1")
    below.put_bytes(b"hello")
    listed = [entry.digest for entry in here.entries()]
    assert (listed, here.below("uploads").names()) == ([large], ["ten_1"])
    here._cache.delete(large)
    assert here.read(large, limit=6 * MIB) == bytes(6 * MIB)
    here._bucket._client.create_multipart_upload(Bucket=site.bucket, Key=below._key(large))
    assert here.sweep(before_s=settle()) == 1
    below.erase()
    here.delete(large)
    assert (here.has(large), list(below.entries())) == (False, [])
    for key_id, secret, code in (
        (known[0], "wrong-secret", "SignatureDoesNotMatch"),
        ("AKIAUNKNOWN", known[1], "InvalidAccessKeyId"),
        (*other, "AccessDenied"),
    ):
        with pytest.raises(OperatorError, match=f"{site.bucket}.*{code}") as told:
            store(key_id, secret).put_bytes(b"hello")
        assert secret not in str(told.value)
    with pytest.raises(OperatorError, match="403"):
        store("AKIAUNKNOWN", "secret").check_writable(100)


def test_an_address_opens_one_object_for_some_minutes(site: Gate, tmp_path: Path) -> None:
    here = folder(site, tmp_path)
    here.put_bytes(b"hello")
    other = here.put_bytes(b"other")
    address = here.opened_by(HELLO, "application/octet-stream")
    found = httpx.get(address)
    assert (found.status_code, found.content) == (200, b"hello")
    assert found.headers["content-type"] == "application/octet-stream"
    longer = address.replace("X-Amz-Expires=300", "X-Amz-Expires=900")
    flipped = address[:-1] + ("1" if address.endswith("0") else "0")
    for changed in (address.replace(HELLO[7:], other[7:]), longer, flipped):
        assert httpx.get(changed).status_code == 403
    assert httpx.head(address).status_code == 403, "to get it, nothing else"
    site.late_s = 301
    assert httpx.get(address).status_code == 403


def _user(policy: str) -> tuple[str, str]:
    """Return the key id and secret of a user with these rights on the bucket's server."""
    from moto.core import DEFAULT_ACCOUNT_ID
    from moto.iam.models import iam_backends

    users, name = iam_backends[DEFAULT_ACCOUNT_ID]["aws"], uuid.uuid4().hex
    users.create_user("us-east-1", name)
    users.put_user_policy(name, "blobs", policy)
    key = users.create_access_key(name)
    return key.access_key_id, key.secret_access_key


def test_an_address_names_bucket_prefix_endpoint_and_region() -> None:
    found = BucketAddress.parse("s3://my-blobs/team/a?endpoint=http://127.0.0.1:9000&region=eu-central-1")
    assert found == BucketAddress(
        bucket="my-blobs", prefix="team/a", endpoint="http://127.0.0.1:9000", region="eu-central-1"
    )
    assert BucketAddress.parse("s3://my-blobs/").prefix == ""
    for text in (
        "",
        "my-blobs",
        "s3://",
        "s3://UPPER",
        "https://my-blobs",
        "s3://user:password@my-blobs",
        "s3://my-blobs/../other",
        "s3://my-blobs?endpoint=ftp://host",
        "s3://my-blobs?endpoint=https://user:password@host",
        "s3://my-blobs?secret=1",
        "s3://my-blobs?endpoint",
        "s3://my-blobs?endpoint=https://h:99999",
        "s3://my-blobs?endpoint=https://a b",
        "s3://my-blobs?region=a%0ab",
        "s3://user:secret@[my-blobs",
        "s3://user:secret@my-\u2100",
        "s3://my-blobs?secret",
    ):
        with pytest.raises(ValueError, match="expected s3://") as refused:
            BucketAddress.parse(text)
        assert "secret" not in str(refused.value) and "password" not in str(refused.value)


@pytest.mark.parametrize(
    ("status", "headers", "body"),
    [
        (301, {"location": "http://127.0.0.1:1/"}, b""),
        (
            200,
            {"last-modified": "some day"},
            b"<R><Contents><Key>k</Key><Size>x</Size></Contents>" + UNNAMED,
        ),
        (200, {}, b"<R><Contents><Size>1</Size></Contents><Upload><Key>k</Key></Upload>" + UNNAMED),
    ],
    ids=["redirects without end", "no numbers", "no keys"],
)
def test_what_answers_as_no_bucket_does_is_a_bucket_that_is_away(
    status: int, headers: dict[str, str], body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            for name, value in {**headers, "content-length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(b"" if self.command == "HEAD" else body)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as listener:
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        address = f"s3://blobs?endpoint=http://127.0.0.1:{listener.server_port}&region=r"
        bucket = Bucket(BucketAddress.parse(address), attempts=1)
        for ask in (
            lambda: bucket.head("k"),
            lambda: list(bucket.entries("")),
            lambda: bucket.names(""),
        ):
            with pytest.raises(BlobStoreError, match=r"Bucket 'blobs' failed at .*: its answer is not valid"):
                ask()
        listener.shutdown()

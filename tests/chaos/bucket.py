"""The bucket of `make chaos`. moto keeps it in memory, a folder keeps it between runs and for the audit."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.bucket_site import CREDENTIALS, Gate, bucket_server, gate


@contextmanager
def kept_bucket(folder: Path) -> Iterator[Gate]:
    """Load the folder into a new bucket. Save the bucket to the folder at the end."""
    lost = folder.with_name("bucket-in-memory")
    if lost.exists():
        raise RuntimeError(f"expected a run that was ended, got one that was killed with its bucket: {lost}")
    with bucket_server() as server, gate(server) as found:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            key = f"permille/{path.relative_to(folder)}"
            _client(found).put_object(Bucket=found.bucket, Key=key, Body=path.read_bytes())
        lost.touch()
        try:
            yield found
        finally:
            save(found, folder)
            lost.unlink()


def save(bucket: Gate, folder: Path) -> Path:
    """Replace the contents of the folder by all objects below the prefix. Return the folder."""
    bucket.faults.clear()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    client = _client(bucket)
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket.bucket):
        for found in page.get("Contents", ()):
            path = folder / found["Key"].removeprefix("permille/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(client.get_object(Bucket=bucket.bucket, Key=found["Key"])["Body"].read())
    return folder


def _client(bucket: Gate) -> Any:
    from botocore.config import Config
    from botocore.session import get_session

    return get_session().create_client(
        "s3",
        endpoint_url=bucket.endpoint,
        region_name="us-east-1",
        aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        config=Config(s3={"addressing_style": "path"}),
    )

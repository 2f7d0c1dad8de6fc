"""Push a file as a blob in small chunks, so that a test can kill this process between two of them.

python -m tests.registry.pushing oci://127.0.0.1:5000/models/assistant FILE CHUNK_BYTES
"""

import sys
from pathlib import Path

from permille.digests import digest_of
from permille_registry import client
from permille_registry.address import Address

if __name__ == "__main__":
    place, file, chunk = sys.argv[1:]
    data = Path(file).read_bytes()
    client.CHUNK_BYTES = int(chunk)  # type: ignore[misc]
    with client.Registry(Address.parse(place), "pull,push") as registry:
        print(registry.upload(digest_of(data), len(data), lambda begin, end: data[begin:end]))

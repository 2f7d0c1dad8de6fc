"""Addresses of repositories in OCI registries, such as `oci://registry.example.org/models/assistant:stable`.

Parts and their forms are those of the OCI distribution specification.
"""

import re
from dataclasses import dataclass

from permille.addresses import is_loopback
from permille.errors import InputError

_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_ADDRESS = re.compile(
    r"oci://(?P<host>[A-Za-z0-9.-]+|\[[0-9a-fA-F:]+\])(?P<port>:[0-9]{1,5})?"
    rf"/(?P<name>{_PART}(?:/{_PART})*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?",
    re.ASCII,
)
_MOST_LETTERS = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A repository in a registry, and perhaps a tag.

    Attributes:
        registry: host and port of the registry.
        name: path of the repository.
        tag: the tag, or "" if there is none.
    """

    registry: str
    name: str
    tag: str = ""

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Parse an address.

        Example:
            >>> Address.parse("oci://127.0.0.1:5000/models/assistant:3").name
            'models/assistant'

        Raises:
            InputError: the text is not an address.
        """
        found = _ADDRESS.fullmatch(text)
        if found is None or len(found["name"]) > _MOST_LETTERS:
            raise InputError(
                f"{text!r:.300} is not the address of a repository. Write one like "
                "oci://registry.example.org/models/assistant, in lower case. It may end with :TAG."
            )
        return cls(registry=found["host"] + (found["port"] or ""), name=found["name"], tag=found["tag"] or "")

    def __str__(self) -> str:
        return f"oci://{self.registry}/{self.name}" + (f":{self.tag}" if self.tag else "")

    @property
    def url(self) -> str:
        """The base URL of the registry: https, or http for a registry on this machine."""
        host = re.sub(r":[0-9]+$", "", self.registry).strip("[]")
        return f"{'http' if is_loopback(host) else 'https'}://{self.registry}"

    def blob(self, digest: str) -> str:
        """Return the path of a blob.

        Example:
            >>> Address.parse("oci://127.0.0.1/a").blob("sha256:00")
            '/v2/a/blobs/sha256:00'
        """
        return f"/v2/{self.name}/blobs/{digest}"

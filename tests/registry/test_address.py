"""Addresses of repositories."""

import pytest

from permille.errors import InputError
from permille_registry.address import Address


@pytest.mark.parametrize(
    ("text", "url", "name", "tag"),
    [
        ("oci://registry.example.org/a", "https://registry.example.org", "a", ""),
        (
            "oci://Registry.example.org:5000/a/b_c/d--e:V1.x",
            "https://Registry.example.org:5000",
            "a/b_c/d--e",
            "V1.x",
        ),
        ("oci://127.0.0.1:5000/a", "http://127.0.0.1:5000", "a", ""),
        ("oci://localhost/a", "http://localhost", "a", ""),
        ("oci://[::1]:5000/a", "http://[::1]:5000", "a", ""),
        ("oci://127.0.0.1.evil.example/a", "https://127.0.0.1.evil.example", "a", ""),
    ],
)
def test_an_address_has_a_registry_a_name_and_a_tag(text: str, url: str, name: str, tag: str) -> None:
    address = Address.parse(text)
    assert (address.url, address.name, address.tag, str(address)) == (url, name, tag, text)


@pytest.mark.parametrize(
    "text",
    [
        *("", "registry.example.org/a", "https://registry.example.org/a", "oci://registry.example.org"),
        *("oci://registry.example.org/", "oci://registry.example.org/A", "oci://registry.example.org/a/../b"),
        *("oci://anna:secret@registry.example.org/a", "oci://a/b?c", "oci://a/b#c", "oci://a/b@sha256:00"),
        *("oci://a/b:", "oci://a/b:-", "oci://a:123456/b", "oci://a/b\n", "oci://a/" + "b" * 256, "oci:///a"),
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="not the address of a repository"):
        Address.parse(text)

"""Byte ranges as RFC 9110 has them."""

import pytest

from permille_service.packages.content import parse_range
from permille_service.problems import ApiError


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("bytes=0-0", (0, 1)),
        ("bytes=0-", (0, 10)),
        ("bytes=3-5", (3, 6)),
        ("bytes=3-500", (3, 10)),
        ("bytes=-3", (7, 10)),
        ("bytes=-300", (0, 10)),
        ("bytes=5-3", None),
        ("bytes=-", None),
        ("bytes=0-1,3-4", None),
        ("items=0-1", None),
        ("bytes=a-b", None),
        ("bytes=٣-٥", None),
    ],
)
def test_range_is_half_open_and_other_headers_are_ignored(
    header: str, expected: tuple[int, int] | None
) -> None:
    assert parse_range(header, 10) == expected


@pytest.mark.parametrize(
    ("header", "size"), [("bytes=10-", 10), ("bytes=99-100", 10), ("bytes=-0", 10), ("bytes=0-", 0)]
)
def test_range_outside_of_the_content_is_not_satisfiable(header: str, size: int) -> None:
    with pytest.raises(ApiError) as caught:
        parse_range(header, size)
    assert caught.value.status_code == 416
    assert caught.value.headers == {"Content-Range": f"bytes */{size}"}
